//! One body per kind of bytes from outside. Whatever the bytes are, a body returns; it panics where a parser does, or breaks a promise.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use hpcrt::iofs::receiver::Session as Queue;
use hpcrt::launch::allocation::{self, Surroundings};
use hpcrt::launch::invitation::Invitation;
use hpcrt::launch::{fold, hostfile, hostlist, pmi};
use hpcrt::loader::arch::{self, Cpu};
use hpcrt::loader::catalog::Catalog;
use hpcrt::loader::elf::Elf;
use hpcrt::loader::ldcache::LdCache;
use hpcrt::loader::ldso::Ldso;
use hpcrt::loader::prefetch::Prefetch;
use hpcrt::loader::script::Shebang;
use hpcrt::loader::{chunk, hints, imports};
use hpcrt::net::auth::{Handshake, SessionKey};
use hpcrt::net::collective::{self, text};
use hpcrt::net::link;
use hpcrt::net::pull::{Pull, WINDOW};
use hpcrt::net::seqpacket::Seqpacket;
use hpcrt::net::wire::control::{Down, Report, Seen};
use hpcrt::net::wire::forward::{Got, Put};
use hpcrt::net::wire::frame::{BODY_MAX, HEADER_MAX, HELLO_MAX, Message, PREFIX, Prefix};
use hpcrt::net::wire::guest::{Guest, Welcome};
use hpcrt::net::wire::hello::{Hello, Purpose};
use hpcrt::net::wire::keeper::{Ask, Tell};
use hpcrt::net::wire::log::LogFrame;
use hpcrt::net::wire::page::Page;
use hpcrt::net::wire::record::{CHUNK_MAX, PIECE, Piece, Record};
use hpcrt::net::wire::session::{JobSpec, SessionAsk, SessionTell};
use hpcrt::pager::{server::Session, store::Store};
use hpcrt::sys::audit_table::{Table, kind};
use hpcrt::sys::page::{HEAD, PAGE, count, op};
use rkyv::util::AlignedVec;

/// Name and body, for those who run all.
pub const ALL: [(&str, fn(&[u8])); 18] = [
    ("frame", frame),
    ("hello", hello),
    ("link", link),
    ("seqpacket", seqpacket),
    ("records", records),
    ("page", page),
    ("forward", forward),
    ("fetch", fetch),
    ("elf", elf),
    ("ldcache", ldcache),
    ("python", python),
    ("table", table),
    ("hostlist", hostlist),
    ("hostfile", hostfile),
    ("allocation", allocation),
    ("hints", hints),
    ("members", members),
    ("guests", guests),
];

/// A prefix, then a header: of every type, since a stranger chooses.
pub fn frame(bytes: &[u8]) {
    let Some((prefix, header)) = bytes.split_first_chunk::<PREFIX>() else { return };
    for limit in [(HEADER_MAX, BODY_MAX), (HELLO_MAX, 0)] {
        if let Ok(decoded) = Prefix::decode(prefix, limit) {
            assert!(decoded.header <= limit.0 && decoded.body <= limit.1);
            assert_eq!(&decoded.encode(), prefix, "there is one way to say it");
        }
    }
    let mut aligned = AlignedVec::with_capacity(header.len());
    aligned.extend_from_slice(header);
    again::<Down>(&aligned);
    again::<Report>(&aligned);
    again::<Hello>(&aligned);
    again::<LogFrame>(&aligned);
    again::<Ask>(&aligned);
    again::<Tell>(&aligned);
    again::<SessionAsk>(&aligned);
    again::<SessionTell>(&aligned);
    again::<JobSpec>(&aligned);
    again::<Page>(&aligned);
    again::<Put>(&aligned);
    again::<Got>(&aligned);
}

/// What a process that another launcher started and its node's agent say to each other, and the file by which agents come by themselves.
pub fn guests(bytes: &[u8]) {
    let mut aligned = AlignedVec::with_capacity(bytes.len());
    aligned.extend_from_slice(bytes);
    again::<Guest>(&aligned);
    again::<Welcome>(&aligned);
    if let Some(read) = std::str::from_utf8(bytes).ok().and_then(Invitation::parse) {
        let again = Invitation::parse(&read.text()).expect("what is written is read");
        assert_eq!((again.key.0, again.hosts.len()), (read.key.0, read.hosts.len()));
    }
}

