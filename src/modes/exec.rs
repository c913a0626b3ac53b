//! `hpcrt exec`: runs a program on many hosts.

use std::ffi::OsString;
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Instant;

use smol::LocalExecutor;

use super::job::{self, Passed, Where};
use crate::cli::{Exec, Part, PartFlags};
use crate::error::say;
use crate::launch;
use crate::launch::blocks::Blocks;
use crate::launch::console::{Console, catch_signals};
use crate::launch::door::{self, Door, Porter};
use crate::launch::guest::Own;
use crate::launch::hosting::Ranks;
use crate::launch::hostlist::Host;
use crate::launch::outer::Outer;
use crate::launch::progress::{Progress, When};
use crate::launch::root::parents;
use crate::launch::session::{Reading, Session, may_share};
use crate::launch::start_tree::StartCost;
use crate::launch::stats::Phases;
use crate::launch::status::Subject;
use crate::loader::catalog::as_path;
use crate::net::wire::control::{AgentKind, View};
use crate::net::wire::session::JobSpec;
use crate::sys::process;
use crate::{Error, Result};

/// Runs the mode.
///
/// # Errors
/// Whatever keeps the job from running; how it went otherwise is the exit code.
pub(super) fn run(flags: &Exec, parts: &[Part]) -> Result<u8> {
    let begun = Instant::now();
    // Before anything is opened.
    let front = job::front(flags.front)?;
    let named = flags.hosts.is_some() || flags.hostfile.is_some() || flags.agent.is_some();
    if !flags.dry_run
        && let Some(outer) = Outer::find()?
    {
        if named || job::not_ours!(flags).is_some() {
            let cause = format!("a launcher started {} of it", outer.size);
            let remedy =
                "leave hosts, ranks and streams to it; or unset PMI_SIZE, PMI_RANK and PMI_FD for a job of each";
            return Err(Error::usage("choose hosts, ranks or streams", cause).remedy(remedy));
        }
        let [Part { words, .. }] = parts else {
            let cause = "a launcher started this one, and starts one program";
            return Err(Error::usage("run several programs", cause).remedy("give the launcher several"));
        };
        return joined(flags, words, outer);
    }
    let signals = catch_signals()?;
    process::raise_nofile();
    process::keep_freed_memory();
    let mut parts = job::parts(parts, flags.ranks, flags.ppn, flags.hosts.as_deref());
    let named = job::hosts_of(&parts, flags.hosts.as_deref());
    let lending = job::lenders(flags.memory.as_deref(), flags.io_forward.as_deref())?;
    let Where { hosts, lenders, agent, here } =
        job::place(named.as_deref(), flags.hostfile.as_deref(), flags.agent.clone(), lending)?;
    if flags.pull && flags.view == View::None {
        return Err(Error::usage("use --pull", "with --view none nothing is sent"));
    }
    let launcher = job::launcher(&mut parts, flags.view, job::not_ours!(flags))?;
    // Without hosts, without an allocation and without a number a program runs once, as it does without hpcrt.
    let alone = here && launcher.is_none();
    let once = |PartFlags { ranks, ppn, .. }: &PartFlags| ranks.or(*ppn).is_none_or(|count| count.get() == 1);
    let once = alone && matches!(&parts[..], [part] if once(&part.flags));
    let passed = Passed { host: agent == AgentKind::Local, rank: once || launcher.is_some() };
    let mut spec = job::spec!(flags, &parts, passed)?;
    if let Some(launcher) = launcher.as_ref().filter(|_| !may_share(&spec)) {
        return job::alone(launcher, &spec);
    }
    for block in spec.blocks.iter_mut().filter(|block| alone && block.per_host.is_none()) {
        block.ranks.get_or_insert(1);
    }
    let ours = &hosts[..hosts.len() - lenders];
    let Blocks { placement, .. } = Blocks::new(ours, ours, &spec.blocks)?;
    if flags.dry_run {
        let _ = write!(io::stdout(), "{}{}", placement.render(), tree(&hosts, &job::start_cost(flags.fan_out)?));
        return Ok(0);
    }
    job::make_papers(&spec)?;
    if !flags.quiet {
        placement.notes.iter().for_each(say);
    }
    let mut setup = job::setup!(flags, &hosts, lenders, agent);
    // Nobody logs in where he is.
    setup.first_here = here && lenders > 0 && !setup.agent.come();
    // Else the agents prepare no view, and nobody needs to know what the program loads.
    if !may_share(&spec) {
        spec.view = View::None;
        setup.view = View::None;
    }
    // Before there are threads.
    let porter = Porter::start();
    let tasks = Rc::new(LocalExecutor::new());
    smol::block_on(tasks.run(async {
        let progress = Progress::new(if flags.quiet { When::Never } else { flags.progress });
        let console = Console::own(&tasks, signals, progress, front)?;
        let mut phases = Phases { discover: begun.elapsed(), ..Phases::default() };
        // The closure is found and read while the agents start, and sent on as soon as they are up.
        let reading = Reading::start(flags.compress, setup.view != View::None, flags.pull)?;
        let resolving = reading.resolve(&tasks, &spec);
        let name = parts[0].words[0].to_string_lossy().into_owned();
        let subject = Subject::new(door::job_name(), Some(name), begun, hosts.len(), reading.source());
        let job = async {
            let session = Session::start(&tasks, reading, hosts, &setup, &subject, &console).await?;
            phases.start_agents = session.started;
            let ranks = launcher.as_ref().map_or(Ranks::Ours, Ranks::By);
            let code = session.run(&spec, resolving, phases, &console, ranks).await;
            session.stop().await;
            code
        };
        let ended = match porter.and_then(|porter| Door::open(&subject.id, porter)) {
            Ok(door) => {
                let (subject, spawner) = (Rc::clone(&subject), Rc::clone(&tasks));
                let answering = tasks.spawn(async move { subject.answer_at(door, &spawner).await });
                let code = job.await;
                answering.cancel().await;
                code
            }
            Err(error) => {
                if !flags.quiet {
                    console.say(format_args!("hpcrt status will not show this job: {error}"));
                }
                job.await
            }
        };
        Ok(console.conclude(ended).await)
    }))
}

