//! What a byte of a captured file costs in processor time, step by step, at the root and at a node, each beside the least that the kernel
//! takes for the same: `cargo bench --bench bytes`, on whatever machine this is. Only prints: a busy machine fails nobody.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use cluster::generate::payload::payload;
use hpcrt::loader::chunk;
use hpcrt::loader::store::{Store, read_vec};
use hpcrt::net::auth::SessionKey;
use hpcrt::net::link::{self, Packet};
use hpcrt::net::wire::hello::Purpose;
use hpcrt::net::wire::log::LogFrame;
use hpcrt::net::wire::record::{Attr, CHUNK_MAX, Codec, Record};
use nix::time::{ClockId, clock_gettime};
use rustix::fs::{Mode, OFlags};

/// Chunks in a round.
const CHUNKS: usize = 64;
/// The best of so many rounds counts.
const ROUNDS: usize = 7;
/// Bodies that a node holds for those that it feeds.
const HELD: usize = 6;
/// Where a node's store lies: a file system in memory.
const MEMORY: &str = "/dev/shm";

/// Nanoseconds per byte of a round, in processor time of this thread.
fn round(work: impl FnMut(usize)) -> f64 {
    let spent = || {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every thread has one");
        time.tv_sec() as f64 * 1e9 + time.tv_nsec() as f64
    };
    let before = spent();
    (0..CHUNKS).for_each(work);
    (spent() - before) / (CHUNKS * CHUNK_MAX) as f64
}

fn cost(mut work: impl FnMut(usize)) -> f64 {
    (0..ROUNDS).map(|_| round(&mut work)).fold(f64::INFINITY, f64::min)
}

/// Two threads at the ends of a TCP connection; what each says that it cost.
fn both(
    send: impl FnOnce(TcpStream) -> f64 + Send + 'static,
    receive: impl FnOnce(TcpStream) -> f64,
) -> Result<(f64, f64), std::io::Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let to = TcpStream::connect(listener.local_addr()?)?;
    let (from, _) = listener.accept()?;
    let sender = thread::spawn(move || send(to));
    let received = receive(from);
    Ok((sender.join().expect("the sender does not panic"), received))
}

/// Entries of the log over a link as between two hosts.
fn over_a_link(packet: Packet) -> (f64, f64) {
    let key = SessionKey::random();
    let theirs = key.clone();
    let watch = |stream: TcpStream| {
        stream.set_nodelay(true).expect("a socket");
        smol::net::TcpStream::try_from(stream).expect("epoll can watch it")
    };
    let send = move |to: TcpStream| {
        smol::block_on(async {
            let (_reader, mut writer) = link::connect(watch(to), &key, 1, Purpose::Log).await.expect("the same key");
            cost(|_| smol::block_on(writer.send(&packet)).expect("somebody receives"))
        })
    };
    let receive = move |from: TcpStream| {
        smol::block_on(async {
            let (mut reader, _writer, ..) = link::accept(watch(from), &theirs).await.expect("the same key");
            let mut held = VecDeque::new();
            cost(|_| {
                held.push_back(smol::block_on(reader.receive()).expect("somebody sends").body);
                if held.len() > HELD {
                    held.pop_front();
                }
            })
        })
    };
    both(send, receive).expect("the loopback interface works")
}

/// The same bytes over the same connection, with nothing around them.
fn over_a_socket(body: Arc<Vec<u8>>) -> (f64, f64) {
    let send = move |mut to: TcpStream| cost(|_| to.write_all(&body).expect("somebody receives"));
    let receive = |mut from: TcpStream| {
        let mut buffer = vec![0; CHUNK_MAX];
        cost(|_| from.read_exact(&mut buffer).expect("somebody sends"))
    };
    both(send, receive).expect("the loopback interface works")
}

