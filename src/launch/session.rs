//! A session: nodes that are up, their log and stores, and the jobs that run on them, one or many.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_channel::{Receiver, bounded};
use smol::future::FutureExt;
use smol::{Task, Timer};

use super::card::Card;
use super::console::Console;
use super::hosting::{self, Ranks};
use super::hostlist::Host;
use super::loading::{self, Needs, Wishes};
use super::mpi::Mpi;
use super::overlay::Spawner;
use super::progress;
use super::report::{self, Report};
use super::root::{Root, Setup};
use super::run::{self, Outcome};
use super::stats::{Phases, Stats};
use super::status::Subject;
use super::timeline::{self, Moment};
use crate::error::EXIT_FAILED;
use crate::loader::capture;
use crate::loader::catalog::as_path;
use crate::loader::closure::{self, Environment};
use crate::loader::hints::Hints;
use crate::loader::source::{Compression, Counted, Finding, READERS, Source};
use crate::loader::tally::Tally;
use crate::net::wire::control::View;
use crate::net::wire::session::{Block, JobSpec};
use crate::{Error, Result, error::Context};

/// Reading begins before the nodes are up; this is the reader.
#[derive(Debug)]
pub struct Reading {
    source: Arc<Source>,
    found: Receiver<Finding>,
}

/// What a job needs, being found and read.
#[derive(Debug)]
pub struct Resolving {
    found: Task<Result<Resolved>>,
    begun: Instant,
    /// What the reader had done before.
    before: (Counted, Tally),
}

#[derive(Debug, Default)]
struct Resolved {
    needs: Needs,
    /// How long it took to find them.
    took: Duration,
    /// What earlier runs of the program loaded.
    hints: Option<Hints>,
}

/// See the module.
#[derive(Debug)]
pub struct Session {
    root: Rc<Root>,
    hosts: Vec<Host>,
    /// The last so many of the hosts run no ranks.
    lenders: usize,
    source: Arc<Source>,
    /// Closed when the log is laid over the nodes.
    log: Receiver<()>,
    /// Time between two looks for what others changed.
    fresh: Duration,
    min_hosts: Option<u32>,
    /// Hosts that did not come up.
    missing: usize,
    /// How long it took to bring the nodes up.
    pub started: Duration,
}

impl Reading {
    /// A reader that has read nothing. `views`: jobs will have views. `pull`: what is asked for late goes to those who ask.
    ///
    /// # Errors
    /// Its threads cannot be started.
    pub fn start(compression: Compression, views: bool, pull: bool) -> Result<Reading> {
        let (source, found) = Source::start(compression, if views { READERS } else { 1 }, pull)?;
        Ok(Reading { source, found })
    }

    /// The reader.
    pub fn source(&self) -> Arc<Source> {
        Arc::clone(&self.source)
    }

    /// Begins to find and read what a job needs.
    pub fn resolve(&self, tasks: &Spawner, job: &JobSpec) -> Resolving {
        resolve(tasks, &self.source, job)
    }
}

impl Session {
    /// Brings the nodes up; see [`Root::start`].
    ///
    /// # Errors
    /// Fewer hosts than needed are up, or a signal came first.
    pub async fn start(
        tasks: &Spawner,
        reading: Reading,
        hosts: Vec<Host>,
        setup: &Setup,
        subject: &Subject,
        console: &Console,
    ) -> Result<Session> {
        let begun = Instant::now();
        let counters =
            progress::Counters { hosts: u32::try_from(hosts.len()).unwrap_or(u32::MAX), ..Default::default() };
        let show = |root: &Rc<Root>| {
            let _ = subject.root.set(Rc::clone(root));
            let hosts_up = u32::try_from(root.up().len()).unwrap_or(u32::MAX);
            console.show(&progress::Counters { hosts_up, ..counters });
        };
        let interrupted = async {
            let signal = console.ended_by().await;
            Error::new("start the agents", format!("ended by {}", signal.as_str()))
        };
        let root = Root::start(Rc::clone(tasks), setup, console, show, interrupted).await?;
        let Reading { source, found } = reading;
        let (laid, log) = bounded(1);
        let lay = {
            let (root, source) = (Rc::clone(&root), Arc::clone(&source));
            async move {
                source.begun().await;
                root.start_log(source, found).await;
                laid.close();
            }
        };
        tasks.spawn(lay).detach();
        let missing = root.lost().len();
        let (fresh, min_hosts, lenders, started) = (setup.fresh, setup.min_hosts, setup.lenders, begun.elapsed());
        Ok(Session { root, hosts, lenders, source, log, fresh, min_hosts, missing, started })
    }

