//! Native calls in an audited program of glibc before 2.35. There the presence of an auditor makes the linker put its profiling entry
//! into every object's global offset table, and each call between objects goes through it, for ever. The third word of that table is the
//! entry (System V ABI); the linker's other entry, which binds a name once and is gone, stands in this object's own table, because
//! auditors are not audited.

use core::arch::global_asm;

use super::LinkMap;

/// Elf64_Dyn's tags (gABI, chapter 5).
const DT_NULL: usize = 0;
const DT_PLTRELSZ: usize = 2;
const DT_PLTGOT: usize = 3;
/// The linker's two entries are this close to each other, and to nothing else.
const NEAR: usize = 1 << 20;

// A call that is never made, to nothing: with it this object has a table that the linker fills in.
#[cfg(target_arch = "x86_64")]
global_asm!(".weak hpcrt_nothing", ".globl hpcrt_call", ".hidden hpcrt_call", "hpcrt_call: jmp hpcrt_nothing@PLT");
#[cfg(target_arch = "aarch64")]
global_asm!(".weak hpcrt_nothing", ".globl hpcrt_call", ".hidden hpcrt_call", "hpcrt_call: b hpcrt_nothing");

unsafe extern "C" {
    #[link_name = "_DYNAMIC"]
    static DYNAMIC: [usize; 2];
    #[link_name = "__ehdr_start"]
    static START: u8;
    fn hpcrt_call();
}

/// Lets an object call directly from now on. Without effect where it does, or binds everything when it is loaded.
///
/// # Safety
/// The object is mapped.
pub(super) unsafe fn repair(object: &LinkMap) {
    core::hint::black_box(hpcrt_call as *const ());
    // SAFETY: the linker filled in our table before it called us; an object whose entry is the linker's has it in memory that can be
    // written, since the linker wrote it. A word is read and written whole, whoever calls through it meanwhile.
    unsafe {
        let Some(own) = entry(&raw const START as usize, &raw const DYNAMIC) else { return };
        let Some(its) = entry(object.addr, object.dynamic) else { return };
        let (own, its_value) = (own.read_volatile(), its.read_volatile());
        if own != 0 && its_value != own && its_value.abs_diff(own) < NEAR {
            its.write_volatile(own);
        }
    }
}

/// The place of the linker's entry in the table of an object; none: it calls nobody through the linker.
///
/// # Safety
/// `dynamic` is the dynamic section of an object that is mapped at `base`.
unsafe fn entry(base: usize, mut dynamic: *const [usize; 2]) -> Option<*mut usize> {
    let (mut table, mut calls) = (0, 0);
    // SAFETY: the section ends with DT_NULL.
    unsafe {
        while !dynamic.is_null() && (*dynamic)[0] != DT_NULL {
            match *dynamic {
                [DT_PLTGOT, value] => table = value,
                [DT_PLTRELSZ, value] => calls = value,
                _ => {}
            }
            dynamic = dynamic.add(1);
        }
    }
    if calls == 0 || table == 0 {
        return None;
    }
    // Where the linker leaves the section as it is in the file.
    let table = if table < base { table + base } else { table };
    Some((table + 2 * size_of::<usize>()) as *mut usize)
}