/// Writing chunks into a store, and the same with nothing around it.
fn stored(chunks: &[Vec<u8>]) -> (f64, f64) {
    let place = tempfile::tempdir_in(MEMORY).expect("a file system in memory");
    let open = |path: &Path| rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let store = Store::new(open(place.path()).expect("just made"), true);
    let (size, time) = ((CHUNKS * CHUNK_MAX) as u64, (0, 0));
    let attr = Attr { mode: 0o100_644, uid: 0, gid: 0, nlink: 1, ino: 1, size, mtime: time, ctime: time };
    let at = |nth: usize| (nth * CHUNK_MAX) as u64;
    let (mut ours, mut bare) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        store.create(0, &attr).expect("there is room");
        ours = ours.min(round(|nth| store.write_chunk(0, at(nth), &chunks[nth]).expect("there is room")));
        store.remove(0).expect("it is there");
        let path = place.path().join("bare");
        let file = File::create(&path).expect("there is room");
        bare = bare.min(round(|nth| file.write_all_at(&chunks[nth], at(nth)).expect("there is room")));
        std::fs::remove_file(path).expect("it is there");
    }
    (ours, bare)
}

fn main() {
    let chunks: Vec<Vec<u8>> = (0..CHUNKS).map(|seed| payload(seed, CHUNK_MAX)).collect();
    let mut original = tempfile::tempfile_in(MEMORY).expect("a file system in memory");
    chunks.iter().for_each(|chunk| original.write_all(chunk).expect("there is room"));
    let mut buffer = vec![0; CHUNK_MAX];
    let copy = cost(|nth| buffer.copy_from_slice(std::hint::black_box(&chunks[nth])));
    let read = cost(|nth| {
        std::hint::black_box(read_vec(&original, (nth * CHUNK_MAX) as u64, CHUNK_MAX).expect("it is there"));
    });
    let bare_read = cost(|nth| original.read_exact_at(&mut buffer, (nth * CHUNK_MAX) as u64).expect("it is there"));
    let hash = cost(|nth| {
        std::hint::black_box(blake3::hash(&chunks[nth]));
    });
    let compress = cost(|nth| {
        std::hint::black_box(chunk::compress(&chunks[nth]));
    });
    let small: Vec<Vec<u8>> = chunks.iter().map(|raw| chunk::compress(raw).expect("there is memory")).collect();
    let share = small.iter().map(Vec::len).sum::<usize>() as f64 / (CHUNKS * CHUNK_MAX) as f64;
    let len = u32::try_from(CHUNK_MAX).expect("it fits");
    let decompress = cost(|nth| {
        std::hint::black_box(chunk::decompress(&small[nth], len).expect("it was compressed"));
    });
    let (store, bare_store) = stored(&chunks);
    let record = Record::Chunk { file: 0, offset: 0, len, codec: Codec::Raw };
    let body = Arc::new(chunks[0].clone());
    let entry = LogFrame::Entry { seq: 0, record, hash: *blake3::hash(&body).as_bytes() };
    let (send, receive) = over_a_link(Packet::new(&entry, Arc::clone(&body)));
    let (bare_send, bare_receive) = over_a_socket(body);

    println!("processor time in ns per byte of a file; a link of 1 Gbit/s brings one in 8 ns, of 10 Gbit/s in 0.8 ns");
    println!("{:<34} {:>6} {:>9}", "step", "hpcrt", "the least");
    for (step, ours, least) in [
        ("copy in memory", copy, copy),
        ("read from the page cache", read, bare_read),
        ("hash (BLAKE3), at each end", hash, hash),
        ("compress", compress, compress),
        ("send, tag of the header included", send, bare_send),
        ("receive, likewise", receive, bare_receive),
        ("decompress", decompress, decompress),
        ("store in memory", store, bare_store),
    ] {
        println!("{step:<34} {ours:6.2} {least:9.2}");
    }
    println!("zstd leaves {share:.2} of a byte");
    let root = [read + hash + send, read + compress + share * (hash + send)];
    let node = [receive + hash + store + send, share * (receive + hash + send) + decompress + store];
    for (how, root, node) in [("as it is", root[0], node[0]), ("compressed", root[1], node[1])] {
        println!("{how}: {root:.2} at the root, {node:.2} at a node that passes it on");
    }
}