    /// Begins to find and read what a job needs.
    pub fn resolve(&self, tasks: &Spawner, job: &JobSpec) -> Resolving {
        resolve(tasks, &self.source, job)
    }

    /// Runs a job to its end and shows how it went. `phases`: what happened before.
    ///
    /// # Errors
    /// The job could not be run; how it ended otherwise is its exit code.
    pub async fn run(
        &self,
        job: &JobSpec,
        resolving: Resolving,
        phases: Phases,
        console: &Console,
        ranks: Ranks<'_>,
    ) -> Result<u8> {
        let _run = self.source.run();
        let running = self.run_resolving(job, resolving, phases, console, ranks);
        running.or(self.show_progress(console)).or(self.stay_fresh()).await
    }

    /// Looks at the shared file system for what others changed, from time to time; never ends.
    async fn stay_fresh(&self) -> Result<u8> {
        loop {
            Timer::after(self.fresh).await;
            let source = Arc::clone(&self.source);
            smol::unblock(move || source.look_for_changes(false)).await;
        }
    }

    /// Keeps the progress line up to date; never ends.
    async fn show_progress(&self, console: &Console) -> Result<u8> {
        /// Time between two looks.
        const TICK: Duration = Duration::from_millis(100);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        loop {
            let Counted { files, bytes, .. } = self.source.counters.read();
            let (hosts_up, hosts) = (count(self.root.up().len()), count(self.hosts.len()));
            console.show(&progress::Counters { hosts_up, hosts, files, bytes });
            Timer::after(TICK).await;
        }
    }

    async fn run_resolving(
        &self,
        job: &JobSpec,
        resolving: Resolving,
        phases: Phases,
        console: &Console,
        ranks: Ranks<'_>,
    ) -> Result<u8> {
        let entered = self.root.now();
        let Resolving { found, begun, before: (before, touched) } = resolving;
        // The shared file system may hang.
        let interrupted = async {
            let signal = console.ended_by().await;
            Err(Error::new("find the program's files", format!("ended by {}", signal.as_str())))
        };
        let Resolved { needs, took: resolve, hints } = found.or(interrupted).await?;
        let roots = needs.roots.clone();
        if !needs.roots.is_empty() {
            self.source.begin_log();
            let _ = self.log.recv().await;
            self.source.warnings().iter().for_each(|warning| console.say(warning));
        }
        // Hosts may have been lost since the start. A job of its own needs those it was given; a session's takes what is left.
        if self.root.lost().len() > self.missing {
            let tolerant = !console.own || job.keep_going;
            self.root.enough(if tolerant { Some(1) } else { self.min_hosts }, |line| console.say(line))?;
        }
        let hosts = &self.hosts[..self.hosts.len() - self.lenders];
        let outcome = match ranks {
            Ranks::Ours => run::run(&self.root, hosts, job, needs, console).await?,
            others => hosting::run(&self.root, hosts, job, needs, console, others).await?,
        };
        let long = begun.elapsed() > self.fresh;
        if long || hints.is_some() {
            let source = Arc::clone(&self.source);
            let look_back = move || {
                if let Some(hints) = hints
                    && let Err(error) = hints.keep(source.told_since(&roots, begun))
                {
                    log::info!("{error}");
                }
                if long {
                    source.look_for_changes(true);
                }
            };
            // The shared file system may hang.
            let asked = async {
                console.ended_by().await;
            };
            smol::unblock(look_back).or(asked).await;
        }
        self.source.warnings().iter().for_each(|warning| console.say(warning));
        let now = self.source.counters.read();
        let phases = Phases { resolve, load: outcome.loading, run: outcome.ran, cleanup: outcome.cleanup, ..phases };
        let stats = {
            let progress = outcome.card.progress.borrow();
            Stats {
                hosts: u32::try_from(outcome.placement.shares.len()).unwrap_or(u32::MAX),
                ranks: outcome.card.ranks,
                phases,
                files: now.files - before.files,
                bytes_read: now.bytes - before.bytes,
                bytes_sent: outcome.received.0,
                bytes_pulled: outcome.received.1,
                cache_hits: now.hits - before.hits,
                misses: now.misses - before.misses,
                operations_done: now.operations - before.operations,
                operations_avoided: progress.avoided,
                original: progress.passed,
                paths: self.source.touched().since(&touched),
                originals: progress.originals.clone(),
                spreads: timeline::spreads(&progress.lines),
                clock_error: progress.lines.iter().map(|line| line.error).max().unwrap_or(0) as f64 / 1e6,
                writing: progress.writing.clone(),
                paging: progress.paging.clone().map(|paging| (paging, outcome.card.lenders.clone())),
                exit_code: outcome.code,
                failures: outcome.ends.to_json(&outcome.placement),
                limits: outcome.limits.clone(),
            }
        };
        show(job, &outcome, &stats, console);
        let mut code = outcome.code;
        for (operation, path, text) in papers(job, entered, &stats, &outcome.card) {
            let at = path.clone();
            let written = smol::unblock(move || fs::write(&at, text));
            let interrupted = async {
                let signal = console.ended_by().await;
                Err(io::Error::new(io::ErrorKind::Interrupted, format!("ended by {}", signal.as_str())))
            };
            if let Err(error) = written.or(interrupted).await.op_on(operation, path) {
                console.say(error);
                // What the ranks did is more than that.
                code = if code == 0 { EXIT_FAILED } else { code };
            }
        }
        Ok(code)
    }

