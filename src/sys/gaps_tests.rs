//! What is told of code between functions: `static-bootstrap/sys/src/gaps.rs`, on objects that are assembled.

use std::fs;
use std::process::Command;

use super::object::Object;
use super::sites::{Verdict, verdict};

/// Of an object with a function, what the table of functions does not tell of, another function, and more of that.
fn told(first: &str, between: &str, behind: &str) -> Option<Verdict> {
    let place = tempfile::tempdir().expect("a place");
    let (source, object) = (place.path().join("o.s"), place.path().join("o.so"));
    let function =
        |name: &str, code: &str| format!(".globl {name}\n{name}: .cfi_startproc\n{code}\nret\n.cfi_endproc\n");
    let code = format!(
        ".text\n{}{between}\n{}{behind}\n.section .note.GNU-stack\n",
        function("f", first),
        function("g", "nop")
    );
    fs::write(&source, &code).expect("room");
    let mut command = Command::new("gcc");
    command.args(["-shared", "-nostdlib", "-Wl,-z,noseparate-code", "-o"]).arg(&object).arg(&source);
    match command.status() {
        Ok(status) => assert!(status.success(), "{code}"),
        Err(error) => {
            eprintln!("SKIPPED: gcc: {error}");
            return None;
        }
    }
    let bytes = fs::read(&object).expect("an object");
    Some(verdict(Object::new(&bytes).expect("an object")))
}

/// Bytes that look like a system call, in what are no instructions.
const TABLE: &str = "table: .fill 20, 1, 6\n.byte 6, 0x0f, 0x05, 6, 7, 0xcd, 0x80, 6\n.fill 300, 1, 6\n";
/// One.
const CALL: &str = "hidden: mov $39, %eax\nsyscall\nret\n";
/// What is so far behind a function that it is not taken for a part of it; and of a function, so far from what is behind it that no short jump leads there.
const FAR: &str = ".fill 24, 1, 0x90\n";
const LONG: &str = "ret\n.fill 200, 1, 0x90\n";

#[test]
fn data_and_code_without_calls_are_told() {
    let plain = format!("{FAR}code: mov $0x50f, %eax\njne 1f\ncall g\n1: ret\n");
    for (first, between, behind) in [
        ("nop", &*plain, ""),
        ("call code", &plain, ""),
        ("lea table(%rip), %rax", TABLE, ""),
        ("mov table(%rip), %rax\ncall code", &format!("{plain}{TABLE}"), ""),
        ("nop", TABLE, ".data\n.quad table"),
        ("nop", "", ".section .rodata\n.fill 20\n.byte 6, 0x0f, 0x05, 6"),
    ] {
        let told = told(first, between, behind);
        assert!(told.is_none_or(|told| told == Verdict::Clean), "{first} {between} {behind}: {told:?}");
    }
}

#[test]
fn calls_that_something_leads_to_are_not_taken_for_data() {
    let more = |code: &str| format!("{TABLE}{code}{CALL}");
    let data = ".fill 20, 1, 6\n";
    for (first, between, behind) in [
        (&*format!("call hidden\n{LONG}"), more(""), ""),
        (&format!("jne hidden\n{LONG}"), more(""), ""),
        (&format!("lea hidden(%rip), %rax\n{LONG}"), more(""), ""),
        (&format!("xbegin hidden\n{LONG}"), more(""), ""),
        (&format!("lea hidden(%eip), %rax\n{LONG}"), more(""), ""),
        ("jrcxz hidden", format!("{data}{CALL}{TABLE}"), ""),
        ("nop", more(""), "jmp hidden"),
        ("nop", more(""), ".data\n.quad hidden"),
        ("nop", more(""), ".data\n.long 0\n.quad hidden"),
        ("nop", more(".globl hidden\n"), ""),
        ("call first", more("first: cmp $1, %eax\njne hidden\nret\n"), ""),
        ("call first", more("first: lea hidden(%rip), %rax\nret\n"), ""),
        // Falls through.
        ("nop", format!("{FAR}{CALL}{TABLE}"), ""),
        // All of it is code, to which a table of distances may lead.
        ("nop", format!("{FAR}{CALL}"), ""),
        // What is read from its beginning on hides it.
        ("call hidden", format!("{FAR}.fill 33\nhidden: syscall\nret\n.fill 8"), ""),
        ("nop", ".fill 9\nhidden: syscall\nret\n.byte 6".to_owned(), ".data\n.quad hidden"),
        // Leads where nobody can tell; is no instruction that we know.
        ("call first", format!("{TABLE}first: jmp *%rax\n.fill 20, 1, 6\n{CALL}"), ""),
        ("call first", format!("{TABLE}first: call *%rax\nret\n.fill 20, 1, 6\n{CALL}"), ""),
        ("call first", more("first: nop\n.byte 6\n"), ""),
    ] {
        let told = told(first, &between, behind);
        assert!(told.is_none_or(|told| told == Verdict::Unknown), "{first} {between} {behind}: {told:?}");
    }
}

#[test]
fn what_is_cut_is_not_known() {
    let bytes = fs::read("/proc/self/exe").expect("this program");
    let object = |bytes| Object::new(bytes).map(verdict);
    assert_eq!(object(&bytes[..bytes.len() / 8]), Some(Verdict::Unknown));
}
