//! What stands in place of a system call: a stub of its own in an area near the object, which makes the call at once or leaves by the way of its class; and the
//! ways that all stubs share.

use core::arch::naked_asm;
use core::mem::offset_of;

use sys::extents::Head;
use sys::instruction::{Kind, decode};
use sys::object::Object;
use sys::sites::{JUMP, Site};

use super::classes::{CALLS, CLASS, FILE, HARMLESS, IDLE, LOOK, MAPS, PROTECTS, SETTLE, TELLS};
use super::idle::unless_kept;
use super::kernel::nr;
use super::sites::{DIRTY, OFF};
use super::{idle, process, quick, table, worker};
use crate::{call, dispatch};

/// What the stubs find at the beginning of their area; it is the program's own, the rest is like in any other.
const POINTERS: usize = 10;
const CREATE: usize = 0;
const THREAD: usize = 1;
const AFTER: usize = 2;
/// Where a call goes whose number is not known, or of no class below; then by what is known.
const ANY: usize = 3;
const NORMAL: usize = 4;
const SETTLES: usize = 5;
const FILES: usize = 6;
const TELLING: usize = 7;
const OTHERS: usize = 8;
const CLOSER: usize = 9;
/// Apart from each other: the ways on after a process or thread was made.
const WAY: usize = 32;
/// The longest stub.
const MOST: usize = 256;

/// From the area's beginning: not 0 if the stubs stand for all system calls of the object; `syscall; ret`, and what a signal's handler returns to.
const COMPLETE: usize = POINTERS * 8;
pub(super) const PASS: usize = COMPLETE + 8;
pub(super) const RESTORE: usize = PASS + 3;
/// The first stub.
pub(super) const FIRST: usize = RESTORE + 9;
const MOV_EAX: u8 = 0xb8;
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Puts the pointers in place. Whether the stubs are all that is needed.
///
/// # Safety
/// An area that can be written, with stubs made by [`rewrite`].
pub(super) unsafe fn point(base: usize) -> bool {
    let pointers: [usize; POINTERS] =
        [create, thread, after, quick::entry, normal, settles, files, tells, idle::others, look_closer]
            .map(|way: extern "C" fn()| way as usize);
    // SAFETY: as the caller says.
    unsafe {
        (base as *mut [usize; POINTERS]).write(pointers);
        *((base + COMPLETE) as *const u64) != 0
    }
}

/// The number of the call that a stub has made, of one whose number is known: `next` is behind its instruction.
///
/// # Safety
/// Within an area, behind its beginning.
pub(super) unsafe fn made_before(next: usize) -> Option<usize> {
    // As `emit` has it: at once, and by way of the others.
    [2 + 5, 2 + 13 + 5].into_iter().find_map(|back| {
        // SAFETY: as the caller says.
        let code = unsafe { *((next - back) as *const [u8; 5]) };
        (code[0] == MOV_EAX).then(|| u32::from_le_bytes([code[1], code[2], code[3], code[4]]) as usize)
    })
}

/// Where a text and its stubs are made: both as far apart as where they will be.
pub(super) struct Emitter<'a> {
    object: Object<'a>,
    /// What is to be added to the object's addresses.
    bias: usize,
    /// The area.
    base: usize,
    end: usize,
    at: usize,
    /// Every distance could be written so far.
    reaches: bool,
}