    /// The hosts that are up.
    pub fn hosts(&self) -> Vec<String> {
        self.root.up().iter().map(|(_, at)| self.hosts[*at].name.clone()).collect()
    }

    /// Bytes of files read into the session.
    pub fn stored(&self) -> u64 {
        self.source.counters.read().bytes
    }

    /// Ends the session: nothing of it is left when this returns, or its hosts are given up.
    pub async fn stop(&self) {
        self.root.stop().await;
    }
}

/// The closure on a thread of its own. What earlier jobs of the session read is compared with the shared file system.
fn resolve(tasks: &Spawner, source: &Arc<Source>, job: &JobSpec) -> Resolving {
    let (source, job, began) = (Arc::clone(source), job.clone(), Instant::now());
    let before = (source.counters.read(), source.touched());
    let found = tasks.spawn(smol::unblock(move || {
        let parts = || (0..).zip(&job.blocks);
        if job.view == View::None {
            let mpi = |(part, block): (u32, &Block)| {
                Some((part, Mpi::of_program(as_path(&block.program), &Environment::of(&block.env, &block.cwd))?))
            };
            let needs = Needs { mpi: parts().filter_map(mpi).collect(), ..Needs::default() };
            return Ok(Resolved { needs, ..Resolved::default() });
        }
        let begun = Instant::now();
        let preload = source.preload();
        let mut needs = Needs::default();
        for (part, block) in parts() {
            let (program, env, scripts) =
                (as_path(&block.program), Environment::of(&block.env, &block.cwd), scripts(block));
            let wishes = Wishes { prefixes: &job.prefixes, excludes: &job.excludes, scripts: &scripts };
            needs.join(loading::resolve(&source, &preload, part, program, &env, &wishes)?);
        }
        source.compare(&needs.roots, begun, &preload);
        // Without shared files there is nothing to remember.
        let main = &job.blocks[0];
        let hints = if needs.roots.is_empty() {
            None
        } else {
            Hints::of(as_path(&main.program), &subject(main, &scripts(main)))
        };
        for (path, need) in hints.iter().flat_map(Hints::entries) {
            preload.hint(path, *need, &needs.roots);
        }
        Ok(Resolved { needs, took: begun.elapsed(), hints })
    }));
    Resolving { found, begun: began, before }
}

