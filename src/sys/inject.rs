//! Puts the resident into a statically linked program that was executed and has not begun: the program itself, stopped, is made to map it, by system
//! calls at the place of its first instruction. Then it begins in the resident (`static-bootstrap/resident/src/start.rs`), and finds everything as the kernel left it.

use std::ffi::CStr;
use std::io;

use nix::unistd::Pid;

/// In `pid`, a child that is stopped in its first instruction and traced by us. A dynamically linked program is left as it is. After an error it must be killed.
///
/// # Errors
/// The resident cannot be read or mapped, or the program is none for this processor (ENOEXEC).
#[cfg(target_arch = "x86_64")]
pub fn inject(pid: Pid, resident: &CStr) -> io::Result<()> {
    x86_64::inject(pid, resident)
}

/// See above.
///
/// # Errors
/// Always: no resident is built for this processor.
#[cfg(not(target_arch = "x86_64"))]
pub fn inject(_: Pid, _: &CStr) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::ffi::{CStr, OsStr, c_void};
    use std::fs;
    use std::io;
    use std::os::unix::ffi::OsStrExt;
    use std::time::{Duration, Instant};

    use nix::errno::Errno;
    use nix::libc::{self, user_regs_struct};
    use nix::sys::ptrace;
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
    use nix::unistd::Pid;

    use crate::sys::page::PAGE;
    use crate::sys::resident::PLACE;
    use crate::sys::syscall::nr;

    /// What it does for us takes microseconds.
    const PATIENCE: Duration = Duration::from_secs(5);
    const WORD: usize = size_of::<u64>();
    /// What a stopped program's code segment is in 64-bit mode.
    const LONG_MODE: u64 = 0x33;
    /// syscall; int3
    const CALL: u64 = 0xcc_050f;
    const CALL_BITS: u64 = 0xff_ffff;
    const PAGE_MASK: u64 = PAGE as u64 - 1;

    pub(super) fn inject(pid: Pid, resident: &CStr) -> io::Result<()> {
        if !begins_alone(pid)? {
            return Ok(());
        }
        let before = ptrace::getregs(pid)?;
        if before.cs != LONG_MODE {
            return Err(Errno::ENOEXEC.into());
        }
        let file = fs::read(OsStr::from_bytes(resident.to_bytes()))?;
        let text = ptrace::read(pid, before.rip as *mut c_void)?.cast_unsigned();
        let mut tracee = Tracee { pid, before, signals: Vec::new() };
        tracee.write(before.rip, text & !CALL_BITS | CALL)?;
        tracee.map(resident, &file)?;
        tracee.write(before.rip, text)?;
        let entry = PLACE + word(&file, 24)?;
        ptrace::setregs(pid, user_regs_struct { rip: entry, rax: before.rip, orig_rax: u64::MAX, ..before })?;
        tracee.signals.into_iter().try_for_each(|signal| kill(pid, signal))?;
        Ok(())
    }

    /// Whether it has no dynamic linker.
    fn begins_alone(pid: Pid) -> io::Result<bool> {
        const AT_BASE: u64 = 7;
        let auxiliary = fs::read(format!("/proc/{pid}/auxv"))?;
        let base = (0..auxiliary.len() / (2 * WORD)).map(|nth| nth * 2 * WORD);
        let base = base.filter(|at| word(&auxiliary, *at).is_ok_and(|kind| kind == AT_BASE));
        base.map(|at| word(&auxiliary, at + WORD)).try_fold(true, |alone, base| Ok(alone && base? == 0))
    }

    fn word(bytes: &[u8], at: usize) -> io::Result<u64> {
        let found = bytes.get(at..at + WORD).and_then(|bytes| bytes.try_into().ok());
        found.map(u64::from_le_bytes).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// The program.
    struct Tracee {
        pid: Pid,
        before: user_regs_struct,
        /// That came meanwhile.
        signals: Vec<Signal>,
    }

    impl Tracee {
        /// Maps the file's segments (elf(5)) from [`PLACE`] on.
        fn map(&mut self, path: &CStr, file: &[u8]) -> io::Result<()> {
            const LOAD: u64 = 1;
            /// Of the stack, below what is in use.
            const RED_ZONE: u64 = 128;
            const PRIVATE: u64 = 2;
            const ANONYMOUS: u64 = 0x20;
            const FIXED_NOREPLACE: u64 = 0x10_0000;
            let path = path.to_bytes_with_nul();
            let at = (self.before.rsp - RED_ZONE - path.len() as u64) & !15;
            for (nth, part) in path.chunks(WORD).enumerate() {
                let mut bytes = [0; WORD];
                bytes[..part.len()].copy_from_slice(part);
                self.write(at + (nth * WORD) as u64, u64::from_le_bytes(bytes))?;
            }
            let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
            let fd = self.call(nr::OPENAT, [i64::from(libc::AT_FDCWD).cast_unsigned(), at, flags, 0, 0, 0])?;
            let (first, count) = (word(file, 32)? as usize, word(file, 56)? & 0xffff);
            for header in (0..count as usize).map(|nth| first + nth * 56) {
                let kind = word(file, header)?;
                if kind & 0xffff_ffff != LOAD {
                    continue;
                }
                let [offset, address] = [word(file, header + 8)?, word(file, header + 16)?];
                let [in_file, in_memory] = [word(file, header + 32)?, word(file, header + 40)?];
                // PF_R, PF_W, PF_X
                let flags = kind >> 32;
                let protection = (flags & 4) >> 2 | flags & 2 | (flags & 1) << 2;
                let up = |address: u64| (address + PAGE_MASK) & !PAGE_MASK;
                let (start, filled, end) = (address & !PAGE_MASK, up(address + in_file), up(address + in_memory));
                let fixed = PRIVATE | FIXED_NOREPLACE;
                let parts = [
                    [start, filled - start, protection, fixed, fd, offset & !PAGE_MASK],
                    [filled, end - filled, protection, fixed | ANONYMOUS, u64::MAX, 0],
                ];
                for [start, len, protection, flags, fd, offset] in parts.into_iter().filter(|part| part[1] > 0) {
                    let args = [PLACE + start, len, protection, flags, fd, offset];
                    // Kernels that do not know the flag take the address for a wish.
                    if self.call(nr::MMAP, args)? != args[0] {
                        return Err(Errno::EEXIST.into());
                    }
                }
            }
            self.call(nr::CLOSE, [fd, 0, 0, 0, 0, 0]).map(drop)
        }

        fn write(&self, at: u64, value: u64) -> io::Result<()> {
            Ok(ptrace::write(self.pid, at as *mut c_void, value.cast_signed())?)
        }

        /// Has it make a system call.
        fn call(&mut self, number: usize, args: [u64; 6]) -> io::Result<u64> {
            let [rdi, rsi, rdx, r10, r8, r9] = args;
            let regs =
                user_regs_struct { rax: number as u64, orig_rax: u64::MAX, rdi, rsi, rdx, r10, r8, r9, ..self.before };
            ptrace::setregs(self.pid, regs)?;
            ptrace::cont(self.pid, None)?;
            while let signal = self.stop()?
                && signal != Signal::SIGTRAP
            {
                self.signals.push(signal);
                ptrace::cont(self.pid, None)?;
            }
            let result = ptrace::getregs(self.pid)?.rax;
            let errno = result.wrapping_neg();
            if (1..4096).contains(&errno) { Err(io::Error::from_raw_os_error(errno as i32)) } else { Ok(result) }
        }

        /// Waits until it is stopped. If it ends, who reaps it is told so as ever.
        fn stop(&self) -> io::Result<Signal> {
            let begun = Instant::now();
            let look = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let take = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
            loop {
                match waitid(Id::Pid(self.pid), look) {
                    Ok(WaitStatus::PtraceEvent(_, signal, _) | WaitStatus::Stopped(_, signal)) => {
                        return Ok(waitid(Id::Pid(self.pid), take).map(|_| signal)?);
                    }
                    Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => {}
                    Ok(_) => return Err(Errno::ESRCH.into()),
                    Err(errno) => return Err(errno.into()),
                }
                if begun.elapsed() > PATIENCE {
                    return Err(Errno::ETIMEDOUT.into());
                }
                // It takes less than to be woken.
                if begun.elapsed() < Duration::from_millis(1) {
                    std::thread::yield_now();
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}
