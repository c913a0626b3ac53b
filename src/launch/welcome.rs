//! The door of a node: accepts connections, and keeps those who have not proved themselves from keeping others out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::time::Duration;

use smol::{Async, Task, Timer};

use super::overlay::Spawner;
use super::subtree::Arrivals;
use crate::net::auth::SessionKey;
use crate::net::link;

/// Connections that have not proved themselves, at most; each costs a descriptor and a few kilobytes.
const STRANGERS: usize = 256;
/// Before the next attempt when no connection can be accepted (no descriptor is free).
const PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections of nodes that have the key; others are dropped, after [`link::HANDSHAKE`] at the latest.
pub(super) async fn welcome(tasks: Spawner, listener: Async<TcpListener>, key: SessionKey, arrivals: Arrivals) {
    let waiting: Rc<RefCell<Waiting<Task<()>>>> = Rc::default();
    loop {
        let Ok((stream, from)) = listener.accept().await else {
            Timer::after(PAUSE).await;
            continue;
        };
        let number = waiting.borrow().next;
        let (key, arrivals, all) = (key.clone(), arrivals.clone(), Rc::clone(&waiting));
        let greeting = tasks.spawn(async move {
            greet(stream, &key, &arrivals).await;
            // Removed by whoever took its place otherwise; a task that drops itself is over.
            drop(all.borrow_mut().leave(number));
        });
        let pushed_out = waiting.borrow_mut().enter(from.ip(), greeting);
        drop(pushed_out);
    }
}

async fn greet(stream: Async<TcpStream>, key: &SessionKey, arrivals: &Arrivals) {
    let _ = stream.get_ref().set_nodelay(true);
    let stream = smol::net::TcpStream::from(stream);
    match link::accept(stream.clone(), key).await {
        Ok((reader, writer, node, purpose)) => arrivals.hand_over(node, purpose, (reader, writer), stream),
        Err(error) => log::debug!("refused a connection: {error}"),
    }
}

/// Those who have not proved themselves, in the order they came. One more than [`STRANGERS`] pushes out the oldest of the address that
/// has the most: who opens connections without end keeps out only those who share his host, and them for as long as a handshake takes.
#[derive(Debug)]
struct Waiting<T> {
    next: u64,
    present: Vec<(u64, IpAddr, T)>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting { next: 0, present: Vec::new() }
    }
}

impl<T> Waiting<T> {
    /// Takes one in under the number `next` had before; returns who has to go for it.
    fn enter(&mut self, from: IpAddr, one: T) -> Option<T> {
        self.present.push((self.next, from, one));
        self.next += 1;
        if self.present.len() <= STRANGERS {
            return None;
        }
        let mut count = HashMap::new();
        self.present.iter().for_each(|(_, address, _)| *count.entry(*address).or_insert(0) += 1);
        let most = count.values().copied().max()?;
        let at = self.present.iter().position(|(_, address, _)| count[address] == most)?;
        Some(self.present.remove(at).2)
    }

    fn leave(&mut self, number: u64) -> Option<T> {
        let at = self.present.binary_search_by_key(&number, |one| one.0).ok()?;
        Some(self.present.remove(at).2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_often_makes_room_for_himself() {
        let [us, them] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from);
        let mut waiting = Waiting::default();
        assert_eq!(waiting.enter(us, 0), None);
        for n in 1..STRANGERS as u64 {
            assert_eq!(waiting.enter(them, n), None);
        }
        for n in 1..1000 {
            assert_eq!(waiting.enter(them, n + 255), Some(n), "the oldest of them");
        }
        assert_eq!((waiting.leave(0), waiting.leave(0), waiting.leave(1)), (Some(0), None, None));
        assert_eq!(waiting.enter(us, 2000), None);
        assert_eq!(waiting.present.len(), STRANGERS);
    }
}
