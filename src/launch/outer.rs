//! The launcher that started this process as one of several, spoken to as PMI-1 lets its processes speak: `srun --mpi=pmi2`, Hydra, Flux.
//!
//! The wire-up spends the one initialisation that some servers accept, so the program's own is answered here ([`Outer::relay`]) and the
//! rest of its conversation passed on.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::sys::process;
use crate::{Error, Result, error::Context};

/// The others are there within this time.
const OTHERS: Duration = Duration::from_secs(120);
/// A line, at most.
const LINE_MAX: usize = 1 << 16;

/// See the module.
#[derive(Debug)]
pub struct Outer {
    pub rank: u32,
    pub size: u32,
    server: UnixStream,
    space: String,
    /// How the server answered the initialisation.
    greeting: Vec<u8>,
}

/// A number in the environment.
fn number(name: &str) -> Option<u32> {
    std::env::var(name).ok()?.parse().ok()
}

impl Outer {
    /// The launcher, if this process is one of several that it started. Takes over the descriptor.
    ///
    /// # Errors
    /// It started several that cannot find each other, or does not speak PMI-1.
    pub fn find() -> Result<Option<Outer>> {
        // Ranks of ours have one, too, and may start jobs of their own.
        if let (Some(own), Some(fd)) = (number("HPCRT_FD"), number("PMI_FD"))
            && own == fd
        {
            return Ok(None);
        }
        let several = |name| number(name).filter(|count| *count > 1);
        let (Some(size), Some(rank), Some(fd)) = (several("PMI_SIZE"), number("PMI_RANK"), number("PMI_FD")) else {
            return match ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"].into_iter().find_map(several) {
                Some(count) if std::env::var_os("HPCRT_SESSION").is_none() => {
                    let cause = format!("a launcher started {count} of it, without PMI-1 on a descriptor");
                    let error = Error::usage("make one job of these processes", cause);
                    Err(error.remedy("srun --mpi=pmi2 hpcrt exec -- ..., or hpcrt exec -- srun ... (mpirun ...); for a job of each, unset SLURM_STEP_NUM_TASKS, PMI_SIZE and OMPI_COMM_WORLD_SIZE"))
                }
                _ => Ok(None),
            };
        };
        let server: UnixStream = process::inherited(fd).op("use the launcher's PMI_FD")?.into();
        let mut outer = Outer { rank, size, server, space: String::new(), greeting: Vec::new() };
        outer.server.set_read_timeout(Some(OTHERS)).op("use the launcher's PMI_FD")?;
        outer.greeting = outer.line("cmd=init pmi_version=1 pmi_subversion=1")?;
        let words = words(&outer.greeting);
        if words.get("rc").is_none_or(|rc| rc != "0") {
            return Err(Error::new("speak to the launcher", format!("it answered {words:?}")));
        }
        outer.space = outer.ask("cmd=get_my_kvsname", "kvsname")?;
        Ok(Some(outer))
    }

    /// Sends a request; the reply with its newline.
    fn line(&mut self, request: &str) -> Result<Vec<u8>> {
        self.server.write_all(format!("{request}\n").as_bytes()).op("ask the launcher")?;
        read_line(&mut self.server).op("hear the launcher")
    }

    fn ask(&mut self, request: &str, wanted: &str) -> Result<String> {
        let reply = self.line(request)?;
        let mut words = words(&reply);
        match words.remove(wanted) {
            Some(value) if words.get("rc").is_none_or(|rc| rc == "0") => Ok(value),
            _ => Err(Error::new("ask the launcher", format!("{request:?} was answered by {words:?}"))),
        }
    }

    /// Tells the others a value without blanks, after their next [`Outer::barrier`].
    ///
    /// # Errors
    /// The launcher refuses, or is gone.
    pub fn put(&mut self, key: &str, value: &str) -> Result<()> {
        let request = format!("cmd=put kvsname={} key={key} value={value}", self.space);
        self.ask(&request, "cmd").map(drop)
    }

    /// What somebody told before the last barrier.
    ///
    /// # Errors
    /// Nobody did.
    pub fn get(&mut self, key: &str) -> Result<String> {
        let request = format!("cmd=get kvsname={} key={key}", self.space);
        self.ask(&request, "value")
    }

    /// Waits until all are here.
    ///
    /// # Errors
    /// They do not come in time.
    pub fn barrier(&mut self) -> Result<()> {
        self.ask("cmd=barrier_in", "cmd").map(drop)
    }

    /// The node of every rank, counted from 0 in the order of their first ranks.
    ///
    /// # Errors
    /// The launcher does not tell.
    pub fn nodes(&mut self) -> Result<Vec<u32>> {
        let text = self.get("PMI_process_mapping")?;
        let nodes = mapping(&text, self.size).ok_or_else(|| Error::new("understand the launcher's map", &text))?;
        let mut numbers = BTreeMap::new();
        let mut count = 0;
        let number = |node: &u32| {
            *numbers.entry(*node).or_insert_with(|| {
                count += 1;
                count - 1
            })
        };
        Ok(nodes.iter().map(number).collect())
    }

    /// The program's conversation with the launcher, which begins with an initialisation, through `program`.
    pub fn relay(self, program: UnixStream) -> Relay {
        let _ = self.server.set_read_timeout(None);
        Relay { server: self.server, program: Some(program), greeting: Some(self.greeting), held: Vec::new() }
    }
}

