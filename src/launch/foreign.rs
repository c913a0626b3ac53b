//! Launchers of others, as the program of a job: `hpcrt exec -- srun -n 8 ./app`. Where the program stands in their command line, so that
//! only its loading is taken over.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::{Error, Result};

/// How a launcher's options are read.
#[derive(Debug, PartialEq, Eq)]
struct Grammar {
    /// Names of the launcher's file.
    names: &'static [&'static str],
    /// Words that come before the options, one of them (`flux run`).
    verbs: &'static [&'static str],
    /// One-letter options as getopt(3) is told of them: `:` takes a value, attached or as the next word, `::` an attached one, if any.
    letters: &'static str,
    /// Options by their whole names, and the number of words that follow. An option with `=` in it has its value.
    options: &'static [(&'static str, usize)],
    /// Several programs, separated by `:`.
    several: bool,
}

/// Slurm's, of version 22.05 and what is known to have been added since.
const SRUN: Grammar = Grammar {
    names: &["srun"],
    verbs: &[],
    letters: "A:B:b:C:c:D:d:Ee:F:G:HhI::i:J:K::k::L:lM:m:N:n:Oo:P:p:Qq:r:S:sT:t:uVvW:w:Xx:Z",
    options: &[
        ("--account", 1),
        ("--acctg-freq", 1),
        ("--bb", 1),
        ("--bbf", 1),
        ("--bcast-exclude", 1),
        ("--begin", 1),
        ("--chdir", 1),
        ("--cluster-constraint", 1),
        ("--clusters", 1),
        ("--comment", 1),
        ("--constraint", 1),
        ("--container", 1),
        ("--contiguous", 0),
        ("--core-spec", 1),
        ("--cores-per-socket", 1),
        ("--cpu-bind", 1),
        ("--cpu-freq", 1),
        ("--cpus-per-gpu", 1),
        ("--cpus-per-task", 1),
        ("--deadline", 1),
        ("--delay-boot", 1),
        ("--dependency", 1),
        ("--disable-status", 0),
        ("--distribution", 1),
        ("--epilog", 1),
        ("--error", 1),
        ("--exact", 0),
        ("--exclude", 1),
        ("--exclusive", 0),
        ("--export", 1),
        ("--external-launcher", 0),
        ("--extra-node-info", 1),
        ("--gpu-bind", 1),
        ("--gpu-freq", 1),
        ("--gpus", 1),
        ("--gpus-per-node", 1),
        ("--gpus-per-socket", 1),
        ("--gpus-per-task", 1),
        ("--gres", 1),
        ("--gres-flags", 1),
        ("--het-group", 1),
        ("--help", 0),
        ("--hint", 1),
        ("--hold", 0),
        ("--immediate", 0),
        ("--input", 1),
        ("--interactive", 0),
        ("--job-name", 1),
        ("--jobid", 1),
        ("--kill-on-bad-exit", 0),
        ("--label", 0),
        ("--licenses", 1),
        ("--mail-type", 1),
        ("--mail-user", 1),
        ("--mcs-label", 1),
        ("--mem", 1),
        ("--mem-bind", 1),
        ("--mem-per-cpu", 1),
        ("--mem-per-gpu", 1),
        ("--mincpus", 1),
        ("--mpi", 1),
        ("--network", 1),
        ("--nice", 0),
        ("--no-allocate", 0),
        ("--no-kill", 0),
        ("--nodefile", 1),
        ("--nodelist", 1),
        ("--nodes", 1),
        ("--ntasks", 1),
        ("--ntasks-per-core", 1),
        ("--ntasks-per-gpu", 1),
        ("--ntasks-per-node", 1),
        ("--ntasks-per-socket", 1),
        ("--open-mode", 1),
        ("--output", 1),
        ("--overcommit", 0),
        ("--overlap", 0),
        ("--oversubscribe", 0),
        ("--partition", 1),
        ("--power", 1),
        ("--preserve-env", 0),
        ("--priority", 1),
        ("--profile", 1),
        ("--prolog", 1),
        ("--propagate", 0),
        ("--pty", 0),
        ("--qos", 1),
        ("--quiet", 0),
        ("--quit-on-interrupt", 0),
        ("--reboot", 0),
        ("--relative", 1),
        ("--reservation", 1),
        ("--resv-ports", 0),
        ("--send-libs", 0),
        ("--signal", 1),
        ("--slurmd-debug", 1),
        ("--sockets-per-node", 1),
        ("--spread-job", 0),
        ("--switches", 1),
        ("--task-epilog", 1),
        ("--task-prolog", 1),
        ("--thread-spec", 1),
        ("--threads", 1),
        ("--threads-per-core", 1),
        ("--time", 1),
        ("--time-min", 1),
        ("--tmp", 1),
        ("--tres-bind", 1),
        ("--tres-per-task", 1),
        ("--unbuffered", 0),
        ("--usage", 0),
        ("--use-min-nodes", 0),
        ("--verbose", 0),
        ("--version", 0),
        ("--wait", 1),
        ("--wckey", 1),
        ("--whole", 0),
    ],
    several: true,
};

