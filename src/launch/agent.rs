//! Starting agents: on this machine, over ssh, or by any command that runs a shell line on a host.
//!
//! A remote agent is this very binary: it is sent through the standard input of the command, unless the node has it itself (installed under
//! the same path), and what follows on the same two pipes is the link to the parent until something better is up. The copy's name
//! is removed before its first byte arrives, so an interrupted start leaves nothing.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use smol::future::FutureExt;
use smol::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use smol::stream::StreamExt;
use smol::{Async, Timer};

use super::overlay::Spawner;
use crate::loader::capture;
use crate::net::link::{self, Reader, Writer};
use crate::net::wire::control::AgentKind;
use crate::sys::process;
use crate::sys::without::VARIABLE;
use crate::{Error, Result, error::Context};

/// An agent must speak within this time.
pub const START: Duration = Duration::from_secs(30);
/// A command whose output has ended says why and exits within this time.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A started agent that waits for its enrolment.
pub struct Agent {
    pub reader: Reader,
    pub writer: Writer,
    pub process: Process,
    /// The last lines that the command that started it wrote to standard error.
    pub said: Arc<Mutex<VecDeque<String>>>,
}

/// The command that started an agent, or a local agent itself; killed with its process group when dropped. The group is its own: an
/// interrupt typed at the terminal is for the front end, which passes it on.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts it as the leader of a group.
    ///
    /// # Errors
    /// `fork(2)`'s and `execve(2)`'s.
    pub fn start(command: &mut Command) -> io::Result<Process> {
        command.process_group(0);
        // In the child: here its pipes would be refused where as many descriptors are open as that limit allows.
        process::as_given(command);
        command.spawn().map(Process)
    }

    /// Waits until it has ended.
    pub async fn end(&mut self) {
        end_of(&mut self.0).await;
    }

    /// Kills its group. It has ended when the kernel has taken back all that it had ([`Process::end`]), which takes seconds of a large one.
    pub fn kill(&self) {
        let _ = killpg(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGKILL);
    }

    /// The other end of its standard error, once, if that is a pipe.
    pub fn errors(&mut self) -> Option<OwnedFd> {
        self.0.stderr.take().map(OwnedFd::from)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }
}

/// Waits until a child has ended; safe to cancel.
pub(super) async fn end_of(child: &mut Child) {
    if let Ok(died) = process::watch(Pid::from_raw(child.id().cast_signed())).and_then(Async::new_nonblocking) {
        let _ = died.readable().await;
    }
    // Before Linux 5.3 there is nothing to watch.
    while let Ok(None) = child.try_wait() {
        Timer::after(Duration::from_millis(1)).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
            let _ = self.0.wait();
        }
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("process", &self.process).finish_non_exhaustive()
    }
}

/// This very binary, for a child.
pub(super) const OURSELVES: &str = "/proc/self/exe";

/// What an agent's command writes when the agent itself has taken over.
pub const READY: &str = "hpcrt:ready";
const NEED: &str = "hpcrt:need";
const NOWHERE: &str = "hpcrt:nowhere";

/// Read by `sh` on the node from its standard input: so the command that gets us there may hand its words to a shell (as ssh does)
/// or to exec. One group, because some shells read ahead: they have all of it before they run any of it. `@H` is the hash of the
/// binary, `@N` its length in bytes, `@P` its path if that may be node-local, `@D` the directories on that path, `@W` what to do without.
///
/// Anybody may have put something else at that path on another host, and may change it at any moment: it is only run if from the top
/// down nobody but root and the user could (`safe`: their own directories, which others cannot write to but for the sticky ones; then the
/// file itself, which is no symbolic link).
const SCRIPT: &str = r#"{ u=`id -u`
@W
safe() {
LC_ALL=C stat -c '%u %a %F' "$@" 2>/dev/null | { n=0
while read -r o m f; do
case "$o $f" in "0 directory"|"$u directory") ;; *) exit 1;; esac
case $m in [0-7][0145][0145]|[0-7][0-7][0145][0145]|[1357][0-7][0-7][0-7]) n=$((n+1));; *) exit 1;; esac
done
[ $n = $# ]; }
}
c=@P
if safe @D; then
LC_ALL=C stat -c '%u %a %F' "$c" 2>/dev/null | { read -r o m f
case "$o $f" in "0 regular file"|"$u regular file") ;; *) exit 1;; esac
case $m in [0-7][0145][0145]|[0-7][0-7][0145][0145]) ;; *) exit 1;; esac
} && "$c" serve --same @H </dev/null >/dev/null 2>&1 && exec "$c" serve
fi
echo
for d in "${XDG_RUNTIME_DIR:-/nonexistent}" /dev/shm /tmp; do
{ [ -O "$d" ] || [ -k "$d" ]; } && f=`mktemp "$d/.hpcrt.XXXXXXXX" 2>/dev/null` || continue
chmod 700 "$f"
[ -x "$f" ] || { rm -f "$f"; continue; }
exec 3>"$f" 4<"$f"
rm -f "$f"
echo hpcrt:need
head -c @N | { cat >&3; cat >/dev/null; } 2>/dev/null
exec 3>&-
[ `wc -c <&4` -eq @N ] && exec /proc/self/fd/4 serve
exec 4<&-
done
echo hpcrt:nowhere
exit; }
"#;