/// The words behind the program, as the paths that they may be.
fn arguments(block: &Block) -> impl Iterator<Item = PathBuf> {
    block.argv.iter().skip(1).map(|word| as_path(&block.cwd).join(as_path(word)))
}

/// The arguments that are files which an interpreter runs, without symbolic links.
fn scripts(block: &Block) -> Vec<PathBuf> {
    let scripts = arguments(block).filter(|path| loading::is_script(path));
    scripts.filter_map(|script| script.canonicalize().ok()).collect()
}

/// What an interpreter is to run: two programs with the same interpreter load different things.
fn subject(block: &Block, scripts: &[PathBuf]) -> Vec<Vec<u8>> {
    if let Some(script) = scripts.first() {
        return vec![script.as_os_str().as_bytes().to_vec()];
    }
    let module = block.argv.iter().skip(1).skip_while(|word| **word != b"-m").take(2);
    module.cloned().collect()
}

/// Whether the job may load anything from a file system that the hosts share: then the agents prepare for it while they start.
pub fn may_share(job: &JobSpec) -> bool {
    let of = |block: &Block| {
        let env = Environment::of(&block.env, &block.cwd);
        let python = closure::variable(&block.env, "PYTHONPATH");
        let lists = [env.library_path, env.preload, python].into_iter().flatten();
        let listed: Vec<_> = lists.flat_map(|list| std::env::split_paths(&list).collect::<Vec<_>>()).collect();
        let mut all = std::iter::once(as_path(&block.program).to_owned()).chain(arguments(block)).chain(listed);
        all.any(|path| capture::is_shared(&path))
    };
    job.view != View::None && (!job.prefixes.is_empty() || job.blocks.iter().any(of))
}

fn show(job: &JobSpec, outcome: &Outcome, stats: &Stats, console: &Console) {
    console.print(outcome.ends.table(&outcome.placement));
    let worth_it = stats.hosts > 1 || stats.ranks > 1 || stats.files > 0;
    if !job.quiet && (worth_it || job.verbose) {
        console.print(stats.summary());
    }
}

/// What is to be written of a job: as what, where to, and the text. `entered`: when the session was asked for it.
fn papers(job: &JobSpec, entered: Moment, stats: &Stats, card: &Card) -> Vec<(&'static str, PathBuf, String)> {
    let path = |path: &Option<Vec<u8>>| path.as_deref().map(|path| as_path(path).to_owned());
    let statistics = path(&job.stats).map(|at| ("write the statistics", at, format!("{:#}\n", stats.to_json())));
    let drawn = path(&job.report).map(|at| {
        let text = draw(&at, entered, stats, card);
        ("write the report", at, text)
    });
    statistics.into_iter().chain(drawn).collect()
}

/// The `--report`.
fn draw(path: &Path, entered: Moment, stats: &Stats, card: &Card) -> String {
    let micros = |time: Duration| Moment::try_from(time.as_micros()).unwrap_or(Moment::MAX / 4);
    let Phases { start_agents, load, run, cleanup, .. } = stats.phases;
    let mut front_end = Vec::new();
    if !start_agents.is_zero() {
        front_end.push(("start agents", 0, micros(start_agents)));
    }
    front_end.push(("resolve", entered, card.ordered));
    let mut from = card.ordered;
    for (what, took) in [("load", load), ("run", run), ("clean up", cleanup)] {
        front_end.push((what, from, from + micros(took)));
        from += micros(took);
    }
    let report = Report {
        title: &format!("{}: {}", card.program, stats.size()),
        summary: &stats.summary().replace("hpcrt: ", ""),
        front_end: &front_end,
        lines: &card.progress.borrow().lines,
        paths: &super::stats::paths_json(&stats.paths),
        originals: &super::stats::paths_json(&stats.originals),
    };
    let html = path.extension().is_some_and(|e| e == "html");
    if html { report::html(&report) } else { report::svg(&report) }
}
