//! Which files concern us: regular ones, on file systems that hosts share and on FUSE, or below the directories that the user named.

use core::sync::atomic::{AtomicU64, Ordering};

use sys::resident::files;

use super::inside::Inside;
use super::kernel::{failed, nr, raw};
use super::worker;
use crate::settings;

/// Of network file systems and FUSE (statfs(2)): NFS, FUSE, Lustre, GPFS, CIFS, SMB2, SMB, 9P, Ceph, BeeGFS, PVFS2, AFS, Coda.
const SHARED: [u32; 13] = [
    0x6969,
    0x6573_5546,
    0x0bd0_0bd0,
    0x4750_4653,
    0xff53_4d42,
    0xfe53_4d42,
    0x517b,
    0x0102_1997,
    0x00c3_6400,
    0x1983_0326,
    0x2003_0528,
    0x5346_414f,
    0x7375_7245,
];
/// Never: proc, sysfs, debugfs, tracefs, cgroup, cgroup2, securityfs, configfs, pstore, bpf.
const KERNEL: [u32; 10] = [
    0x9fa0,
    0x6265_6572,
    0x6462_6720,
    0x7472_6163,
    0x27_e0eb,
    0x6367_7270,
    0x7363_6673,
    0x6265_6570,
    0x6165_676c,
    0xcafe_4a11,
];

const FORMAT: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER: u32 = 0o020_000;
/// /dev/zero.
const ZERO: [u32; 2] = [1, 5];
/// Devices that are mapped and reach no other host.
const LOCAL: [&[u8]; 3] = [b"/dev/nvidia", b"/dev/dri/", b"/dev/kfd"];
const AT_FDCWD: i32 = -100;

/// Devices that were asked about: number, and whether files on it concern us, in the lowest bit.
static DEVICES: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// Words of `struct statx`: mode at 28, number at 32, time of change at 112, device that it is at 128, device that it is on at 136.
#[repr(C, align(8))]
struct Statx([u32; 64]);

fn statx(fd: usize) -> Option<Statx> {
    /// AT_EMPTY_PATH, AT_STATX_DONT_SYNC; type, time of change and number.
    const FLAGS: usize = 0x1000 | 0x4000;
    const MASK: usize = 0x1 | 0x40 | 0x100;
    let mut found = Statx([0; 64]);
    // SAFETY: a string, and room for the structure.
    let result = unsafe { raw(nr::STATX, [fd, c"".as_ptr() as usize, FLAGS, MASK, &raw mut found as usize, 0]) };
    (result == 0).then_some(found)
}

/// Device and number of a file that concerns us.
pub(super) fn of(fd: usize) -> Option<(u64, u64)> {
    let Statx(words) = statx(fd)?;
    if words[7] & FORMAT != REGULAR {
        return None;
    }
    let device = u64::from(words[34]) << 32 | u64::from(words[35]);
    let number = u64::from(words[9]) << 32 | u64::from(words[8]);
    let named = settings::get().files & files::NAMED != 0;
    // SAFETY: room for a `struct statfs`.
    let of_fd = |found: usize| unsafe { raw(nr::FSTATFS, [fd, found, 0, 0, 0, 0]) };
    (if named {
        is_named(fd)? && concerns(device, of_fd) && worker::attach()
    } else {
        concerns(device, of_fd) && worker::attach()
    })
    .then_some((device, number))
}

/// What stat(2) and its likes tell.
pub(super) struct Told {
    pub(super) device: u64,
    pub(super) number: u64,
    pub(super) is_regular: bool,
}

/// Of stat(2).
pub(super) fn of_stat(stat: *const u64) -> Told {
    // SAFETY: a `struct stat` that the kernel filled.
    let [device, number, _, mode] = unsafe { *stat.cast::<[u64; 4]>() };
    let major = device >> 8 & 0xfff | device >> 32 & !0xfff;
    let minor = device & 0xff | device >> 12 & 0xffff_ff00;
    let is_regular = mode as u32 & FORMAT == REGULAR;
    Told { device: (major & 0xffff_ffff) << 32 | minor & 0xffff_ffff, number, is_regular }
}

/// Of statx(2).
pub(super) fn of_statx(statx: *const u32) -> Told {
    // SAFETY: as above.
    let at = |word: usize| u64::from(unsafe { *statx.add(word) });
    Told { device: at(34) << 32 | at(35), number: at(9) << 32 | at(8), is_regular: at(7) as u32 & FORMAT == REGULAR }
}