/// What a rank says on its descriptor.
pub fn members(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(Some((request, len))) = text::parse(rest) {
        assert!(len > 0 && len <= rest.len());
        let facts = pmi::Facts { size: 1, space: "s".into(), mapping: String::new(), clique: "0".into() };
        if let text::Request::Pmi(request) = request {
            let _ = facts.reply(&request, 0);
        }
        rest = &rest[len..];
    }
    let whole: usize = collective::entries(bytes).map(|(_, item)| item.len() + 8).sum();
    assert!(whole <= bytes.len());
    collective::entries(bytes).filter_map(|(_, pair)| collective::key_of(pair)).for_each(drop);
}

/// What was understood can be said, and is understood alike.
fn again<M: Message>(bytes: &AlignedVec) {
    if let Ok(message) = M::decode(bytes) {
        let said = message.encode();
        let heard = M::decode(&said).expect("own words are understood");
        assert_eq!(said.as_slice(), heard.encode().as_slice());
    }
}

/// A handshake with somebody who has not the key: nothing he says is accepted.
pub fn hello(bytes: &[u8]) {
    let mut aligned = AlignedVec::with_capacity(bytes.len());
    aligned.extend_from_slice(bytes);
    let Ok(said) = Hello::decode(&aligned) else { return };
    let key = SessionKey([7; 32]);
    assert!(Handshake::check(&key, [9; 32], &said).is_err(), "accepted without the key");
    if let Ok((handshake, _)) = Handshake::answer(&key, &said, 1, Purpose::Log) {
        assert!(handshake.confirm(&said).is_err(), "a challenge is no proof");
    }
}

/// A whole conversation: frames as they follow each other, and where it breaks off.
pub fn link(bytes: &[u8]) {
    let input = std::io::Cursor::new(bytes.to_vec());
    let (mut reader, _) = link::trusted(smol::io::AssertAsync::new(input), smol::io::sink());
    smol::block_on(async {
        let mut read = 0;
        while let Ok(packet) = reader.receive().await {
            read += PREFIX + packet.header.len() + packet.body.len();
        }
        assert!(read <= bytes.len(), "more than was there");
    });
}

/// A message between a keeper or a session and who uses it, with a descriptor beside it.
pub fn seqpacket(bytes: &[u8]) {
    let (ours, theirs) = UnixDatagram::pair().expect("two descriptors are free");
    // A longer one does not fit into a socket's buffer.
    if ours.send(&bytes[..bytes.len().min(100_000)]).is_err() {
        return;
    }
    let pair = [Seqpacket::from_fd(OwnedFd::from(theirs)), Seqpacket::from_fd(OwnedFd::from(ours))];
    let _ = pair[0].receive_now::<Ask>();
    // Understood or not, the next one is heard.
    pair[1].send(&Ask::Go, &[pair[1].as_fd()]).expect("the peer is there");
    let heard = pair[0].receive_now::<Ask>().ok().flatten();
    assert!(heard.is_some_and(|(ask, fds)| ask == Ask::Go && fds.len() == 1), "the next message is lost");
}

/// A log: two bytes of length before each entry; what a node does with them short of its store.
pub fn records(mut bytes: &[u8]) {
    let mut catalog = Catalog::new([b"/s".to_vec()]);
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let (entry, rest) = rest.split_at(rest.len().min(u16::from_le_bytes(*length).into()));
        bytes = rest;
        let mut aligned = AlignedVec::with_capacity(entry.len());
        aligned.extend_from_slice(entry);
        let Ok(LogFrame::Entry { record, .. }) = LogFrame::decode(&aligned) else { continue };
        if !record.is_sound() {
            continue;
        }
        catalog.apply(&record, (1, 2));
        match &record {
            Record::Chunk { len, .. } => {
                let raw = chunk::decompress(bytes, *len);
                assert!(raw.is_ok_and(|raw| raw.len() <= CHUNK_MAX) || *len as usize <= CHUNK_MAX);
            }
            Record::Dir { path, .. } | Record::Link { path, .. } | Record::File { path, .. }
                // The kernel asks for none that is longer.
                if path.len() <= 4096 =>
            {
                let _ = (catalog.lookup(path), catalog.lookup(b"/s/a/b"));
            }
            _ => {}
        }
    }
}

