//! The symbols by which a parallel debugger finds the processes of a job: "The MPIR Process Acquisition Interface", version 1.0, of the
//! MPI Forum. It reads and writes them from outside, while this process is stopped.
//!
//! Written in assembler, because the optimiser would remove what no code of ours reads or make it local; `mpir.list` keeps the names in the
//! stripped binary. Only directives and `ret`, which is one instruction on every processor meant here.
#![allow(unsafe_code, reason = "memory that a debugger writes to; assembler")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::{Mutex, PoisonError};

std::arch::global_asm!(
    ".pushsection .text.mpir, \"ax\", %progbits",
    ".balign 16",
    ".globl MPIR_Breakpoint",
    ".type MPIR_Breakpoint, %function",
    "MPIR_Breakpoint:",
    "ret",
    ".size MPIR_Breakpoint, . - MPIR_Breakpoint",
    ".popsection",
    ".pushsection .data.mpir, \"aw\", %progbits",
    ".balign 8",
    ".globl MPIR_proctable",
    ".type MPIR_proctable, %object",
    ".size MPIR_proctable, 8",
    "MPIR_proctable: .zero 8",
    ".globl MPIR_debug_abort_string",
    ".type MPIR_debug_abort_string, %object",
    ".size MPIR_debug_abort_string, 8",
    "MPIR_debug_abort_string: .zero 8",
    ".globl MPIR_proctable_size",
    ".type MPIR_proctable_size, %object",
    ".size MPIR_proctable_size, 4",
    "MPIR_proctable_size: .zero 4",
    ".globl MPIR_being_debugged",
    ".type MPIR_being_debugged, %object",
    ".size MPIR_being_debugged, 4",
    "MPIR_being_debugged: .zero 4",
    ".globl MPIR_debug_state",
    ".type MPIR_debug_state, %object",
    ".size MPIR_debug_state, 4",
    "MPIR_debug_state: .zero 4",
    // That these are there says: this process is none of the job's, its processes are stopped before main, and are released by it
    // whether the debugger attached to them or not.
    ".globl MPIR_i_am_starter",
    ".type MPIR_i_am_starter, %object",
    ".size MPIR_i_am_starter, 4",
    "MPIR_i_am_starter: .zero 4",
    ".globl MPIR_acquired_pre_main",
    ".type MPIR_acquired_pre_main, %object",
    ".size MPIR_acquired_pre_main, 4",
    "MPIR_acquired_pre_main: .zero 4",
    ".globl MPIR_partial_attach_ok",
    ".type MPIR_partial_attach_ok, %object",
    ".size MPIR_partial_attach_ok, 4",
    "MPIR_partial_attach_ok: .zero 4",
    ".popsection",
);

/// `MPIR_PROCDESC`.
#[repr(C)]
struct Process {
    host_name: *const c_char,
    executable_name: *const c_char,
    pid: c_int,
}

unsafe extern "C" {
    static mut MPIR_being_debugged: c_int;
    static mut MPIR_debug_state: c_int;
    static mut MPIR_debug_abort_string: *const c_char;
    static mut MPIR_proctable: *const Process;
    static mut MPIR_proctable_size: c_int;
    fn MPIR_Breakpoint();
}

/// `MPIR_DEBUG_SPAWNED`: the table holds the job.
const SPAWNED: c_int = 1;
/// `MPIR_DEBUG_ABORTING`: the job is being ended.
const ABORTING: c_int = 2;

/// What the symbols point to: the table and its strings.
struct Table {
    _processes: Box<[Process]>,
    _strings: Vec<CString>,
}

// SAFETY: its pointers lead into its own strings, which nobody changes.
unsafe impl Send for Table {}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);
static ABORT: Mutex<Option<CString>> = Mutex::new(None);

/// A debugger started this process and wants to see its job's processes.
pub fn is_debugged() -> bool {
    // SAFETY: an aligned word of our own; volatile, because a debugger changes it from outside.
    unsafe { (&raw const MPIR_being_debugged).read_volatile() != 0 }
}

/// Fills the table with (host, pid) by rank, all of one executable, and calls `MPIR_Breakpoint`: where a debugger has set its
/// breakpoint, this process stops in there until it is continued.
pub fn show(executable: &CStr, processes: &[(&str, i32)]) {
    let mut hosts = std::collections::BTreeMap::new();
    for (host, _) in processes {
        hosts.entry(*host).or_insert_with(|| CString::new(*host).unwrap_or_default());
    }
    let executable = executable.to_owned();
    let process = |(host, pid): &(&str, i32)| Process {
        host_name: hosts[host].as_ptr(),
        executable_name: executable.as_ptr(),
        pid: *pid,
    };
    let table: Box<[Process]> = processes.iter().map(process).collect();
    let mut shown = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: aligned words of our own, written by holders of the lock only. What they point to stays until the next table is in place
    // (moving a box or a string does not move what it points to); debuggers read it only while this process is stopped.
    unsafe {
        (&raw mut MPIR_proctable).write_volatile(table.as_ptr());
        (&raw mut MPIR_proctable_size).write_volatile(c_int::try_from(table.len()).unwrap_or(c_int::MAX));
        (&raw mut MPIR_debug_state).write_volatile(SPAWNED);
    }
    let strings = hosts.into_values().chain([executable]).collect();
    *shown = Some(Table { _processes: table, _strings: strings });
    drop(shown);
    // SAFETY: returns at once, and touches nothing.
    unsafe { MPIR_Breakpoint() };
}

/// Tells a debugger that the job is being ended, and why.
pub fn aborting(why: &str) {
    let why = CString::new(why.replace('\0', " ")).unwrap_or_default();
    let mut shown = ABORT.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: as in `show`.
    unsafe {
        (&raw mut MPIR_debug_abort_string).write_volatile(why.as_ptr());
        (&raw mut MPIR_debug_state).write_volatile(ABORTING);
    }
    *shown = Some(why);
    drop(shown);
    // SAFETY: as in `show`.
    unsafe { MPIR_Breakpoint() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_what_a_debugger_reads() {
        assert!(!is_debugged());
        show(c"/bin/app", &[("a", 7), ("b", 8), ("a", 9)]);
        // SAFETY: the table that was just made, read in this thread; no other test makes one.
        let (size, state, processes) = unsafe {
            let size = (&raw const MPIR_proctable_size).read_volatile();
            let table = (&raw const MPIR_proctable).read_volatile();
            (size, (&raw const MPIR_debug_state).read_volatile(), std::slice::from_raw_parts(table, 3))
        };
        assert_eq!((size, state), (3, SPAWNED));
        let read = |process: &Process| {
            // SAFETY: the strings live in the table.
            let text = |at| unsafe { CStr::from_ptr(at) }.to_str().unwrap();
            (text(process.host_name), text(process.executable_name), process.pid)
        };
        assert_eq!(
            processes.iter().map(read).collect::<Vec<_>>(),
            [("a", "/bin/app", 7), ("b", "/bin/app", 8), ("a", "/bin/app", 9)]
        );
    }
}