/// This binary's bytes and the beginning of their BLAKE3, read once.
fn image() -> io::Result<&'static (Vec<u8>, String)> {
    static IMAGE: OnceLock<(Vec<u8>, String)> = OnceLock::new();
    if let Some(image) = IMAGE.get() {
        return Ok(image);
    }
    let bytes = fs::read(OURSELVES)?;
    let hash = blake3::hash(&bytes).to_hex()[..32].to_owned();
    Ok(IMAGE.get_or_init(|| (bytes, hash)))
}

/// Whether this binary has that hash, as an exit code.
///
/// # Errors
/// It cannot be read.
pub fn is_same(hash: &str) -> Result<u8> {
    let (_, ours) = image().op("read this binary")?;
    Ok((ours != hash).into())
}

/// [`SCRIPT`] for this binary and environment.
fn script(bytes: &[u8], hash: &str) -> String {
    // From a shared file system all hosts would read it at once.
    let installed = fs::read_link(OURSELVES).ok().filter(|path| !capture::is_shared(path));
    let quoted = |word: &str| (!word.contains('\'')).then(|| format!("'{word}'"));
    let path = installed.as_ref().and_then(|path| quoted(path.to_str()?)).unwrap_or_else(|| "''".to_owned());
    let above = installed.iter().flat_map(|path| path.ancestors().skip(1)).filter_map(|above| quoted(above.to_str()?));
    let above = above.collect::<Vec<_>>().join(" ");
    let without = std::env::var(VARIABLE).ok().and_then(|words| quoted(&words));
    let without = without.map(|words| format!("export {VARIABLE}={words}")).unwrap_or_default();
    let (length, lines) = (bytes.len().to_string(), SCRIPT.replace("@W", &without));
    lines.replace("@H", hash).replace("@N", &length).replace("@P", &path).replace("@D", &above)
}

/// Starts an agent on `host` and waits until it speaks.
///
/// # Errors
/// The command fails, says nothing in [`START`], or the node has no place to put the binary; with what it said.
pub async fn start(tasks: &Spawner, kind: &AgentKind, host: &str) -> Result<Agent> {
    let starting = async {
        match kind {
            AgentKind::Local => start_here(tasks),
            AgentKind::Ssh => {
                let mut ssh = Command::new("ssh");
                ssh.args(["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T", "-e", "none", host]);
                start_there(tasks, ssh).await
            }
            AgentKind::Command(template) => start_there(tasks, shell(template, host)).await,
            AgentKind::Srun | AgentKind::Launched => Err(Error::new("start the agent", "it comes by itself")),
        }
    };
    let late = async {
        Timer::after(START).await;
        Err(Error::new("start the agent", format!("nothing was heard for {} s", START.as_secs())))
    };
    starting.or(late).await.map_err(|error| error.at(host.to_owned()))
}

/// `CMD {host}` as the words it is made of, however it quotes the host: its name is never shell syntax ([`super::hostlist::Host`]).
fn shell(template: &str, host: &str) -> Command {
    let named = template.replace("{host}", host);
    let line = if template.contains("{host}") { named } else { format!("{template} {host}") };
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{line} \"$@\"")).arg("sh");
    command
}

