//! The memory servers that a job has its nodes run: started before its ranks, ended after them.

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
use crate::net::wire::borrow::{Borrow, Lender};
use crate::net::wire::control::{JobId, NodeId, Order, Target};

/// A server runs within this time after it was ordered.
const START: Duration = Duration::from_secs(20);

/// See the module. To be ended with [`Lending::end`]; a node whose front end is gone ends its servers itself.
#[derive(Debug)]
pub(super) struct Lending {
    job: JobId,
    nodes: Vec<NodeId>,
}

impl Lending {
    /// Has the servers started that are to be, and puts their addresses into `wish`.
    ///
    /// # Errors
    /// A host is not there, or cannot lend so much; nothing of it is left then.
    pub(super) async fn start(
        root: &Rc<Root>,
        job: JobId,
        wish: &mut Borrow,
        news: &Receiver<News>,
        console: &Console,
    ) -> Result<Lending> {
        let up = root.up();
        let node = |lender: &Lender| {
            let found = up.iter().find(|(node, _)| root.host(*node) == lender.name);
            let missing = || {
                let error = Error::usage("have it lend memory", "it is none of the hosts that are up");
                error.on(&lender.name).remedy("name hosts of the session, or start hpcrt memserver there")
            };
            found.map(|(node, _)| *node).ok_or_else(missing)
        };
        let wanted: Vec<(usize, NodeId)> = (0..)
            .zip(&wish.servers)
            .filter(|(_, lender)| lender.lend > 0)
            .map(|(at, lender)| Ok((at, node(lender)?)))
            .collect::<Result<_>>()?;
        let lending = Lending { job, nodes: wanted.iter().map(|(_, node)| *node).collect() };
        for (at, node) in &wanted {
            let (nonce, bytes) = (nonce(), wish.servers[*at].lend);
            let order = Order::Lend { job, bytes, key: root.key.hide(&nonce, &wish.key), nonce };
            root.order(Target::Node(*node), order, Vec::new()).await;
        }
        match lending.started(root, news, console).await {
            Ok(mut addresses) => {
                for (at, node) in wanted {
                    wish.servers[at].addresses = addresses.remove(&node).unwrap_or_default();
                }
                Ok(lending)
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
        const OPERATION: &str = "start the memory server";
        let mut found = BTreeMap::new();
        let hear = async {
            while found.len() < self.nodes.len() {
                match news.recv().await {
                    Ok(News::Lent { node, addresses }) => drop(found.insert(node, addresses)),
                    Ok(News::Unlent { node, error } | News::Lost { node, error }) if self.nodes.contains(&node) => {
                        return Err(Error::new(OPERATION, error).at(root.host(node).to_owned()));
                    }
                    Ok(_) => {}
                    Err(_) => return Err(Error::new(OPERATION, "the session is being ended")),
                }
            }
            Ok(())
        };
        let interrupted = async {
            let signal = console.ended_by().await;
            Err(Error::new(OPERATION, format!("ended by {}", signal.as_str())))
        };
        let late = async {
            Timer::after(START).await;
            Err(Error::new(OPERATION, format!("it did not come up within {} s", START.as_secs())))
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
