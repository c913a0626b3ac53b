//! Static arrays of programs and their libraries: those that are zero at first, and those that are not.

use std::process::Command;

use super::{Run, Servers, everybody, place, right};

#[test]
fn static_arrays_of_programs_and_libraries() {
    let Some(place) = place() else { return };
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/statics.c");
    let cc = |flags: &str| {
        let mut cc = Command::new("gcc");
        cc.args(["-O2", "-pthread"]).arg(&source).args(flags.split(' ')).current_dir(place);
        assert!(cc.status().unwrap().success());
    };
    cc("-shared -fPIC -DLIBRARY -o libother.so");
    // At addresses that the kernel chooses, and at ones that are in the file.
    let ways = [("statics-pie", "-pie -fPIE"), ("statics-fixed", "-no-pie -fno-pie")];
    for (name, flags) in ways {
        cc(&format!("{flags} -o {name} -L. -lother -Wl,-rpath,$ORIGIN"));
    }
    for who in everybody() {
        let servers = Servers::start(who, &[200]);
        for (name, _) in ways {
            let mut command = who.command(servers.config.path());
            command.args(["exec", "-q", "--memory", &servers.list(), "--local-mb", "20"]);
            let done = Run::new(command).program(&[place.join(name)]).end();
            println!("{who:?} {name}: {:?}", done.took);
            right(done, 20);
        }
    }
}