fn start_here(tasks: &Spawner) -> Result<Agent> {
    let (ours, theirs) = UnixStream::pair().op("start the agent")?;
    let mut command = Command::new(OURSELVES);
    // Not our own standard error: a session outlives the command that started it, and whoever reads what that said.
    command.arg("serve").stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Process::start(&mut command).op("start the agent")?;
    let said = Arc::default();
    if let Some(errors) = process.0.stderr.take() {
        tasks.spawn(listen(OwnedFd::from(errors), Arc::clone(&said))).detach();
    }
    let stream = smol::net::unix::UnixStream::from(Async::new(ours).op("start the agent")?);
    let (reader, writer) = link::trusted(stream.clone(), stream);
    Ok(Agent { reader, writer, process, said })
}

async fn start_there(tasks: &Spawner, mut command: Command) -> Result<Agent> {
    let (bytes, hash) = image().op("read this binary")?;
    let script = script(bytes, hash);
    command.arg("sh").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::start(&mut command).op_on("run", command.get_program())?;
    let said = Arc::default();
    let (input, output, errors) = (process.0.stdin.take(), process.0.stdout.take(), process.0.stderr.take());
    let (Some(input), Some(output), Some(errors)) = (input, output, errors) else {
        return Err(Error::new("start the agent", "its pipes are missing"));
    };
    let hearing = tasks.spawn(listen(OwnedFd::from(errors), Arc::clone(&said)));
    let talk = async {
        let mut input = Async::new(fs::File::from(OwnedFd::from(input)))?;
        let mut output = Async::new(fs::File::from(OwnedFd::from(output)))?;
        input.write_all(script.as_bytes()).await?;
        loop {
            match line(&mut output).await?.as_str() {
                READY => return Ok((output, input)),
                NEED => input.write_all(bytes).await?,
                NOWHERE => {
                    return Err(io::Error::other(
                        "no directory there can hold a program, or has room for it (tried XDG_RUNTIME_DIR, /dev/shm and /tmp)",
                    ));
                }
                // Whatever the user's start-up files print.
                _ => {}
            }
        }
    };
    match talk.await {
        Ok((output, input)) => {
            hearing.detach();
            let (reader, writer) = link::trusted(output, input);
            Ok(Agent { reader, writer, process, said })
        }
        Err(error) => {
            // It may still be about to say why.
            let late = async {
                Timer::after(LAST_WORDS).await;
            };
            hearing.or(late).await;
            Err(failed(process, &said, &error))
        }
    }
}

/// Why the command ended: its status and last words say more than the broken pipe.
fn failed(mut process: Process, said: &Mutex<VecDeque<String>>, error: &io::Error) -> Error {
    let words = said.lock().map(|s| s.iter().cloned().collect::<Vec<_>>().join("; ")).unwrap_or_default();
    let cause = match process.ended() {
        _ if !words.is_empty() => words,
        Some(status) if !status.success() => status.to_string(),
        _ => error.to_string(),
    };
    Error::new("start the agent", cause)
}

/// One line, read byte by byte: what follows the last one belongs to the link.
async fn line(from: &mut (impl smol::io::AsyncRead + Unpin)) -> io::Result<String> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < 4096 {
        from.read_exact(&mut byte).await?;
        if byte == *b"\n" {
            break;
        }
        line.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&line).trim().to_owned())
}

/// Keeps the last lines of a command's standard error.
pub(super) async fn listen(errors: OwnedFd, said: Arc<Mutex<VecDeque<String>>>) {
    const KEPT: usize = 4;
    let Ok(errors) = Async::new(fs::File::from(errors)) else { return };
    let mut lines = BufReader::new(errors).lines();
    while let Some(Ok(line)) = lines.next().await {
        log::debug!("agent: {line}");
        if let Ok(mut said) = said.lock()
            && !line.trim().is_empty()
        {
            said.push_back(line);
            if said.len() > KEPT {
                said.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn a_host_is_its_name_however_the_command_quotes_it() {
        let line = |template, host| shell(template, host).get_args().nth(1).map(OsStr::to_owned);
        assert_eq!(line("ssh -p 1 '{host}'", "u@n1").unwrap(), r#"ssh -p 1 'u@n1' "$@""#);
        assert_eq!(line("rsh", "n1").unwrap(), r#"rsh n1 "$@""#);
    }
}
