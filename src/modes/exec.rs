//! `hpcrt exec`: runs a program on many hosts.

use std::cell::OnceCell;
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Instant;

use smol::LocalExecutor;
use smol::future::FutureExt;

use super::job::{self, Where};
use crate::Result;
use crate::cli::{Exec, Part};
use crate::error::{Context, say};
use crate::launch::blocks::Blocks;
use crate::launch::console::{Console, catch_signals};
use crate::launch::door::{self, Door, Porter};
use crate::launch::hostlist::Host;
use crate::launch::progress::{Progress, When};
use crate::launch::root::parents;
use crate::launch::session::{Reading, Session, may_share};
use crate::launch::stats::Phases;
use crate::launch::status::{Kind, Subject};
use crate::net::wire::control::View;
use crate::sys::process;

/// Runs the mode.
///
/// # Errors
/// Whatever keeps the job from running; how it went otherwise is the exit code.
pub(super) fn run(flags: &Exec, parts: &[Part]) -> Result<u8> {
    let begun = Instant::now();
    let signals = catch_signals()?;
    process::raise_nofile();
    process::keep_freed_memory();
    let parts = job::parts(parts, flags.ranks, flags.ppn, flags.hosts.as_deref());
    let named = job::hosts_of(&parts, flags.hosts.as_deref());
    let Where { hosts, agent, here } = job::place(named.as_deref(), flags.hostfile.as_deref(), flags.agent.clone())?;
    let mut spec = job::spec!(flags, &parts, &agent)?;
    // Without hosts, without an allocation and without a number a program runs once, as it does without hpcrt.
    for block in spec.blocks.iter_mut().filter(|block| here && block.per_host.is_none()) {
        block.ranks.get_or_insert(1);
    }
    let Blocks { placement, .. } = Blocks::new(&hosts, &spec.blocks)?;
    if flags.dry_run {
        let _ = write!(io::stdout(), "{}{}", placement.render(), tree(&hosts, flags.fan_out));
        return Ok(0);
    }
    if !flags.quiet {
        placement.notes.iter().for_each(say);
    }
    let mut setup = job::setup!(flags, &hosts, agent);
    // Else the agents prepare no view, and nobody needs to know what the program loads.
    if !may_share(&spec) {
        spec.view = View::None;
        setup.view = View::None;
    }
    let mut front = flags.front.map(process::take_socket).transpose().op("use the descriptor of --front")?;
    // Before there are threads.
    let porter = Porter::start();
    let tasks = Rc::new(LocalExecutor::new());
    smol::block_on(tasks.run(async {
        let console = Console::own(&tasks, signals)?;
        *console.front.borrow_mut() = front.take();
        let mut phases = Phases { discover: begun.elapsed(), ..Phases::default() };
        let progress = Progress::new(if flags.quiet { When::Never } else { flags.progress });
        *console.progress.borrow_mut() = Some(progress);
        // The closure is found and read while the agents start, and sent on as soon as they are up.
        let reading = Reading::start(flags.compress, setup.view != View::None)?;
        let resolving = reading.resolve(&tasks, &spec);
        let subject = Rc::new(Subject {
            id: door::job_name(),
            kind: Kind::Job,
            program: Some(parts[0].words[0].to_string_lossy().into_owned()),
            begun,
            hosts: hosts.len(),
            source: reading.source(),
            root: OnceCell::new(),
        });
        let job = async {
            let session = Session::start(&tasks, reading, hosts, &setup, &subject, &console).await?;
            phases.start_agents = session.started;
            let code = session.run(&spec, resolving, phases, &console).await;
            session.stop().await;
            code
        };
        match porter.and_then(|porter| Door::open(&subject.id, porter)) {
            Ok(door) => job.or(async { match Rc::clone(&subject).answer_at(door, &tasks).await {} }).await,
            Err(error) => {
                if !flags.quiet {
                    console.say(format_args!("hpcrt status will not show this job: {error}"));
                }
                job.await
            }
        }
    }))
}

/// The control tree as `--dry-run` shows it.
fn tree(hosts: &[Host], fan_out: u32) -> String {
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    let mut children = std::collections::BTreeMap::<u32, Vec<u32>>::new();
    for (node, parent) in (1..).zip(parents(count, fan_out)) {
        children.entry(parent).or_default().push(node);
    }
    let name = |node: u32| hosts[node as usize - 1].name.as_str();
    let mut text = String::new();
    for (parent, nodes) in children {
        let from = if parent == 0 { "this process" } else { name(parent) };
        let names: Vec<&str> = nodes.into_iter().map(name).collect();
        text += &format!("{from} starts {}\n", crate::launch::fold::fold(&names));
    }
    text
}
