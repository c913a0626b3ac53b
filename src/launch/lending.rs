//! The servers that a job has nodes run for its programs: started before its ranks, ended after them.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use async_channel::Receiver;
use smol::Timer;
use smol::future::FutureExt;

use super::console::Console;
use super::root::{News, Root};
use crate::error::{Error, Result};
use crate::net::auth::nonce;
use crate::net::wire::borrow::Borrow;
use crate::net::wire::control::{JobId, NodeId, Order, Service, Target};
use crate::net::wire::files::Forward;

/// A server runs within this time after it was ordered.
const START: Duration = Duration::from_secs(20);

/// See the module. To be ended with [`Lending::end`]; a node whose front end is gone ends its servers itself.
#[derive(Debug)]
pub(super) struct Lending {
    job: JobId,
    nodes: Vec<NodeId>,
    /// What runs there.
    server: &'static str,
}

/// A host, and what it is to do.
type Wish = (String, Service);

impl Lending {
    /// Has memory servers started that are to be, and puts their addresses into `wish`.
    ///
    /// # Errors
    /// A host is not there, or cannot lend so much; nothing of it is left then.
    pub(super) async fn memory(
        root: &Rc<Root>,
        job: JobId,
        wish: &mut Borrow,
        news: &Receiver<News>,
        console: &Console,
    ) -> Result<Lending> {
        let started = wish.servers.iter_mut().filter(|lender| lender.lend > 0);
        let (hosts, places): (Vec<Wish>, Vec<_>) =
            started.map(|one| ((one.name.clone(), Service::Memory { bytes: one.lend }), &mut one.addresses)).unzip();
        let (lending, found) = Lending::start(root, job, &hosts, &wish.key, news, console).await?;
        places.into_iter().zip(found).for_each(|(place, addresses)| *place = addresses);
        Ok(lending)
    }

    /// The same for I/O workers.
    ///
    /// # Errors
    /// As [`Lending::memory`]'s.
    pub(super) async fn files(
        root: &Rc<Root>,
        job: JobId,
        wish: &mut Forward,
        news: &Receiver<News>,
        console: &Console,
    ) -> Result<Lending> {
        let hosts: Vec<Wish> = wish.hosts.iter().map(|host| (host.name.clone(), Service::Files)).collect();
        let (lending, found) = Lending::start(root, job, &hosts, &wish.key, news, console).await?;
        wish.hosts.iter_mut().zip(found).for_each(|(host, addresses)| host.addresses = addresses);
        Ok(lending)
    }

    async fn start(
        root: &Rc<Root>,
        job: JobId,
        wishes: &[Wish],
        key: &[u8; 32],
        news: &Receiver<News>,
        console: &Console,
    ) -> Result<(Lending, Vec<Vec<String>>)> {
        let up = root.up();
        let node = |(name, service): &Wish| {
            let found = up.iter().find(|(node, _)| root.host(*node) == name);
            let missing = || {
                let (operation, remedy) = match service {
                    Service::Memory { .. } => {
                        ("have it lend memory", "name hosts of the session, or start hpcrt memserver there")
                    }
                    Service::Files => ("have it write files", "name hosts of the session"),
                };
                Error::usage(operation, "it is none of the hosts that are up").on(name).remedy(remedy)
            };
            found.map(|(node, _)| *node).ok_or_else(missing)
        };
        let nodes: Vec<NodeId> = wishes.iter().map(node).collect::<Result<_>>()?;
        let server = wishes.first().map_or("server", |(_, service)| service.server());
        let lending = Lending { job, nodes, server };
        for (node, (_, service)) in lending.nodes.iter().zip(wishes) {
            let nonce = nonce();
            let order = Order::Lend { job, service: *service, key: root.key.hide(&nonce, key), nonce };
            root.order(Target::Node(*node), order, Vec::new()).await;
        }
        match lending.started(root, news, console).await {
            Ok(mut found) => {
                let addresses = lending.nodes.iter().map(|node| found.remove(node).unwrap_or_default()).collect();
                Ok((lending, addresses))
            }
            Err(error) => {
                lending.end(root).await;
                Err(error)
            }
        }
    }

    async fn started(
        &self,
        root: &Rc<Root>,
        news: &Receiver<News>,
        console: &Console,
    ) -> Result<BTreeMap<NodeId, Vec<String>>> {
        let refused = |cause: String| Error::new(format!("start the {}", self.server), cause);
        let mut found = BTreeMap::new();
        let hear = async {
            while found.len() < self.nodes.len() {
                match news.recv().await {
                    Ok(News::Lent { node, addresses }) => drop(found.insert(node, addresses)),
                    Ok(News::Unlent { node, error } | News::Lost { node, error }) if self.nodes.contains(&node) => {
                        return Err(refused(error).at(root.host(node).to_owned()));
                    }
                    Ok(_) => {}
                    Err(_) => return Err(refused("the session is being ended".to_owned())),
                }
            }
            Ok(())
        };
        let interrupted = async {
            let signal = console.ended_by().await;
            Err(refused(format!("ended by {}", signal.as_str())))
        };
        let late = async {
            Timer::after(START).await;
            Err(refused(format!("it did not come up within {} s", START.as_secs())))
        };
        let heard = hear.or(interrupted).or(late).await;
        heard.map_err(|error| match self.nodes.iter().find(|node| !found.contains_key(node)) {
            Some(node) => error.at(root.host(*node).to_owned()),
            None => error,
        })?;
        Ok(found)
    }

    /// Ends them.
    pub(super) async fn end(&self, root: &Root) {
        for node in &self.nodes {
            root.order(Target::Node(*node), Order::Unlend { job: self.job }, Vec::new()).await;
        }
    }
}