impl<'a> Emitter<'a> {
    /// # Safety
    /// The object's text, `bias` added, and the area can be written, and nobody else uses them.
    pub(super) unsafe fn new(object: Object<'a>, bias: usize, base: usize, len: usize) -> Emitter<'a> {
        let mut code = Emitter { object, bias, base, end: base + len, at: base + PASS, reaches: true };
        code.put(&SYSCALL);
        code.put(&[0xc3]);
        // mov rax, rt_sigreturn; syscall: what unwinders and debuggers know by these bytes
        code.put(&[0x48, 0xc7, 0xc0, nr::RT_SIGRETURN as u8, 0, 0, 0]);
        code.put(&SYSCALL);
        code
    }

    /// All calls of the object have stubs, or not.
    pub(super) fn end(self, complete: bool) {
        // SAFETY: see `new`.
        unsafe { ((self.base + COMPLETE) as *mut u64).write(complete.into()) };
    }

    /// Puts a jump to a stub where the object makes a call; false: there is no room, or it is too far.
    pub(super) fn replace(&mut self, site: &Site) -> bool {
        let stub = self.at;
        self.reaches = stub + MOST < self.end;
        if self.reaches {
            self.emit(site);
        }
        let jump = self.bias + site.first;
        let behind = self.at;
        if self.reaches {
            self.at = jump;
            self.relative(&[0xe9], stub);
        }
        if !self.reaches {
            self.at = stub;
            return false;
        }
        if site.number.is_none() {
            (site.first + JUMP..site.end).for_each(|_| self.put(&[0xcc]));
        }
        self.at = behind;
        true
    }

    fn put(&mut self, bytes: &[u8]) {
        // SAFETY: see `new`; there is room for every stub.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at as *mut u8, bytes.len()) };
        self.at += bytes.len();
    }

    /// An instruction that ends with the distance to `target`.
    fn relative(&mut self, code: &[u8], target: usize) {
        let distance = (target as isize).wrapping_sub((self.at + code.len() + 4) as isize);
        self.reaches &= i32::try_from(distance).is_ok();
        self.put(code);
        self.put(&(distance as i32).to_le_bytes());
    }

    fn leave(&mut self, pointer: usize) {
        self.relative(&[0xff, 0x25], self.base + pointer * 8);
    }

    /// Where a call goes that is not made at once.
    fn way(number: usize) -> usize {
        match CLASS.get(number) {
            _ if matches!(number, nr::WRITE | nr::LSEEK) => ANY,
            Some(&SETTLE) => SETTLES,
            Some(&FILE) => FILES,
            Some(&TELLS) => TELLING,
            Some(&IDLE) => OTHERS,
            Some(&LOOK) => CLOSER,
            _ => NORMAL,
        }
    }

    /// Instructions of the object, to be executed here.
    fn take(&mut self, mut from: usize, to: usize) {
        while from < to {
            let code = self.object.at(from).unwrap_or_default();
            let Some(instruction) = decode(code) else { return self.reaches = false };
            let code = &code[..instruction.len];
            from += instruction.len;
            let leads = |distance: i32| (self.bias + from).wrapping_add_signed(distance as isize);
            match instruction.kind {
                Kind::Jump { distance } => self.relative(&[0xe9], leads(distance)),
                Kind::Branch { condition, distance } => self.relative(&[0x0f, 0x80 | condition], leads(distance)),
                Kind::Near { operand } => {
                    let (before, rest) = code.split_at(operand);
                    let distance = rest.first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
                    let behind = &rest[4..];
                    // Counted from the instruction's end.
                    self.relative(before, leads(distance).wrapping_sub(behind.len()));
                    self.put(behind);
                }
                _ => self.put(code),
            }
        }
    }

    fn emit(&mut self, site: &Site) {
        let back = self.bias + site.end;
        let way = site.number.map_or(ANY, |number| Self::way(number as usize));
        if let Some(number) = site.number {
            self.put(&[MOV_EAX]);
            self.put(&number.to_le_bytes());
            let number = number as usize;
            if CLASS.get(number) == Some(&HARMLESS) {
                self.put(&SYSCALL);
                return self.relative(&[0xe9], back);
            }
            if matches!(number, nr::CLONE | nr::CLONE3 | nr::VFORK | nr::FORK) {
                return self.emit_creation(back);
            }
        } else {
            self.take(site.first, site.call);
        }
        // lea rcx, the way on; jmp
        self.relative(&[0x48, 0x8d, 0x0d], self.at + 7 + 6);
        self.leave(way);
        self.put(&SYSCALL);
        self.take(site.call + 2, site.end);
        self.relative(&[0xe9], back);
    }

    /// What is made goes on with a stack of its own: four ways on, of which [`create`] chooses one.
    fn emit_creation(&mut self, back: usize) {
        self.relative(&[0x48, 0x8d, 0x0d], self.at + 7 + 6);
        self.leave(CREATE);
        let first = self.at;
        let way = |code: &mut Self, nth: usize| {
            code.at = first + nth * WAY;
            code.put(&SYSCALL);
        };
        way(self, process::PLAIN);
        self.relative(&[0xe9], back);
        // test rax, rax; jne back; lea rcx, back; jmp
        way(self, process::THREAD);
        self.put(&[0x48, 0x85, 0xc0]);
        self.relative(&[0x0f, 0x85], back);
        self.relative(&[0x48, 0x8d, 0x0d], back);
        self.leave(THREAD);
        // The parent, when the child has gone its own way.
        way(self, process::BORROWS);
        self.put(&[0x48, 0x85, 0xc0]);
        self.relative(&[0x0f, 0x84], back);
        self.relative(&[0x48, 0x8d, 0x0d], back);
        self.leave(AFTER);
        // Both.
        way(self, process::FORKS);
        self.relative(&[0x48, 0x8d, 0x0d], back);
        self.leave(AFTER);
        self.at = first + 4 * WAY;
    }
}

// Saves what a system call keeps: all registers but rax, rcx and r11; and what lies below the stack. Upper halves of vector registers nobody
// here touches. Leaves at [rbp - 8 ..]: rcx, rdi, rsi, rdx, r10, r8, r9, rax.
macro_rules! saving {
    ($($between:literal),*) => {
        concat!(
            "lea rsp, [rsp - 128]\n push rbp\n mov rbp, rsp\n push rcx\n push rdi\n push rsi\n push rdx\n push r10\n push r8\n push r9\n push rax\n",
            "sub rsp, 264\n and rsp, -16\n",
            "movaps [rsp], xmm0\n movaps [rsp + 16], xmm1\n movaps [rsp + 32], xmm2\n movaps [rsp + 48], xmm3\n",
            "movaps [rsp + 64], xmm4\n movaps [rsp + 80], xmm5\n movaps [rsp + 96], xmm6\n movaps [rsp + 112], xmm7\n",
            "movaps [rsp + 128], xmm8\n movaps [rsp + 144], xmm9\n movaps [rsp + 160], xmm10\n movaps [rsp + 176], xmm11\n",
            "movaps [rsp + 192], xmm12\n movaps [rsp + 208], xmm13\n movaps [rsp + 224], xmm14\n movaps [rsp + 240], xmm15\n",
            $($between, "\n",)*
            "movaps xmm0, [rsp]\n movaps xmm1, [rsp + 16]\n movaps xmm2, [rsp + 32]\n movaps xmm3, [rsp + 48]\n",
            "movaps xmm4, [rsp + 64]\n movaps xmm5, [rsp + 80]\n movaps xmm6, [rsp + 96]\n movaps xmm7, [rsp + 112]\n",
            "movaps xmm8, [rsp + 128]\n movaps xmm9, [rsp + 144]\n movaps xmm10, [rsp + 160]\n movaps xmm11, [rsp + 176]\n",
            "movaps xmm12, [rsp + 192]\n movaps xmm13, [rsp + 208]\n movaps xmm14, [rsp + 224]\n movaps xmm15, [rsp + 240]\n",
            "mov rcx, [rbp - 8]\n mov rdi, [rbp - 16]\n mov rsi, [rbp - 24]\n mov rdx, [rbp - 32]\n mov r10, [rbp - 40]\n",
            "mov r8, [rbp - 48]\n mov r9, [rbp - 56]\n mov rsp, rbp\n pop rbp\n lea rsp, [rsp + 128]\n"
        )
    };
}

/// All calls but quick ones: number in rax, the stub's own call in rcx.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn normal() {
    naked_asm!(
        "cmp rax, {calls}",
        "jae {straight}",
        "lea r11, [rip + {class}]",
        "movzx r11d, byte ptr [r11 + rax]",
        "cmp r11d, {settle}",
        "jb {straight}",
        "je {settles}",
        "cmp r11d, {file}",
        "jb {look_closer}",
        "je {files}",
        "cmp r11d, {protects}",
        "jb {tells}",
        "je 5f",
        "cmp r11d, {idle}",
        "je {others}",
        "cmp r11d, {maps}",
        "jne {makes}",
        "test r10b, {anonymous}",
        "jz {look_closer}",
        "test r10b, {shared}",
        "jnz {look_closer}",
        "5: test dl, {execute}",
        "jz {straight}",
        "jmp {look_closer}",
        calls = const CALLS,
        settle = const SETTLE,
        file = const FILE,
        protects = const PROTECTS,
        idle = const IDLE,
        maps = const MAPS,
        execute = const call::EXECUTE,
        anonymous = const call::ANONYMOUS,
        shared = const call::SHARED,
        class = sym CLASS,
        settles = sym settles,
        files = sym files,
        tells = sym tells,
        others = sym idle::others,
        makes = sym makes,
        look_closer = sym look_closer,
        straight = sym straight,
    )
}

