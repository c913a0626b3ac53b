//! The borrowing side, in a node's agent: connections to memory servers for the resident in a program, and words for why it ended.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::task::Poll;
use std::time::Duration;

use indicatif::HumanBytes;
use rustix::fs::{SealFlags, fcntl_get_seals};
use smol::Timer;
use smol::future::FutureExt;

use crate::error::{Context, Error, Result};
use crate::net::auth::{SessionKey, Tags, random_words};
use crate::net::direct::{Direct, connect};
use crate::net::link::LinkError;
use crate::net::listen;
use crate::net::wire::borrow::{Borrow, Lender};
use crate::net::wire::page::Page;
use crate::sys::page::{self, Bits, op};
use crate::sys::places::deal;
use crate::sys::resident::{ASK, DESCRIPTORS, Failure, Grant, LINKS, SERVERS, Settings, WINDOW_BYTES, cause, step};
use crate::sys::without::{Ability, Without};

/// A server answers within this time; a program waits for 30 s.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of what is granted for a link: tagged, counter, two keys.
const LINK: usize = 16 + 32 + 32;

/// The resident's settings where programs keep so many bytes here.
///
/// # Errors
/// `HPCRT_WITHOUT` holds an unknown name, or forbids userfaultfd.
pub fn settings(local: u64) -> Result<Settings> {
    let without = Without::from_env()?;
    if without.has(Ability::Userfaultfd) {
        return Err(Error::new("use memory of other nodes", "HPCRT_WITHOUT forbids userfaultfd"));
    }
    let user_mode_only = without.has(Ability::KernelFaults).into();
    Ok(Settings { local, user_mode_only, without_move: without.has(Ability::Move).into(), ..Settings::NONE })
}

/// The servers of one job.
#[derive(Debug)]
pub struct Servers {
    all: Vec<Lender>,
    /// Where each can be reached: first, where it was last.
    places: Vec<RefCell<Vec<SocketAddr>>>,
    mirror: bool,
    /// Files of servers of this host may be used.
    shares: bool,
    /// A bit for each that a program has lost: others do not wait for it again.
    lost: Cell<u64>,
    key: SessionKey,
}

impl Servers {
    /// `session`: the key under which theirs is hidden.
    ///
    /// # Errors
    /// `HPCRT_WITHOUT` holds an unknown name.
    pub fn new(wish: &Borrow, session: &SessionKey) -> Result<Servers> {
        let own = listen::own();
        Ok(Servers {
            all: wish.servers.clone(),
            places: wish.servers.iter().map(|server| RefCell::new(places(&server.addresses, &own))).collect(),
            mirror: wish.mirror,
            shares: !Without::from_env()?.has(Ability::Shared),
            lost: Cell::new(0),
            key: SessionKey(session.hide(&wish.nonce, &wish.key)),
        })
    }

    /// Connects to all of them for one program, as a new client: what it is granted, as bytes, and the sockets. `label`: what servers show of
    /// it. With a copy of everything elsewhere, some may be missing, which is told.
    ///
    /// # Errors
    /// The first that cannot be reached; with copies, when none can.
    pub async fn connect(&self, label: &str) -> Result<(Vec<u8>, Vec<OwnedFd>, Vec<Error>)> {
        let (grant, fds, mut missing) = self.connect_to(label, !self.lost.get()).await?;
        if missing.len() == self.all.len() {
            return missing.pop().map_or(Ok((Vec::new(), Vec::new(), Vec::new())), Err);
        }
        Ok((grant, fds, missing))
    }

    /// As [`Servers::connect`], but only to those that a program has lost: what are there again.
    ///
    /// # Errors
    /// The kernel has no descriptors.
    pub async fn connect_again(&self, label: &str, question: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let lost = question.iter().rev().take(size_of::<u64>()).fold(0, |lost, byte| lost << 8 | u64::from(*byte));
        let (grant, fds, _) = self.connect_to(label, lost).await?;
        Ok((grant, fds))
    }