/// Hydra (MPICH, Intel MPI, MVAPICH) and Open MPI with PRRTE: they share the command's names. Options have one dash or two.
const MPIEXEC: Grammar = Grammar {
    names: &[
        "mpiexec",
        "mpirun",
        "mpiexec.hydra",
        "mpirun.hydra",
        "mpiexec.mpich",
        "mpirun.mpich",
        "mpirun.openmpi",
        "mpiexec.openmpi",
        "orterun",
        "prterun",
    ],
    verbs: &[],
    letters: "",
    options: &[
        ("-n", 1),
        ("-np", 1),
        ("-c", 1),
        ("-N", 1),
        ("-ppn", 1),
        ("-perhost", 1),
        ("-npernode", 1),
        ("-npersocket", 1),
        ("-pernode", 0),
        ("-f", 1),
        ("-host", 1),
        ("-hosts", 1),
        ("-H", 1),
        ("-hostfile", 1),
        ("-machinefile", 1),
        ("-default-hostfile", 1),
        ("-rankfile", 1),
        ("-wdir", 1),
        ("-wd", 1),
        ("-path", 1),
        ("-prefix", 1),
        ("-genv", 2),
        ("-genvlist", 1),
        ("-genvnone", 0),
        ("-genvall", 0),
        ("-env", 2),
        ("-envlist", 1),
        ("-envnone", 0),
        ("-envall", 0),
        ("-launcher", 1),
        ("-launcher-exec", 1),
        ("-bootstrap", 1),
        ("-enable-x", 0),
        ("-disable-x", 0),
        ("-rmk", 1),
        ("-topolib", 1),
        ("-bind-to", 1),
        ("-map-by", 1),
        ("-rank-by", 1),
        ("-membind", 1),
        ("-demux", 1),
        ("-h", 0),
        ("-help", 0),
        ("-info", 0),
        ("-version", 0),
        ("-V", 0),
        ("-verbose", 0),
        ("-v", 0),
        ("-q", 0),
        ("-quiet", 0),
        ("-print-all-exitcodes", 0),
        ("-iface", 1),
        ("-profile", 0),
        ("-prepend-rank", 0),
        ("-l", 0),
        ("-prepend-pattern", 1),
        ("-outfile-pattern", 1),
        ("-errfile-pattern", 1),
        ("-nameserver", 1),
        ("-disable-auto-cleanup", 0),
        ("-disable-hostname-propagation", 0),
        ("-order-nodes", 1),
        ("-localhost", 1),
        ("-usize", 1),
        ("-pmi-port", 0),
        ("-skip-launch-node", 0),
        ("-gpus-per-proc", 1),
        ("-x", 1),
        ("-mca", 2),
        ("-gmca", 2),
        ("-prtemca", 2),
        ("-pmixmca", 2),
        ("-omca", 2),
        ("-tune", 1),
        ("-am", 1),
        ("-stdin", 1),
        ("-output", 1),
        ("-output-filename", 1),
        ("-tag-output", 0),
        ("-timestamp-output", 0),
        ("-merge-stderr-to-stdout", 0),
        ("-oversubscribe", 0),
        ("-nooversubscribe", 0),
        ("-use-hwthread-cpus", 0),
        ("-report-bindings", 0),
        ("-display-map", 0),
        ("-display-allocation", 0),
        ("-display", 1),
        ("-bynode", 0),
        ("-byslot", 0),
        ("-bind-to-core", 0),
        ("-bind-to-none", 0),
        ("-cpu-set", 1),
        ("-cpu-list", 1),
        ("-cpus-per-proc", 1),
        ("-cpus-per-rank", 1),
        ("-timeout", 1),
        ("-allow-run-as-root", 0),
        ("-nolocal", 0),
        ("-personality", 1),
        ("-report-pid", 1),
        ("-report-uri", 1),
        ("-xterm", 1),
        ("-show-progress", 0),
    ],
    several: true,
};

