//! Which arguments of system calls are addresses of memory that the kernel reads or writes: all others may have any value, and what a call does not take is
//! whatever was left in the register. By the numbers of x86-64, as Linux 6.18 has them.
//!
//! Not those of what goes on elsewhere or on another stack (`rt_sigreturn`, `clone`, ...), nor of what only says where memory is (`munmap`, `madvise`, ...).

/// Arguments of a system call.
pub const ARGUMENTS: usize = 6;
/// Calls from here on are not known.
pub const UNKNOWN: usize = 470;

/// Bits of the arguments, and the calls of which these are addresses. `ioctl`, `fcntl`, `ptrace`, `keyctl` and `semctl` have some that may be, and the first that `prctl` has
/// beside what it is to do: libraries pass on what was left in registers as its others.
const CALLS: [(u8, &[u16]); 27] = [
    (
        0b000001,
        &[
            2, 7, 21, 22, 63, 67, 76, 79, 80, 83, 84, 85, 87, 90, 92, 94, 99, 100, 127, 130, 133, 149, 159, 161, 163,
            166, 167, 168, 170, 171, 176, 201, 205, 211, 218, 241, 273, 293, 298, 318, 319, 325, 334, 430, 444, 454,
            456,
        ],
    ),
    (
        0b000010,
        &[
            0, 1, 5, 17, 18, 19, 20, 30, 36, 42, 46, 47, 49, 65, 69, 70, 78, 97, 98, 103, 115, 116, 136, 138, 142, 143,
            148, 154, 157, 158, 160, 196, 199, 206, 217, 224, 227, 228, 229, 232, 238, 244, 254, 257, 258, 259, 260,
            263, 268, 269, 278, 282, 287, 289, 295, 296, 304, 305, 307, 313, 314, 315, 321, 327, 328, 425, 428, 433,
            439, 440, 452, 460,
        ],
    ),
    (0b000011, &[4, 6, 35, 82, 86, 88, 89, 96, 131, 132, 137, 155, 164, 194, 195, 197, 198, 235, 457, 458, 461]),
    (0b000100, &[16, 27, 31, 40, 71, 72, 129, 144, 203, 204, 209, 246, 317, 424, 427, 445]),
    (0b000101, &[175, 266]),
    (
        0b000110,
        &[13, 14, 38, 43, 51, 52, 190, 193, 210, 222, 245, 261, 262, 267, 274, 280, 288, 437, 451, 459, 468, 469],
    ),
    (0b000111, &[59, 118, 120, 128, 188, 189, 191, 192, 248, 249, 309]),
    (0b001000, &[53, 54, 66, 169, 233, 237, 297, 320, 443]),
    (0b001001, &[240, 449]),
    (0b001010, &[61, 179, 220, 264, 265, 275, 310, 311, 316, 326, 429, 442, 465, 466, 467]),
    (0b001011, &[239]),
    (0b001100, &[101, 223, 230, 256, 286, 302, 431]),
    (0b001101, &[271]),
    (0b001110, &[303, 322]),
    (0b010000, &[301, 426]),
    (0b010001, &[455]),
    (0b010010, &[44, 242, 281, 299, 332]),
    (0b010100, &[247]),
    (0b010111, &[165]),
    (0b011000, &[55, 208]),
    (0b011001, &[202]),
    (0b011010, &[243, 441, 463, 464]),
    (0b011100, &[279]),
    (0b011110, &[23, 250]),
    (0b110010, &[45]),
    (0b111000, &[333]),
    (0b111110, &[270]),
];

/// The calls of which this argument is an address.
pub fn calls_with(argument: usize) -> impl Iterator<Item = usize> {
    CALLS
        .into_iter()
        .filter(move |(bits, _)| bits >> argument & 1 != 0)
        .flat_map(|(_, calls)| calls)
        .map(|call| usize::from(*call))
}

/// How many bytes the kernel reads or writes at most at each argument, where others of the call say it; 0: they do not, or it is a list of addresses.
pub fn lengths(call: usize, args: &[usize; ARGUMENTS]) -> [usize; ARGUMENTS] {
    /// What stands before the bytes of a System V message.
    const TYPE: usize = 8;
    let (argument, count, each, more) = match call {
        // read, write, pread64, pwrite64, sendto, recvfrom, getdents, readlink, listxattr and its likes, getdents64, mq_timedsend, mq_timedreceive
        0 | 1 | 17 | 18 | 44 | 45 | 78 | 89 | 194..=196 | 217 | 242 | 243 => (1, 2, 1, 0),
        // msgsnd, msgrcv
        69 | 70 => (1, 2, 1, TYPE),
        // getcwd, getrandom
        79 | 318 => (0, 1, 1, 0),
        // setxattr and getxattr and their likes, readlinkat
        188..=193 | 267 => (2, 3, 1, 0),
        // poll, ppoll
        7 | 271 => (0, 1, 8, 0),
        // epoll_wait, epoll_pwait, epoll_pwait2
        232 | 281 | 441 => (1, 2, 12, 0),
        // io_getevents, io_pgetevents
        208 | 333 => (3, 2, 32, 0),
        _ => return [0; ARGUMENTS],
    };
    let mut all = [0; ARGUMENTS];
    all[argument] = args[count].saturating_mul(each).saturating_add(more);
    all
}
