//! Which files concern us: regular ones, on file systems that hosts share and on FUSE, or below the directories that the user named.

use core::sync::atomic::{AtomicU64, Ordering};

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

/// Devices that were asked about: number, and whether files on it concern us, in the lowest bit.
static DEVICES: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// Words of `struct statx`: mode at 28, number at 32, device at 136 and 140.
#[repr(C, align(8))]
struct Statx([u32; 64]);

fn statx(fd: usize) -> Option<Statx> {
    /// AT_EMPTY_PATH, AT_STATX_DONT_SYNC; type and number.
    const FLAGS: usize = 0x1000 | 0x4000;
    const MASK: usize = 0x1 | 0x100;
    let mut found = Statx([0; 64]);
    // SAFETY: a string, and room for the structure.
    let result = unsafe { raw(nr::STATX, [fd, c"".as_ptr() as usize, FLAGS, MASK, &raw mut found as usize, 0]) };
    (result == 0).then_some(found)
}

/// Device and number of a file that concerns us.
pub(super) fn of(fd: usize) -> Option<(u64, u64)> {
    const FORMAT: u32 = 0o170_000;
    const REGULAR: u32 = 0o100_000;
    let Statx(words) = statx(fd)?;
    if words[7] & FORMAT != REGULAR {
        return None;
    }
    let device = u64::from(words[34]) << 32 | u64::from(words[35]);
    let number = u64::from(words[9]) << 32 | u64::from(words[8]);
    let named = settings::get().files > 1;
    (if named {
        worker::attach() && is_named(fd)? && concerns(fd, device)
    } else {
        concerns(fd, device) && worker::attach()
    })
    .then_some((device, number))
}

/// Of what stat(2) and its likes tell.
pub(super) fn of_stat(stat: *const u64) -> (u64, u64) {
    // SAFETY: a `struct stat` that the kernel filled.
    let [device, number] = unsafe { *stat.cast::<[u64; 2]>() };
    let major = device >> 8 & 0xfff | device >> 32 & !0xfff;
    let minor = device & 0xff | device >> 12 & 0xffff_ff00;
    ((major & 0xffff_ffff) << 32 | minor & 0xffff_ffff, number)
}

/// Of what statx(2) tells.
pub(super) fn of_statx(statx: *const u32) -> (u64, u64) {
    // SAFETY: as above.
    let at = |word: usize| u64::from(unsafe { *statx.add(word) });
    (at(34) << 32 | at(35), at(9) << 32 | at(8))
}

fn concerns(fd: usize, device: u64) -> bool {
    let wanted = (device + 1) << 1;
    for slot in &DEVICES {
        let word = slot.load(Ordering::Relaxed);
        if word & !1 == wanted {
            return word & 1 != 0;
        }
        if word == 0 {
            let yes = asks(fd);
            slot.store(wanted | u64::from(yes), Ordering::Relaxed);
            return yes;
        }
    }
    asks(fd)
}

fn asks(fd: usize) -> bool {
    let mut found = [0u64; 15];
    // SAFETY: room for a `struct statfs`.
    let result = unsafe { raw(nr::FSTATFS, [fd, found.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    let kind = found[0] as u32;
    !failed(result) && if settings::get().files < 2 { SHARED.contains(&kind) } else { !KERNEL.contains(&kind) }
}

/// Whether its path is below a directory that the user named. `None`: there is no telling.
fn is_named(fd: usize) -> Option<bool> {
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
    let mut path = [0u8; 4096];
    // SAFETY: a string, and room.
    let len = unsafe { raw(nr::READLINK, [link.as_ptr() as usize, path.as_mut_ptr() as usize, path.len(), 0, 0, 0]) };
    if failed(len) {
        return None;
    }
    let path = &path[..len as usize];
    Some(worker::roots().split(|byte| *byte == 0).filter(|root| !root.is_empty()).any(|root| {
        path.starts_with(root) && (root.ends_with(b"/") || path.get(root.len()).is_none_or(|byte| *byte == b'/'))
    }))
}