/// Takes part if a file that was told of, below a directory or the directory itself, may concern us: others may have something pending there.
pub(super) fn join(told: &Told, directory: usize, path: usize) {
    if !told.is_regular || worker::head().is_some() {
        return;
    }
    let named = settings::get().files & files::NAMED != 0;
    let by_path = |found: usize| {
        // SAFETY: the program's path, which the kernel has just read, or a descriptor; and room for a `struct statfs`.
        unsafe {
            if path != 0 && (directory as i32 == AT_FDCWD || *(path as *const u8) == b'/') {
                raw(nr::STATFS, [path, found, 0, 0, 0, 0])
            } else {
                raw(nr::FSTATFS, [directory, found, 0, 0, 0, 0])
            }
        }
    };
    if named || concerns(told.device, by_path) {
        let _inside = Inside::enter();
        worker::attach();
    }
}

/// Takes part if the user named directories: which files are below them is not known before.
pub(super) fn join_named() {
    if settings::get().files & files::NAMED != 0 && worker::head().is_none() {
        let _inside = Inside::enter();
        worker::attach();
    }
}

/// Whether files of this file system concern us; `statfs` asks the kernel about it.
fn concerns(device: u64, statfs: impl FnOnce(usize) -> isize) -> bool {
    let wanted = (device + 1) << 1;
    for slot in &DEVICES {
        let word = slot.load(Ordering::Relaxed);
        if word & !1 == wanted {
            return word & 1 != 0;
        }
        if word == 0 {
            let yes = asks(statfs);
            slot.store(wanted | u64::from(yes), Ordering::Relaxed);
            return yes;
        }
    }
    asks(statfs)
}

fn asks(statfs: impl FnOnce(usize) -> isize) -> bool {
    let mut found = [0u64; 15];
    let result = statfs(found.as_mut_ptr() as usize);
    let kind = found[0] as u32;
    let named = settings::get().files & files::NAMED != 0;
    !failed(result) && if named { !KERNEL.contains(&kind) } else { SHARED.contains(&kind) }
}

/// When a file's content was changed, in seconds since 1970, as far as is known here.
pub(super) fn changed(fd: usize) -> Option<u64> {
    statx(fd).map(|Statx(words)| u64::from(words[28]) | u64::from(words[29]) << 32)
}

/// Whether what is stored in a mapping of it may be seen on other hosts without a system call.
pub(super) fn tells(fd: usize) -> bool {
    const GETFL: usize = 3;
    const WRITES: isize = 3;
    let Some(Statx(words)) = statx(fd) else { return false };
    match words[7] & FORMAT {
        CHARACTER => {
            let mut path = [0; 4096];
            let path = path_of(fd, &mut path).unwrap_or_default();
            words[32..34] != ZERO && !LOCAL.iter().any(|name| path.starts_with(name))
        }
        // SAFETY: integers.
        REGULAR if unsafe { raw(nr::FCNTL, [fd, GETFL, 0, 0, 0, 0]) } & WRITES != 0 => {
            let mut found = [0u64; 15];
            // SAFETY: room for a `struct statfs`.
            let result = unsafe { raw(nr::FSTATFS, [fd, found.as_mut_ptr() as usize, 0, 0, 0, 0]) };
            !failed(result) && SHARED.contains(&(found[0] as u32)) || is_named(fd) == Some(true)
        }
        _ => false,
    }
}

/// Whether its path is below a directory that the user named. `None`: there is no telling.
fn is_named(fd: usize) -> Option<bool> {
    let mut path = [0; 4096];
    let path = path_of(fd, &mut path)?;
    Some(settings::get().roots.split(|byte| *byte == 0).filter(|root| !root.is_empty()).any(|root| {
        path.starts_with(root) && (root.ends_with(b"/") || path.get(root.len()).is_none_or(|byte| *byte == b'/'))
    }))
}

/// The path of an open file.
fn path_of(fd: usize, path: &mut [u8; 4096]) -> Option<&[u8]> {
    let mut link = *b"/proc/self/fd/\0\0\0\0\0\0\0\0";
    let (mut rest, mut digits) = (fd, [0u8; 7]);
    let mut count = 0;
    while count == 0 || rest > 0 {
        digits[count] = b'0' + (rest % 10) as u8;
        rest /= 10;
        count += 1;
    }
    for (nth, digit) in digits[..count].iter().rev().enumerate() {
        link[14 + nth] = *digit;
    }
    // SAFETY: a string, and room.
    let len = unsafe { raw(nr::READLINK, [link.as_ptr() as usize, path.as_mut_ptr() as usize, path.len(), 0, 0, 0]) };
    if failed(len) { None } else { Some(&path[..len as usize]) }
}