/// One of several that a launcher started: runs its rank, and its part of the job.
fn joined(flags: &Exec, program: &[OsString], outer: Outer) -> Result<u8> {
    let signals = catch_signals()?;
    let part = Part { flags: PartFlags::default(), words: program.to_vec() };
    let spec = job::spec!(flags, &[part], Passed { host: false, rank: true })?;
    if let Some(flag) = job::for_agents(&spec) {
        let cause = "the ranks, their hosts and their end are another launcher's";
        return Err(Error::usage("use it", cause).on(flag).remedy("have hpcrt start them"));
    }
    let block = &spec.blocks[0];
    let own = Own {
        words: program.to_vec(),
        path: as_path(&block.program).to_owned(),
        cwd: flags.cwd.is_some().then(|| as_path(&block.cwd).to_owned()),
        env: job::variables(&flags.env)?,
    };
    let shown = may_share(&spec);
    let quiet = flags.quiet || outer.rank > 0;
    launch::joined::run(outer, &own, shown, signals, |party| {
        let begun = Instant::now();
        let signals = catch_signals()?;
        process::raise_nofile();
        let tasks = Rc::new(LocalExecutor::new());
        smol::block_on(tasks.run(async {
            let hosts: Vec<Host> = party.hosts.iter().map(Host::named).collect();
            let mut setup = job::setup!(flags, &hosts, 0, AgentKind::Launched);
            setup.meeting = Some(party.meeting);
            let console = Console::own(&tasks, signals, Progress::new(When::Never), None)?;
            let reading = Reading::start(flags.compress, true, flags.pull)?;
            let resolving = reading.resolve(&tasks, &spec);
            let name = program[0].to_string_lossy().into_owned();
            let subject = Subject::new(door::job_name(), Some(name), begun, hosts.len(), reading.source());
            let job = async {
                let session = Session::start(&tasks, reading, hosts, &setup, &subject, &console).await?;
                let phases = Phases { start_agents: session.started, ..Phases::default() };
                let spec = JobSpec { quiet, ..spec };
                let code = session.run(&spec, resolving, phases, &console, Ranks::Coming(&party.counts)).await;
                session.stop().await;
                code
            };
            Ok(console.conclude(job.await).await)
        }))
    })
}

/// The control tree as `--dry-run` shows it.
fn tree(hosts: &[Host], cost: &StartCost) -> String {
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    let mut children = std::collections::BTreeMap::<u32, Vec<u32>>::new();
    for (node, parent) in (1..).zip(parents(count, cost)) {
        children.entry(parent).or_default().push(node);
    }
    let name = |node: u32| hosts[node as usize - 1].name.as_str();
    let mut text = String::new();
    for (parent, nodes) in children {
        let from = if parent == 0 { "this process" } else { name(parent) };
        let names: Vec<&str> = nodes.into_iter().map(name).collect();
        text += &format!("{from} starts {}\n", launch::fold::fold(&names));
    }
    text
}
