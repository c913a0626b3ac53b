//! Where a node can be reached, and connecting to the first address that answers with the right key.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use smol::future::{Future, FutureExt};
use smol::{Async, Timer};

use super::auth::SessionKey;
use super::link::{self, Challenged, LinkError, Reader, Writer};
use super::wire::hello::Purpose;
use crate::sys::without::{Ability, Without};

/// A TCP connection may take this long to an address that does not answer.
const CONNECT: Duration = Duration::from_secs(3);
/// Next address is tried beside the last one after this long (RFC 8305 recommends 250 ms).
const STAGGER: Duration = Duration::from_millis(250);

/// Listens on every address of this host, on a port of the kernel's choice; `local`: on the loopback interface only. `None`: that is
/// taken away.
///
/// # Errors
/// The socket cannot be made or bound.
pub fn listen(local: bool, without: &Without) -> io::Result<Option<Async<TcpListener>>> {
    let address = if local { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    (!without.has(Ability::Tcp)).then(|| listen_at(SocketAddr::from((address, 0)))).transpose()
}

/// Listens at an address.
///
/// # Errors
/// As [`listen`]'s.
pub fn listen_at(address: SocketAddr) -> io::Result<Async<TcpListener>> {
    Async::<TcpListener>::bind(address)
}

/// The addresses at which a listener can be reached, best first: never loopback unless it listens there only, bridges of containers
/// and virtual machines last.
pub fn addresses(listener: &Async<TcpListener>) -> Vec<String> {
    addresses_of(listener.get_ref())
}

/// [`addresses`] of a listener that is not watched yet.
pub fn addresses_of(listener: &TcpListener) -> Vec<String> {
    let Ok(bound) = listener.local_addr() else { return Vec::new() };
    if !bound.ip().is_unspecified() {
        return vec![bound.to_string()];
    }
    own().into_iter().map(|ip| SocketAddr::new(ip, bound.port()).to_string()).collect()
}

/// This host's IPv4 addresses but for loopback, best first.
pub fn own() -> Vec<IpAddr> {
    let mut found: Vec<(bool, IpAddr)> = nix::ifaddrs::getifaddrs()
        .into_iter()
        .flatten()
        .filter(|i| i.flags.contains(nix::net::if_::InterfaceFlags::IFF_UP))
        .filter_map(|i| {
            let ip = i.address?.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()))?;
            let inner = ["docker", "virbr", "cni", "br-"].iter().any(|p| i.interface_name.starts_with(p));
            (!ip.is_loopback()).then_some((inner, ip))
        })
        .collect();
    found.sort_by_key(|f| f.0);
    found.into_iter().map(|f| f.1).collect()
}

/// Whether listeners with these addresses are on one host: one who listens nowhere may be on any. All must be the same: bridges of containers and
/// virtual machines have the same on many hosts.
pub fn on_one_host(one: &[String], other: &[String]) -> bool {
    let host = |address: &String| address.rsplit_once(':').map(|(host, _)| host.to_owned());
    !one.is_empty() && one.iter().map(host).eq(other.iter().map(host))
}

/// Connects to a node over the first of its addresses that works, trying the next one beside it after a short while. One connection is
/// answered at a time: a listener that was busy has several, and hands over the first that has proved itself, which must be ours.
///
/// # Errors
/// What the last address said; [`LinkError::Closed`] without any.
pub async fn reach(
    addresses: &[String],
    key: &SessionKey,
    me: u32,
    purpose: Purpose,
) -> Result<(Reader, Writer), LinkError> {
    let tries = addresses.iter().enumerate().map(|(nth, address)| {
        async move {
            Timer::after(STAGGER * u32::try_from(nth).unwrap_or(u32::MAX)).await;
            one(address).await
        }
        .boxed_local()
    });
    let mut tries: Vec<_> = tries.collect();
    let mut told = None;
    while !tries.is_empty() {
        let (done, result) = smol::future::poll_fn(|cx| {
            for (nth, attempt) in tries.iter_mut().enumerate() {
                if let std::task::Poll::Ready(result) = Future::poll(attempt.as_mut(), cx) {
                    return std::task::Poll::Ready((nth, result));
                }
            }
            std::task::Poll::Pending
        })
        .await;
        drop(tries.swap_remove(done));
        let link = match result {
            Ok(challenged) => challenged.answer(key, me, purpose).await,
            Err(error) => Err(error),
        };
        match link {
            Ok(link) => return Ok(link),
            // What may pass at one of them is what matters.
            Err(error) if told.as_ref().is_none_or(|told: &LinkError| !told.may_pass()) => told = Some(error),
            Err(_) => {}
        }
    }
    Err(told.unwrap_or(LinkError::Closed))
}