/// Flux, from its documentation; not tried.
const FLUX: Grammar = Grammar {
    names: &["flux"],
    verbs: &["run"],
    letters: "B:c:g:hlN:n:o:q:S:t:uvx",
    options: &[
        ("--bank", 1),
        ("--cores", 1),
        ("--cores-per-task", 1),
        ("--cwd", 1),
        ("--env", 1),
        ("--env-file", 1),
        ("--env-remove", 1),
        ("--error", 1),
        ("--exclusive", 0),
        ("--gpus-per-node", 1),
        ("--gpus-per-task", 1),
        ("--help", 0),
        ("--input", 1),
        ("--job-name", 1),
        ("--label-io", 0),
        ("--nodes", 1),
        ("--nslots", 1),
        ("--ntasks", 1),
        ("--output", 1),
        ("--queue", 1),
        ("--quiet", 0),
        ("--requires", 1),
        ("--rlimit", 1),
        ("--setattr", 1),
        ("--setopt", 1),
        ("--tasks-per-core", 1),
        ("--tasks-per-node", 1),
        ("--time-limit", 1),
        ("--unbuffered", 0),
        ("--urgency", 1),
        ("--verbose", 0),
    ],
    several: false,
};

/// Options whose value may be in the word with the name of what is set: `-genv A B`, `-genv A=B`.
const ASSIGN: [&str; 2] = ["-genv", "-env"];

/// Options that ask for words about the launcher, and need no program.
const ABOUT: [&str; 9] = ["-h", "-help", "--help", "--usage", "-info", "--info", "-V", "-version", "--version"];

/// A launcher's command line, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    words: Vec<OsString>,
    /// Where its programs stand.
    programs: Vec<usize>,
}

/// That of the launcher which a command is, if it is one.
fn grammar(command: &OsStr) -> Option<Grammar> {
    let name = Path::new(command).file_name().and_then(OsStr::to_str);
    [SRUN, MPIEXEC, FLUX].into_iter().find(|grammar| grammar.names.iter().any(|n| name == Some(n)))
}

/// Whether a command is a launcher's.
pub fn is_launcher(command: &OsStr) -> bool {
    grammar(command).is_some()
}

impl Foreign {
    /// Whether a command line is that of a launcher; `None`: it is a program like any other.
    ///
    /// # Errors
    /// It is, and its program is not found.
    pub fn of(words: &[OsString]) -> Result<Option<Foreign>> {
        let Some(grammar) = words.first().and_then(|word| grammar(word)) else { return Ok(None) };
        let mut from = 1;
        if !grammar.verbs.is_empty() {
            match words.get(1).and_then(|word| word.to_str()) {
                Some(verb) if grammar.verbs.contains(&verb) => from = 2,
                // Commands that start nothing.
                _ => return Ok(None),
            }
        }
        let mut programs = Vec::new();
        while let Some(at) = program(&grammar, words, from)? {
            // Of a step of several parts that are alike, Slurm takes the program of the last.
            if grammar.several && words[at] == ":" {
                from = at + 1;
                continue;
            }
            programs.push(at);
            let next = words[at..].iter().position(|word| word == ":").filter(|_| grammar.several);
            let Some(next) = next else { break };
            from = at + next + 1;
        }
        let about = |word: &OsString| {
            let name = word.to_str().and_then(|word| word.split('=').next());
            name.is_some_and(|name| ABOUT.contains(&name))
        };
        match (programs.is_empty(), words.last()) {
            (true, Some(last)) if !words.iter().any(about) => Err(unknown(last, "no program follows")),
            (true, _) => Ok(None),
            (false, _) => Ok(Some(Foreign { words: words.to_vec(), programs })),
        }
    }

    /// The (first) program and its arguments.
    pub fn program(&self) -> &[OsString] {
        let at = self.programs[0];
        let end = self.programs.get(1).map_or(self.words.len(), |next| {
            let ends = self.words[..*next].iter().rposition(|word| word == ":");
            ends.unwrap_or(*next)
        });
        &self.words[at..end]
    }

    /// The command line with these words in front of every program.
    pub fn with(&self, prefix: &[OsString]) -> Vec<OsString> {
        let mut words = Vec::with_capacity(self.words.len() + self.programs.len() * prefix.len());
        for (at, word) in self.words.iter().enumerate() {
            if self.programs.contains(&at) {
                words.extend_from_slice(prefix);
            }
            words.push(word.clone());
        }
        words
    }
}

/// Where the program stands that follows the options from `at` on.
fn program(grammar: &Grammar, words: &[OsString], mut at: usize) -> Result<Option<usize>> {
    while let Some(word) = words.get(at) {
        let bytes = word.as_bytes();
        let next = words.get(at + 1);
        at += match bytes {
            b"--" => return Ok((at + 1 < words.len()).then_some(at + 1)),
            b"--multi-prog" => return Err(unknown(word, "the programs are in a file")),
            b"-configfile" | b"--configfile" | b"-app" | b"--app" => {
                return Err(unknown(word, "the programs are in a file"));
            }
            [b'-', b'-', ..] if bytes.contains(&b'=') => 1,
            [b'-', b'-', name @ ..] => 1 + arity(grammar, word, next, &[b"--", name].concat(), &[b"-", name].concat())?,
            [b'-', letters @ ..] if !grammar.letters.is_empty() => 1 + cluster(grammar, word, letters)?,
            [b'-', ..] => 1 + arity(grammar, word, next, bytes, bytes)?,
            _ => return Ok(Some(at)),
        };
    }
    Ok(None)
}

