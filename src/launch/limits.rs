//! What hosts do without, in the words of one line each: why, what comes instead, and what that costs.

use crate::net::wire::control::Limits;

/// What concerns every job.
pub fn of_tree(limits: &Limits) -> Vec<String> {
    let line =
        |what: &str, why: &Option<String>, instead: &str| why.as_ref().map(|why| format!("{what} ({why}); {instead}"));
    let lines = [
        line(
            "no TCP connection to the host that started it",
            &limits.tcp,
            "all data goes through the pipe of the command that did, and from host to host as they were started: more slowly",
        ),
        line(
            "other hosts could not start it",
            &limits.ssh,
            "it was started from here, which takes longer where hosts are many",
        ),
        line(
            "nothing can be executed from memory",
            &limits.memfd,
            "ranks start without the bootstrapper, in the memory of their job's keeper",
        ),
    ];
    lines.into_iter().flatten().collect()
}

/// What concerns jobs with captured files.
pub fn of_view(limits: &Limits) -> Vec<String> {
    let view = limits.view.as_ref().map(|why| format!("{why}; ranks there read the shared file system themselves"));
    let namespaces = limits.namespaces.as_ref();
    let namespaces =
        namespaces.map(|why| format!("{why}; libraries are given to the dynamic linkers of programs instead"));
    let memory = limits.memory.as_ref().map(|why| format!("{why}, which takes longer to write and read"));
    [view, namespaces, memory].into_iter().flatten().collect()
}