/// What a compute host's I/O worker asks of an I/O host's: requests with their lengths, each followed by the length of a body. Opened is one file only, whatever
/// is asked for.
pub fn forward(bytes: &[u8]) {
    let path = std::env::temp_dir().join(format!("hpcrt-fuzz-{}", std::process::id()));
    let found = std::fs::write(&path, b"x").and_then(|()| std::fs::metadata(&path)).expect("a file can be written");
    let seen = Seen {
        ino: found.ino(),
        size: found.len(),
        mtime: (found.mtime(), found.mtime_nsec() as u32),
        ctime: (found.ctime(), found.ctime_nsec() as u32),
    };
    let mut logs = std::collections::BTreeMap::new();
    let mut queue = Queue::new(&mut logs);
    let ours = path.as_os_str().as_bytes().to_vec();
    let open = Put::Open { name: (1, 2), path: ours.clone(), device: 3, seen };
    queue.handle(&open, &[]).expect("it is the same file");
    let mut rest = bytes;
    while let Some((len, after)) = rest.split_first_chunk::<2>() {
        let len = usize::from(u16::from_le_bytes(*len)).min(after.len());
        let mut aligned = AlignedVec::with_capacity(len);
        aligned.extend_from_slice(&after[..len]);
        rest = &after[len..];
        let body = rest.split_off_first().map_or(0, |len| usize::from(*len));
        let Ok(put) = Put::decode(&aligned) else { continue };
        if put.check(body).is_err() {
            continue;
        }
        let put = match put {
            Put::Open { name, device, seen, .. } => Put::Open { name, path: ours.clone(), device, seen },
            put => put,
        };
        let _ = queue.handle(&put, &vec![7; body]);
    }
    drop(queue);
    let _ = std::fs::remove_file(&path);
}

/// What a client asks a memory server, one header of 80 bytes after the other; pages that should follow are made up.
pub fn page(bytes: &[u8]) {
    let store = Store::new(300 * PAGE as u64);
    let mut session = Session::new(&store, true);
    for header in bytes.chunks_exact(HEAD) {
        let mut aligned = AlignedVec::with_capacity(HEAD);
        aligned.extend_from_slice(header);
        let Ok(page) = Page::decode(&aligned) else { continue };
        let body = if page.op == op::PUT { count(&page.data) * PAGE } else { 0 };
        let Ok(ask) = page.ask(body) else { continue };
        let span = (body > 0 || page.op == op::PUT).then(|| store.spare().expect("memory for a span"));
        if let Ok(answer) = session.handle(&page, ask, span) {
            assert_eq!(answer.page.sequence, page.sequence);
            assert!(answer.span.is_some() || answer.page.op != op::GOT || count(&answer.page.data) == 0);
        }
        assert!(store.used() <= store.capacity());
    }
    drop(session);
    assert_eq!(store.used(), 0);
}

/// Questions and answers about pieces, in any order: six bytes each, after four for a file's size.
pub fn fetch(bytes: &[u8]) {
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return };
    let size = u64::from(u32::from_le_bytes(*size)) << 8;
    let (mut pull, mut now, mut open) = (Pull::default(), Instant::now(), HashSet::new());
    for step in rest.chunks_exact(6) {
        let index = u32::from_le_bytes([step[2], step[3], step[4], step[5]]);
        let piece = Piece { file: (step[1] >> 4).into(), index };
        let fits = piece.len(size).is_some_and(|len| (1..=PIECE).contains(&len.into()) && piece.offset() < size);
        assert_eq!(fits, u64::from(index) < size.div_ceil(PIECE));
        match step[0] % 4 {
            0 | 1 if fits => pull.handle_ask(step[1] & 15, piece, step[0] % 4 == 1),
            0 | 1 => {}
            2 => {
                let mut waiting = pull.handle_here(piece);
                let count = waiting.len();
                waiting.sort_unstable();
                waiting.dedup();
                assert_eq!(waiting.len(), count, "answered twice");
                open.remove(&piece);
            }
            _ if index & 1 == 0 => {
                pull.handle_void(piece.file);
                open.retain(|known: &Piece| known.file != piece.file);
            }
            _ => now += Duration::from_secs((index % 20).into()),
        }
        while let Some(piece) = pull.poll_ask(now) {
            open.insert(piece);
        }
        assert!(open.len() <= WINDOW, "more than the links are to carry");
        assert!(pull.poll_timeout().is_none_or(|at| at > now));
    }
}

/// An executable or library: what names its libraries, the constants of a dynamic linker, the first line of a script.
pub fn elf(bytes: &[u8]) {
    let file = bytes.to_vec();
    if let Ok(elf) = Elf::read(&file, None) {
        assert!(Elf::read(&file, Some(elf.abi)).is_ok(), "a file is made for what it says");
    }
    for cpu in processors() {
        let _ = Ldso::scan(bytes, &cpu).subdirectories(&cpu);
    }
    if let Some(shebang) = Shebang::parse(bytes) {
        let _ = shebang.env_target();
    }
}

/// `ld.so.cache`.
pub fn ldcache(bytes: &[u8]) {
    let Some(cache) = LdCache::parse(bytes.to_vec()) else { return };
    for cpu in processors() {
        for name in ["libc.so.6", "", "x"] {
            let _ = cache.lookup(OsStr::new(name), &cpu);
        }
    }
}