/// Words that an option of that name, in either spelling, is followed by; `next` is the first.
fn arity(grammar: &Grammar, word: &OsStr, next: Option<&OsString>, name: &[u8], short: &[u8]) -> Result<usize> {
    let known = grammar.options.iter().find(|(known, _)| known.as_bytes() == name || known.as_bytes() == short);
    let (known, arity) = known.ok_or_else(|| unknown(word, NOT_KNOWN))?;
    let whole = ASSIGN.contains(known) && next.is_some_and(|next| next.as_bytes().contains(&b'='));
    Ok(if whole { 1 } else { *arity })
}

/// Words that a word of one-letter options is followed by: the value of the first that takes one is the rest, or the next word.
fn cluster(grammar: &Grammar, word: &OsStr, letters: &[u8]) -> Result<usize> {
    for (at, letter) in letters.iter().enumerate() {
        let known = grammar.letters.bytes().position(|known| known == *letter && known != b':');
        let takes = known.map(|known| &grammar.letters.as_bytes()[known + 1..]);
        match takes.ok_or_else(|| unknown(word, NOT_KNOWN))? {
            [b':', b':', ..] => return Ok(0),
            [b':', ..] => return Ok(usize::from(at + 1 == letters.len())),
            _ => {}
        }
    }
    Ok(0)
}

const NOT_KNOWN: &str = "hpcrt does not know this option";

fn unknown(word: &OsStr, why: &'static str) -> Error {
    Error::usage("find the program in the launcher's command line", why)
        .on(word)
        .remedy("write it as --option=value, put -- in front of the program, or use --view none")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn entered(line: &str) -> String {
        let foreign = Foreign::of(&words(line)).unwrap().unwrap();
        let words = foreign.with(&words("E"));
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn programs_are_found() {
        for (line, expected) in [
            ("srun ./app", "srun E ./app"),
            (
                "/usr/bin/srun -n 8 -N2 -lu --mpi=pmi2 --label --cpu-bind none ./app -n 3",
                "/usr/bin/srun -n 8 -N2 -lu --mpi=pmi2 --label --cpu-bind none E ./app -n 3",
            ),
            ("srun -ln 4 -- ./app -x", "srun -ln 4 -- E ./app -x"),
            ("srun -F hosts -vK1 -I -k ./app", "srun -F hosts -vK1 -I -k E ./app"),
            ("srun -n1 ./a x : -n2 ./b", "srun -n1 E ./a x : -n2 E ./b"),
            ("srun -N1 : -N2 ./app", "srun -N1 : -N2 E ./app"),
            ("mpiexec -n 2 -genv A b --bind-to core ./app", "mpiexec -n 2 -genv A b --bind-to core E ./app"),
            ("mpiexec -genv A=b --env C=d -n 2 ./app x", "mpiexec -genv A=b --env C=d -n 2 E ./app x"),
            ("mpiexec -env A b=c ./app x", "mpiexec -env A b=c E ./app x"),
            (
                "mpirun --mca btl tcp,self -x A -np 4 python3 a.py",
                "mpirun --mca btl tcp,self -x A -np 4 E python3 a.py",
            ),
            ("mpiexec -n 1 ./a x : -n 2 ./b", "mpiexec -n 1 E ./a x : -n 2 E ./b"),
            ("flux run -n4 --cores-per-task 2 ./app", "flux run -n4 --cores-per-task 2 E ./app"),
            ("flux run -x -l ./app", "flux run -x -l E ./app"),
        ] {
            assert_eq!(entered(line), expected);
        }
        let foreign = Foreign::of(&words("mpiexec -n 1 ./a x : -n 2 ./b")).unwrap().unwrap();
        assert_eq!(foreign.program(), words("./a x"));
    }

    #[test]
    fn other_programs_and_unknown_options() {
        for line in [
            "./app srun",
            "srun --version=1",
            "srun -V",
            "mpirun --help",
            "flux run --help",
            "flux resource list",
            "mpicc a.c",
        ] {
            assert_eq!(Foreign::of(&words(line)).unwrap(), None, "{line}");
        }
        for line in [
            "srun --new-option 3 ./app",
            "srun -vY ./app",
            "srun -n 3",
            "flux run -y 1 ./app",
            "mpirun -zzz ./app",
            "mpirun -x ./app",
            "mpiexec",
            "srun --multi-prog file",
            "mpiexec -configfile x",
        ] {
            let error = Foreign::of(&words(line)).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("--view none"), "{error}");
        }
    }
}