/// [`SETTLE`].
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
extern "C" fn settles() {
    naked_asm!(
        "cmp byte ptr [rip + {dirty}], 0",
        "jne {look_closer}",
        "jmp rcx",
        dirty = sym DIRTY,
        look_closer = sym look_closer,
    )
}

/// [`FILE`].
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
extern "C" fn files() {
    naked_asm!(
        "cmp rdi, {descriptors}",
        "jae {look_closer}",
        "lea r11, [rip + {descriptor}]",
        "cmp word ptr [r11 + rdi * 2], {other}",
        "jne {on_file}",
        "jmp {settles}",
        descriptors = const table::DESCRIPTORS,
        descriptor = sym table::DESCRIPTOR,
        other = const table::OTHER as i16,
        settles = sym settles,
        on_file = sym idle::on_file,
        look_closer = sym look_closer,
    )
}

/// [`TELLS`].
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
extern "C" fn tells() {
    naked_asm!(
        "mov r11, [rip + {head}]",
        "test r11, r11",
        "jz {look_closer}",
        unless_kept!("{look_closer}"),
        "jmp {settles}",
        head = sym worker::AT,
        owned = const offset_of!(Head, owned),
        lost = const offset_of!(Head, lost),
        settles = sym settles,
        look_closer = sym look_closer,
    )
}

