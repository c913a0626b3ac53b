//! What is told of code between functions: `static-bootstrap/sys/src/gaps.rs`, on objects that are assembled.

use std::fs;
use std::process::Command;

use super::object::Object;
use super::sites::{Verdict, verdict};

/// Of an object with a function, what the table of functions does not tell of, and another function.
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

#[test]
fn data_and_code_without_calls_are_told() {
    let plain = "mov $0x50f, %eax\njne 1f\ncall g\n1: ret\n";
    for (first, between, behind) in [
        ("nop", plain, ""),
        ("lea table(%rip), %rax", TABLE, ""),
        ("mov table(%rip), %rax\ncall code", &format!("code: {plain}{TABLE}"), ""),
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
    for (first, between, behind) in [
        ("call hidden", more(""), ""),
        ("jne hidden", more(""), ""),
        ("jrcxz hidden", CALL.to_owned() + TABLE, ""),
        ("lea hidden(%rip), %rax", more(""), ""),
        ("nop", more(""), ".data\n.quad hidden"),
        ("nop", more(".globl hidden\n"), ""),
        ("nop", more(""), "jmp hidden"),
        ("call first", more("first: cmp $1, %eax\njne hidden\nret\n"), ""),
        ("call first", more("first: lea hidden(%rip), %rax\nret\n"), ""),
        // Falls through.
        ("nop", format!(".fill 40, 1, 0x90\n{CALL}{TABLE}"), ""),
        // Leads where nobody can tell; is no instruction that we know.
        ("call first", more("first: jmp *%rax\n"), ""),
        ("call first", more("first: nop\n.byte 6\n"), ""),
    ] {
        let told = told(first, &between, behind);
        assert!(told.is_none_or(|told| told == Verdict::Unknown), "{first} {between} {behind}: {told:?}");
    }
}