async fn one(address: &str) -> Result<Challenged, LinkError> {
    let address: SocketAddr =
        address.parse().map_err(|e| LinkError::Io(io::Error::new(io::ErrorKind::InvalidInput, e)))?;
    let late = async {
        Timer::after(CONNECT).await;
        Err(io::ErrorKind::TimedOut.into())
    };
    let stream = Async::<TcpStream>::connect(address).or(late).await?;
    stream.get_ref().set_nodelay(true)?;
    link::challenged(smol::net::TcpStream::from(stream)).await
}

#[cfg(test)]
mod tests {
    use smol::future::zip;

    use super::*;
    use crate::net::link::Packet;
    use crate::net::wire::frame::FrameError;
    use crate::net::wire::hello::Hello;

    fn listener(ip: Ipv4Addr) -> (Async<TcpListener>, u16) {
        let listener = listen_at(SocketAddr::from((ip, 0))).unwrap();
        let port = listener.get_ref().local_addr().unwrap().port();
        (listener, port)
    }

    async fn accept(listener: &Async<TcpListener>) -> smol::net::TcpStream {
        listener.accept().await.unwrap().0.into()
    }

    /// A listener that was busy for longer than one address is tried alone has a connection at each.
    #[test]
    fn both_ends_go_on_with_one_connection() {
        smol::block_on(async {
            let (listener, port) = listener(Ipv4Addr::UNSPECIFIED);
            let (key, addresses) = (SessionKey::random(), [1, 2].map(|host| format!("127.0.0.{host}:{port}")));
            let busy = async {
                let (first, second) = (accept(&listener).await, accept(&listener).await);
                zip(link::accept(second, &key), link::accept(first, &key)).await
            };
            let (reached, accepted) = zip(reach(&addresses, &key, 7, Purpose::Control), busy).await;
            let (mut reader, ..) = match accepted {
                (Ok(link), Err(LinkError::Closed)) | (Err(LinkError::Closed), Ok(link)) => link,
                other => panic!("{other:?}"),
            };
            let packet = Packet::new(&Hello::Welcome { proof: [3; 32] }, Vec::new());
            reached.unwrap().1.send(&packet).await.unwrap();
            assert_eq!(reader.receive().await.unwrap().header.as_slice(), packet.header.as_slice());
        });
    }

    /// Whoever listens at an address that is another host's, too, or lets everybody connect, is in nobody's way.
    #[test]
    fn strangers_at_the_first_addresses_are_passed_over() {
        smol::block_on(async {
            let [silent, other, ours] = [(); 3].map(|()| listener(Ipv4Addr::LOCALHOST));
            let addresses = [silent.1, other.1, ours.1].map(|port| format!("127.0.0.1:{port}"));
            let (key, strange) = (SessionKey::random(), SessionKey::random());
            let others = async { link::accept(accept(&other.0).await, &strange).await };
            let accepting = zip(others, async { link::accept(accept(&ours.0).await, &key).await });
            let (reached, (refused, accepted)) = zip(reach(&addresses, &key, 7, Purpose::Control), accepting).await;
            assert!(matches!(refused, Err(LinkError::Frame(FrameError::Tag))), "{refused:?}");
            assert!(reached.is_ok() && accepted.is_ok());
        });
    }

    #[test]
    fn hosts_are_told_apart_by_what_they_do_not_share() {
        let at = |addresses: &[&str]| addresses.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>();
        let ours = at(&["10.0.0.1:4000", "172.17.0.1:4000"]);
        assert!(on_one_host(&ours, &at(&["10.0.0.1:5000", "172.17.0.1:5000"])));
        for other in [at(&["10.0.0.2:4000", "172.17.0.1:4000"]), at(&["172.17.0.1:4000"]), at(&[])] {
            assert!(!on_one_host(&ours, &other) && !on_one_host(&other, &ours), "{other:?}");
        }
        assert!(on_one_host(&at(&["127.0.0.1:1"]), &at(&["127.0.0.1:2"])), "agents beside each other");
        assert!(!on_one_host(&[], &[]), "nothing is known");
    }
}