/// Has the stub make its call.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn straight() {
    naked_asm!("jmp rcx")
}

/// What is to be done is found out, and the call made there.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn look_closer() {
    naked_asm!(
        "cmp byte ptr [rip + {off}], 0",
        "jne 9f",
        saving!("mov rdi, rax", "lea rsi, [rbp - 64]", "call {dispatch}"),
        // Over its own call.
        "add rcx, 2",
        "9: jmp rcx",
        off = sym OFF,
        dispatch = sym dispatch,
    )
}

/// The layer steps aside before the stub makes its call.
#[unsafe(naked)]
extern "C" fn makes() {
    naked_asm!(
        "cmp byte ptr [rip + {off}], 0",
        "jne 9f",
        saving!("call {unknown}", "mov rax, [rbp - 64]"),
        "9: jmp rcx",
        off = sym OFF,
        unknown = sym process::unknown,
    )
}

pub(super) use saving;

/// The same where something is made; the way on is chosen, and the call made there.
#[unsafe(naked)]
pub(super) extern "C" fn create() {
    naked_asm!(
        saving!("mov rdi, rax", "lea rsi, [rbp - 64]", "call {before}", "mov r11, rax", "mov rax, [rbp - 64]"),
        "shl r11, {shift}",
        "add rcx, r11",
        "jmp rcx",
        shift = const WAY.trailing_zeros(),
        before = sym before,
    )
}

/// After it: the result in rax stays.
#[unsafe(naked)]
pub(super) extern "C" fn after() {
    naked_asm!(
        saving!("mov rdi, rax", "call {after}", "mov rax, [rbp - 64]"),
        "jmp rcx",
        after = sym process::after,
    )
}

/// A new thread, on its stack.
#[unsafe(naked)]
pub(super) extern "C" fn thread() {
    naked_asm!(saving!("call {begin}", "xor eax, eax"), "jmp rcx", begin = sym dispatch::begin_thread)
}

/// Registers as [`saving`] leaves them, from the last: rax, r9, r8, r10, rdx, rsi, rdi.
fn arguments(registers: *const [usize; 7]) -> [usize; 6] {
    // SAFETY: the callers' stack. One by one, as they were pushed: a wider read waits until the stores are done.
    core::array::from_fn(|nth| unsafe { registers.cast::<usize>().add(6 - nth).read_volatile() })
}

extern "C" fn dispatch(number: usize, registers: *const [usize; 7]) -> isize {
    super::perform(number, arguments(registers))
}

extern "C" fn before(number: usize, registers: *const [usize; 7]) -> usize {
    process::before(number, arguments(registers))
}