    /// `wanted`: a bit for each; the others are missing.
    async fn connect_to(&self, label: &str, wanted: u64) -> Result<(Vec<u8>, Vec<OwnedFd>, Vec<Error>)> {
        let client = Page::open(random_words(), label);
        let (mut links, mut fds, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        let (mut absent, mut shared, mut weights) = (0u64, 0u64, [0u64; SERVERS]);
        let servers = self.all.iter().enumerate();
        let attempts = servers.map(|(nth, server)| self.open_in_time((nth, server), client, wanted >> nth & 1 == 1));
        let all_opened = all(attempts).await;
        let mut names: Vec<([u64; 2], &str)> = Vec::new();
        for (nth, (server, opened)) in self.all.iter().zip(all_opened).enumerate() {
            match opened {
                Ok((opened, file)) => {
                    self.lost.set(self.lost.get() & !(1 << nth));
                    for Opened { link, free, name } in opened {
                        // It would have both copies, or what two are to have.
                        if let Some((_, other)) = names.iter().find(|(of, by)| *of == name && *by != server.name) {
                            let cause = format!("it is the same server as {other}");
                            return Err(Error::usage("borrow memory from", cause).on(&server.name));
                        }
                        names.push((name, &server.name));
                        // Who is full takes a share, too: its refusal names it.
                        weights[nth] = free.max(1);
                        let (socket, tags) = link.into_parts();
                        links.extend(granted(tags));
                        fds.push(socket);
                    }
                    shared |= u64::from(file.is_some()) << nth;
                    fds.push(file.map_or_else(nothing, Ok)?);
                }
                Err(error) if self.mirror => {
                    absent |= 1 << nth;
                    links.resize(links.len() + LINKS * LINK, 0);
                    for _ in 0..DESCRIPTORS {
                        fds.push(nothing()?);
                    }
                    missing.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        let mut grant = ASK.to_vec();
        let [one, two, ..] = client.data;
        let numbers = [self.all.len() as u64, one, two, u64::from(self.mirror), absent, shared];
        grant.extend(numbers.iter().chain(&weights).flat_map(|number| number.to_le_bytes()));
        let places = deal(&weights, self.mirror);
        grant.extend(places.iter().flat_map(|place| [place.first, place.second, place.whole, 0]));
        grant.extend(links);
        grant.resize(size_of::<Grant>(), 0);
        Ok((grant, fds, missing))
    }

    /// [`Servers::open_all`] before the program is tired of waiting. `wanted`: it is to be opened at all.
    async fn open_in_time(
        &self,
        (nth, server): (usize, &Lender),
        client: Page,
        wanted: bool,
    ) -> Result<(Vec<Opened>, Option<OwnedFd>)> {
        let missing = |cause: &str| Err(Error::new("borrow memory from", cause).on(&server.name));
        if !wanted {
            return missing("another program has lost it");
        }
        let late = async {
            Timer::after(PATIENCE).await;
            missing("it does not answer")
        };
        self.open_all((nth, server), client).or(late).await
    }

    /// All links to one server; what it shares.
    async fn open_all(&self, (nth, server): (usize, &Lender), client: Page) -> Result<(Vec<Opened>, Option<OwnedFd>)> {
        let mut links = Vec::new();
        let mut places = self.places[nth].borrow().clone();
        let mut file = None;
        for _ in 0..LINKS {
            let (opened, found) = self.open_any(&mut places, client).await.map_err(|error| {
                let cause = match error {
                    LinkError::Closed => "it closes the connection: it has another key, or serves too many".to_owned(),
                    error => error.to_string(),
                };
                let error = Error::new("borrow memory from", cause).on(&server.name);
                if server.lend > 0 { error } else { error.remedy("hpcrt memserver must run there with the same key") }
            })?;
            links.push(opened);
            file = found;
        }
        self.places[nth].replace(places);
        Ok((links, file))
    }

    /// Over the first address at which it answers, which is put first: another link, or program, need not wait for those that do not.
    async fn open_any(
        &self,
        addresses: &mut [SocketAddr],
        client: Page,
    ) -> Result<(Opened, Option<OwnedFd>), LinkError> {
        let mut last = LinkError::Closed;
        for nth in 0..addresses.len() {
            match self.open(addresses[nth], client).await {
                Ok(link) => {
                    addresses[..=nth].rotate_right(1);
                    return Ok(link);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn open(&self, address: SocketAddr, client: Page) -> Result<(Opened, Option<OwnedFd>), LinkError> {
        let asks = self.shares && address.ip().is_loopback();
        let mut link = connect(address, &self.key, !address.ip().is_loopback()).await?;
        smol::unblock(move || {
            link.send(&client, &[])?;
            let Some((Page { op: op::OPENED, data, .. }, 0)) = link.receive()? else { return Err(LinkError::Closed) };
            let (free, name) = (data[0].saturating_sub(data[1]), [data[2], data[3]]);
            if !asks {
                return Ok((Opened { link, free, name }, None));
            }
            link.send(&Page { op: op::SHARE, ..Page::default() }, &[])?;
            match link.receive()? {
                Some((Page { op: op::SHARED, data, .. }, 0)) => Ok((Opened { link, free, name }, shared(data))),
                _ => Err(LinkError::Closed),
            }
        })
        .await
    }

    /// A program goes on without a server.
    pub fn lose(&self, failure: &Failure) {
        if failure.detail[0] != u64::from(cause::FULL) && (failure.server as usize) < self.all.len() {
            self.lost.set(self.lost.get() | 1 << failure.server);
        }
    }

    /// Why a program ended, for the user.
    pub fn explain(&self, failure: &Failure) -> Error {
        let name = self.all.get(failure.server as usize).map_or("?", |lender| &lender.name);
        let bytes = |pages| HumanBytes(page::bytes(pages));
        let [first, second] = failure.detail;
        let errno = || std::io::Error::from_raw_os_error(i32::try_from(second).unwrap_or(0));
        match failure.cause {
            cause::LOST => {
                let error = format!("it is gone, and {} of the program's memory with it", bytes(second));
                Error::new("go on without the memory server", error).on(name)
            }
            cause::SILENT => {
                let error = format!("it does not answer, and has {} of the program's memory", bytes(second));
                Error::new("go on without the memory server", error).on(name)
            }
            cause::FULL => {
                let error = format!("it is full: {} of {} are in use", bytes(second), bytes(first));
                Error::new("use the memory server", error).on(name).remedy("name more servers, or start it with more")
            }
            cause::GOES_ON => {
                let why = match u32::try_from(first) {
                    Ok(cause::SILENT) => "it does not answer",
                    Ok(cause::ALTERED) => "what it answers is wrong",
                    Ok(cause::FULL) => "it is full",
                    _ => "it is gone",
                };
                let error = format!("{why}; the program goes on with the copy of the {} that it had", bytes(second));
                Error::new("use the memory server", error).on(name)
            }
            cause::ALTERED => Error::new("use the memory server", "what it answers is wrong").on(name),
            cause::SHORT => Error::new("run the program", "it holds on to more memory than it may keep on its node")
                .remedy("raise --local-mb"),
            cause::PINNED => {
                let error = "it has pinned memory for a device, or uses io_uring or libaio: before Linux 6.8 what these write could be lost";
                Error::new("lend memory to the program", error)
                    .remedy("run it without --memory, or so that it does neither")
            }
            _ => {
                let what = match first {
                    step::WINDOW => "reserve address space",
                    step::USERFAULTFD => "use userfaultfd",
                    step::REGISTER => "watch memory",
                    step::THREAD => "start the pager",
                    step::FILTER => "catch system calls",
                    step::PATCH => "catch requests for memory",
                    step::DISPATCH => "catch the system calls of a statically linked program (Linux 5.11)",
                    step::FILL | step::MOVE => "bring memory back",
                    _ => "get memory for the pager",
                };
                let remedy = match (first, errno().kind()) {
                    (step::WINDOW, ErrorKind::OutOfMemory) => {
                        "ulimit -v and ulimit -d must be unlimited for the program, and vm.overcommit_memory not 2"
                    }
                    _ => "hpcrt doctor shows what this node allows",
                };
                Error::new(what, errno()).remedy(remedy)
            }
        }
    }
}

/// Addresses of a server; of one of this host, whose addresses are `own`, loopback first: what comes that way needs no tags, and what it keeps may be shared.
fn places(addresses: &[String], own: &[IpAddr]) -> Vec<SocketAddr> {
    let all: Vec<SocketAddr> = addresses.iter().filter_map(|address| address.parse().ok()).collect();
    let here = all.first().filter(|address| own.contains(&address.ip()));
    let here = here.map(|address| SocketAddr::from((Ipv4Addr::LOCALHOST, address.port())));
    here.into_iter().chain(all).collect()
}

/// A link, pages that its server has left, and what it calls itself.
struct Opened {
    link: Direct,
    free: u64,
    name: [u64; 2],
}

/// What these give, which all go on at once, in their order.
async fn all<T>(work: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut under_way: Vec<_> = work.map(|work| (Box::pin(work), None)).collect();
    poll_fn(|context| {
        for (work, done) in under_way.iter_mut().filter(|(_, done)| done.is_none()) {
            if let Poll::Ready(given) = work.as_mut().poll(context) {
                *done = Some(given);
            }
        }
        if under_way.iter().all(|(_, done)| done.is_some()) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    under_way.into_iter().filter_map(|(_, done)| done).collect()
}

/// Opens the file that a server told of; another process may have its number here.
fn shared([process, descriptor, mark @ ..]: Bits) -> Option<OwnedFd> {
    let path = format!("/proc/{process}/fd/{descriptor}");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
    // Who maps it relies on that.
    fcntl_get_seals(&file).ok().filter(|seals| seals.contains(SealFlags::SHRINK))?;
    let mut end = [0; 16];
    file.read_exact_at(&mut end, WINDOW_BYTES).ok()?;
    (end[..] == mark.map(u64::to_le_bytes).concat() && mark != [0; 2]).then(|| file.into())
}

/// In the place of a descriptor.
fn nothing() -> Result<OwnedFd> {
    Ok(std::fs::File::open("/dev/null").op("open /dev/null")?.into())
}

/// What is granted for a link.
fn granted(tags: Option<(Tags, Tags)>) -> Vec<u8> {
    let keys = tags.as_ref().map(|(ours, theirs)| (ours.secret(), theirs.secret()));
    let ((send, counter), (receive, _)) = keys.unwrap_or_default();
    let numbers = [u64::from(tags.is_some()), counter];
    numbers.iter().flat_map(|number| number.to_le_bytes()).chain(send).chain(receive).collect()
}

/// What a program told, from its bytes.
pub fn failure(bytes: &[u8; size_of::<Failure>()]) -> Failure {
    let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    Failure { cause: word(0), server: word(4), detail: [long(8), long(16)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_this_host_is_asked_over_loopback() {
        let own = ["10.0.0.1", "172.17.0.1"].map(|ip| ip.parse().unwrap());
        let found = |addresses: &[&str]| {
            let addresses: Vec<String> = addresses.iter().map(|address| (*address).to_owned()).collect();
            places(&addresses, &own).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(&["10.0.0.1:7", "172.17.0.1:7"]), "127.0.0.1:7 10.0.0.1:7 172.17.0.1:7");
        // The bridge of its containers has the same address as ours.
        assert_eq!(found(&["10.0.0.2:7", "172.17.0.1:7"]), "10.0.0.2:7 172.17.0.1:7");
        assert_eq!(found(&["127.0.0.1:7", "none"]), "127.0.0.1:7");
    }
}
