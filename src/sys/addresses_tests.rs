//! Test of `static-bootstrap/sys/src/addresses.rs` against what the kernel says of its system calls.

use std::collections::HashMap;
use std::fs;
use std::process::Command;

use super::addresses::{ARGUMENTS, calls_with};

const HEADER: &str = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h";
const TRACED: &str = "test -e /sys/kernel/tracing/events || mount -t tracefs tracefs /sys/kernel/tracing; grep field: /sys/kernel/tracing/events/syscalls/sys_enter_*/format";
/// Have arguments that may be addresses.
const WIDER: [&str; 10] =
    ["arch_prctl", "fcntl", "get_mempolicy", "ioctl", "keyctl", "mlock", "mlock2", "prctl", "ptrace", "semctl"];
/// Are never stopped.
const LEFT_ALONE: [&str; 2] = ["clone", "clone3"];

#[test]
fn addresses_are_those_of_the_kernel() {
    let numbers = fs::read_to_string(HEADER).unwrap_or_default();
    let number = |line: &str| {
        let (name, number) = line.strip_prefix("#define __NR_")?.split_once(' ')?;
        Some((name.to_owned(), number.parse::<usize>().ok()?))
    };
    let numbers: HashMap<String, usize> = numbers.lines().filter_map(number).collect();
    let fields = Command::new("unshare").args(["--mount", "sh", "-c", TRACED]).output();
    let fields = fields.map(|done| String::from_utf8_lossy(&done.stdout).into_owned()).unwrap_or_default();
    if numbers.is_empty() || fields.is_empty() {
        eprintln!("SKIPPED: needs root, a kernel with tracing of system calls, and {HEADER} (linux-libc-dev)");
        return;
    }
    let mut kernel: HashMap<&str, Vec<bool>> = HashMap::new();
    for (file, field) in fields.lines().filter_map(|line| line.split_once(':')) {
        let name = file.split("sys_enter_").nth(1).and_then(|name| name.split('/').next()).unwrap();
        let is_argument = !["common_", "__syscall_nr", "__data_loc"].iter().any(|other| field.contains(other));
        let arguments = kernel.entry(name).or_default();
        arguments.extend(is_argument.then(|| field.contains('*')));
    }
    let mut compared = 0;
    for (name, arguments) in &kernel {
        let names = [*name, name.trim_start_matches("new"), name.trim_end_matches("64")];
        let Some((name, number)) = names.iter().find_map(|name| Some((*name, numbers.get(*name)?))) else { continue };
        for argument in 0..ARGUMENTS {
            let (theirs, ours) =
                (arguments.get(argument) == Some(&true), calls_with(argument).any(|call| call == *number));
            let as_it_is = ours == theirs || ours && WIDER.contains(&name) || !ours && LEFT_ALONE.contains(&name);
            assert!(as_it_is, "{name} ({number}), argument {argument}: an address is {theirs}, {ours} here");
        }
        compared += 1;
    }
    assert!(compared > 300, "{compared}");
}

/// A jump over all of them has eight bits.
#[test]
fn a_jump_goes_over_the_calls_of_an_argument() {
    assert!((0..ARGUMENTS).all(|argument| (1..=240).contains(&calls_with(argument).count())));
}