/// A program's conversation with the launcher. What the two say is passed on as bytes; only the program's first line is looked at.
#[derive(Debug)]
pub struct Relay {
    server: UnixStream,
    /// `None` when it is over.
    program: Option<UnixStream>,
    /// The answer to the program's initialisation, until that came.
    greeting: Option<Vec<u8>>,
    /// The program's first line, as far as it came.
    held: Vec<u8>,
}

impl Relay {
    /// What to wait for: the launcher's descriptor and the program's; none when the conversation is over.
    pub fn wait_for(&self) -> Option<[BorrowedFd<'_>; 2]> {
        Some([self.server.as_fd(), self.program.as_ref()?.as_fd()])
    }

    /// One of them can be read.
    pub fn handle_readable(&mut self, server: bool, program: bool) {
        let passed = self.pass_on(server, program);
        if passed.is_err() {
            self.program = None;
        }
    }

    fn pass_on(&mut self, from_server: bool, from_program: bool) -> io::Result<()> {
        let Some(program) = &mut self.program else { return Ok(()) };
        let mut bytes = [0; 4096];
        let mut read = |from: &mut UnixStream| match from.read(&mut bytes)? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            count => Ok(bytes[..count].to_vec()),
        };
        if from_server {
            let bytes = read(&mut self.server)?;
            program.write_all(&bytes)?;
        }
        if from_program {
            self.held.extend(read(program)?);
            if self.greeting.is_some() {
                let Some(end) = self.held.iter().position(|byte| *byte == b'\n') else { return Ok(()) };
                if self.held.starts_with(b"cmd=init")
                    && let Some(greeting) = self.greeting.take()
                {
                    self.held.drain(..=end);
                    program.write_all(&greeting)?;
                }
            }
            self.server.write_all(&std::mem::take(&mut self.held))?;
        }
        Ok(())
    }

    /// The program has ended. One that never spoke to the launcher is signed off.
    pub fn end(mut self) {
        if self.greeting.is_some() && self.server.write_all(b"cmd=finalize\n").is_ok() {
            let _ = self.server.set_read_timeout(Some(Duration::from_secs(1)));
            let _ = read_line(&mut self.server);
        }
    }
}

fn read_line(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.last() != Some(&b'\n') {
        from.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > LINE_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its line has no end"));
        }
    }
    Ok(line)
}

/// `key=value` words of a line; a value goes on over words without `=`.
fn words(line: &[u8]) -> BTreeMap<String, String> {
    let text = String::from_utf8_lossy(line);
    text.split_whitespace().filter_map(|word| word.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// `(vector,(first node,nodes,ranks on each),...)`, repeated until there are `size` ranks.
fn mapping(text: &str, size: u32) -> Option<Vec<u32>> {
    let blocks = text.strip_prefix("(vector,")?.strip_suffix(')')?;
    let mut order = Vec::new();
    for block in blocks.split_inclusive(')') {
        let block = block.trim_start_matches(',').strip_prefix('(')?.strip_suffix(')')?;
        let mut numbers = block.split(',').map(|number| number.trim().parse::<u32>());
        let (Some(Ok(first)), Some(Ok(nodes)), Some(Ok(each)), None) =
            (numbers.next(), numbers.next(), numbers.next(), numbers.next())
        else {
            return None;
        };
        let ranks = (first..first.checked_add(nodes)?).flat_map(|node| std::iter::repeat_n(node, each as usize));
        order.extend(ranks.take(size as usize));
    }
    (!order.is_empty()).then(|| order.iter().copied().cycle().take(size as usize).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps() {
        for (text, expected) in [
            ("(vector,(0,2,1))", &[0, 1, 0, 1][..]),
            ("(vector,(0,1,1))", &[0, 0, 0, 0]),
            ("(vector,(0,2,2))", &[0, 0, 1, 1]),
            ("(vector,(0,1,3),(1,1,1))", &[0, 0, 0, 1]),
        ] {
            assert_eq!(mapping(text, 4).unwrap(), expected, "{text}");
        }
        for wrong in ["", "(vector,)", "(vector,(0,1))", "(vector,(4294967295,2,1))", "(vector,(0,0,0))"] {
            assert_eq!(mapping(wrong, 4), None, "{wrong}");
        }
    }

    #[test]
    fn the_second_initialisation_is_answered_here() {
        let ((mut server, ours), (mut program, inner)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let outer = Outer {
            rank: 0,
            size: 2,
            server: ours,
            space: "s".into(),
            greeting: b"cmd=response_to_init rc=0\n".into(),
        };
        let mut relay = outer.relay(inner);
        program.write_all(b"cmd=init pmi_ver").unwrap();
        relay.handle_readable(false, true);
        program.write_all(b"sion=1\ncmd=get_maxes\n").unwrap();
        relay.handle_readable(false, true);
        assert_eq!(read_line(&mut program).unwrap(), b"cmd=response_to_init rc=0\n");
        assert_eq!(read_line(&mut server).unwrap(), b"cmd=get_maxes\n");
        server.write_all(b"cmd=maxes\n").unwrap();
        relay.handle_readable(true, false);
        assert_eq!(read_line(&mut program).unwrap(), b"cmd=maxes\n");
        drop(program);
        relay.handle_readable(false, true);
        assert!(relay.wait_for().is_none());
    }
}