/// The table that auditors read.
pub fn table(bytes: &[u8]) {
    let Some(table) = Table::new(bytes) else { return };
    let _ = table.is_shared(b"/s/libx.so");
    for key in
        [&[kind::PATH, b"/s/libx.so"][..], &[kind::PROGRAM, b"/s/app", b""], &[kind::NAME, b"7", b"", b"libx.so"]]
    {
        let value = table.get(key);
        // The auditor hands on a pointer: a NUL has to follow what it points to, and lie in the table.
        let end = |value: &[u8]| value.as_ptr() as usize + value.len() - bytes.as_ptr() as usize;
        assert!([value, Some(table.root())].into_iter().flatten().all(|value| bytes.get(end(value)) == Some(&0)));
    }
}

/// A Python module, as source and as bytecode, and what is looked for because of it.
pub fn python(bytes: &[u8]) {
    let directory = "/p/a/b";
    for name in ["m.py", "m.pyc"] {
        let path = format!("{directory}/{name}").into_bytes();
        let mut prefetch = Prefetch::default();
        prefetch.add_search(directory.as_bytes());
        prefetch.handle_listing(directory.as_bytes(), [(b"os".to_vec(), 4), (b"x.py".to_vec(), 8)].into_iter());
        prefetch.handle_module(&path, imports::of_module(&path, bytes));
        for guess in prefetch.poll_guesses() {
            let within = guess.path.strip_prefix(directory.as_bytes()).expect("nothing else is of interest");
            assert!(!within.split(|b| *b == b'/').any(|part| part == b".."), "{guess:?}");
        }
    }
}

/// x86-64 and aarch64, wherever this runs.
fn processors() -> impl Iterator<Item = Cpu> {
    [62, 183].into_iter().filter_map(|machine| arch::of(machine, true)).map(Cpu::detect)
}

/// `--hosts`, and what batch systems hand over.
pub fn hostlist(bytes: &[u8]) {
    let Ok(hosts) = hostlist::expand(&String::from_utf8_lossy(bytes)) else { return };
    assert!((1..=hostlist::MAX_HOSTS).contains(&hosts.len()));
    if hosts.len() <= 1000 && hosts.iter().all(|host| !host.contains('@')) {
        let mut twice = hostlist::expand(&fold::fold(&hosts)).expect("what is folded can be read");
        let mut once = hosts;
        once.sort();
        twice.sort();
        assert_eq!(once, twice);
    }
}

/// `--hostfile`.
pub fn hostfile(bytes: &[u8]) {
    if let Ok(hosts) = hostfile::parse(&String::from_utf8_lossy(bytes), "fuzz") {
        assert!((1..=hostlist::MAX_HOSTS).contains(&hosts.len()));
    }
}

/// Lines of what a batch system says: the first is the value of every variable and what every command says, the others are every file.
pub fn allocation(bytes: &[u8]) {
    struct Fuzzed<'a>(u8, &'a str, &'a str);
    const VARIABLES: [&str; 8] = [
        "SLURM_JOB_NODELIST",
        "PBS_NODEFILE",
        "LSB_DJOB_HOSTFILE",
        "LSB_MCPU_HOSTS",
        "PE_HOSTFILE",
        "FLUX_JOB_ID",
        "FLUX_URI",
        "COBALT_NODEFILE",
    ];
    impl Surroundings for Fuzzed<'_> {
        fn var(&self, name: &'static str) -> hpcrt::Result<Option<String>> {
            let other =
                VARIABLES.iter().position(|known| *known == name).is_some_and(|at| at != usize::from(self.0 % 8));
            Ok((!other).then(|| self.1.to_owned()).filter(|value| !value.is_empty()))
        }
        fn read(&self, _: &str) -> hpcrt::Result<String> {
            Ok(self.2.to_owned())
        }
        fn stdin(&self) -> hpcrt::Result<String> {
            self.read("")
        }
        fn run(&self, _: &[&str]) -> hpcrt::Result<String> {
            self.read("")
        }
        fn cpus(&self) -> u32 {
            4
        }
    }
    let Some((which, text)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    if let Ok(found) = allocation::discover(&Fuzzed(*which, first, rest)) {
        assert!((1..=hostlist::MAX_HOSTS).contains(&found.hosts.len()));
    }
}

/// What was kept of an earlier run.
pub fn hints(bytes: &[u8]) {
    if let Some((_, entries)) = hints::parse(bytes) {
        assert!(entries.iter().all(|(path, _)| path.starts_with(b"/")));
    }
}
