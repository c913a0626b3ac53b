//! What somebody between two nodes can do to their link: nothing but end it. Between the two sits a relay that alters, repeats, drops or cuts
//! what the connecting side sends.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use hpcrt::net::auth::SessionKey;
use hpcrt::net::link::{self, LinkError, Packet};
use hpcrt::net::replicate::Log;
use hpcrt::net::wire::frame::{
    BODY_MAX, FrameError, HEADER_MAX, HELLO_MAX, Kind, Message, PREFIX, Prefix, TAG, VERSION,
};
use hpcrt::net::wire::hello::{Hello, Purpose};
use hpcrt::net::wire::log::LogFrame;
use hpcrt::net::wire::record::{Codec, Record};
use smol::future::{FutureExt, zip};
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::net::unix::UnixStream;

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

/// Frames that differ in kind and size; the body of a `Log` frame has its hash in the header.
fn packets() -> Vec<Packet> {
    let hello = Hello::Welcome { proof: [3; 32] };
    let log = Packet::new(&LogFrame::Attach { stripe: 1, from: 5 }, Vec::new());
    vec![Packet::new(&hello, vec![1; 20]), log, Packet::new(&hello, Vec::new()), Packet::new(&hello, vec![2; 300])]
}

/// What the listening side gets when the relay has changed what came after the handshake, the frames of [`packets`]: the packets, and
/// why there were no more.
fn heard(alter: impl FnOnce(&[Vec<u8>]) -> Vec<u8>) -> (Vec<Packet>, LinkError) {
    smol::block_on(async {
        let key = SessionKey::random();
        let ((ours, mut left), (mut right, theirs)) = (pair(), pair());
        let connecting = async {
            let (_, mut writer) = link::connect(ours, &key, 7, Purpose::Log).await.unwrap();
            for packet in packets() {
                writer.send(&packet).await.unwrap();
            }
        };
        let relaying = async {
            pass(&mut right, &mut left).await;
            pass(&mut left, &mut right).await;
            pass(&mut right, &mut left).await;
            let mut frames = Vec::new();
            for packet in packets() {
                let tags = if packet.body.is_empty() { TAG } else { 2 * TAG };
                let mut bytes = vec![0; PREFIX + packet.header.len() + packet.body.len() + tags];
                left.read_exact(&mut bytes).await.unwrap();
                frames.push(bytes);
            }
            let bytes = alter(&frames);
            // Who is refused may not listen to the end.
            let _ = right.write_all(&bytes).await;
            drop(right);
        };
        let listening = async {
            let (mut reader, ..) = link::accept(theirs, &key).await.unwrap();
            let mut packets = Vec::new();
            loop {
                match reader.receive().await {
                    Ok(packet) => packets.push(packet),
                    Err(error) => return (packets, error),
                }
            }
        };
        zip(zip(connecting, relaying), listening).await.1
    })
}

/// Passes on one frame of the handshake.
async fn pass(from: &mut UnixStream, to: &mut UnixStream) -> Vec<u8> {
    let mut prefix = [0; PREFIX];
    from.read_exact(&mut prefix).await.unwrap();
    let length = Prefix::decode(&prefix, (HELLO_MAX, 0)).unwrap().header;
    let mut header = vec![0; length];
    from.read_exact(&mut header).await.unwrap();
    let bytes = [&prefix[..], &header].concat();
    to.write_all(&bytes).await.unwrap();
    bytes
}

/// The packets heard are the first ones of those sent.
#[track_caller]
fn are_first(heard: &[Packet], count: usize) {
    assert_eq!(heard.len(), count);
    for (heard, sent) in heard.iter().zip(packets()) {
        assert_eq!((heard.kind, heard.header.as_slice(), &heard.body), (sent.kind, sent.header.as_slice(), &sent.body));
    }
}

#[test]
fn what_is_sent_is_heard() {
    let (packets, end) = heard(|frames| frames.concat());
    are_first(&packets, 4);
    assert!(matches!(end, LinkError::Closed), "{end}");
}

#[test]
fn a_repeated_dropped_or_moved_frame_ends_the_link() {
    type Order = &'static [usize];
    let cases: [(Order, usize); 5] = [(&[0, 0], 1), (&[1], 0), (&[0, 2], 1), (&[1, 0], 0), (&[0, 1, 2, 3, 0], 4)];
    for (order, good) in cases {
        let (packets, end) = heard(|frames| order.iter().flat_map(|&nth| frames[nth].clone()).collect::<Vec<u8>>());
        are_first(&packets, good);
        assert!(matches!(end, LinkError::Frame(FrameError::Tag)), "{order:?}: {end}");
    }
}

#[test]
fn a_cut_frame_is_never_heard() {
    let length = PREFIX + packets()[0].header.len() + 20 + 2 * TAG;
    for cut in 0..length {
        let (packets, end) = heard(|frames| frames[0][..cut].to_vec());
        are_first(&packets, 0);
        assert!(matches!(end, LinkError::Closed), "cut at {cut}: {end}");
    }
}

#[test]
fn every_altered_byte_ends_the_link() {
    let length = PREFIX + packets()[0].header.len() + 20 + 2 * TAG;
    for at in 0..length {
        let (packets, end) = heard(|frames| {
            let mut bytes = frames.concat();
            bytes[at] ^= 1 << (at % 8);
            bytes
        });
        are_first(&packets, 0);
        // A changed length makes the reader wait for more than comes, or is too long.
        assert!(matches!(end, LinkError::Frame(_) | LinkError::Closed), "byte {at}: {end}");
    }
}

/// A frame cannot be sent back to who sent it, nor can what was said in one connection be said in another.
#[test]
fn words_of_another_direction_or_connection_are_refused() {
    smol::block_on(async {
        let key = SessionKey::random();
        let ((ours, mut left), (mut right, theirs)) = (pair(), pair());
        let between = async {
            pass(&mut right, &mut left).await;
            let proof = pass(&mut left, &mut right).await;
            pass(&mut right, &mut left).await;
            let mut frame = vec![0; PREFIX + packets()[1].header.len() + TAG];
            left.read_exact(&mut frame).await.unwrap();
            left.write_all(&frame).await.unwrap();
            proof
        };
        let talking = async {
            let (mut reader, mut writer) = link::connect(ours, &key, 7, Purpose::Log).await.unwrap();
            writer.send(&packets()[1]).await.unwrap();
            reader.receive().await
        };
        let ((proof, back), accepted) = zip(zip(between, talking), link::accept(theirs, &key)).await;
        accepted.unwrap();
        assert!(matches!(back, Err(LinkError::Frame(FrameError::Tag))), "{back:?}");
        let (mut again, theirs) = pair();
        let replay = async {
            let mut challenge = vec![0; 1024];
            let _ = again.read(&mut challenge).await;
            again.write_all(&proof).await.unwrap();
            again
        };
        let (_, refused) = zip(replay, link::accept(theirs, &key)).await;
        assert!(matches!(refused, Err(LinkError::Frame(FrameError::Tag))), "{refused:?}");
    });
}

/// The end of a handshake in which the connecting side answers the challenge with these bytes and then stays.
fn answered(bytes: Vec<u8>) -> LinkError {
    smol::block_on(async {
        let (mut stranger, theirs) = pair();
        let talking = async {
            let _ = stranger.write_all(&bytes).await;
            let mut rest = Vec::new();
            let _ = stranger.read_to_end(&mut rest).await;
            smol::future::pending().await
        };
        talking.or(link::accept(theirs, &SessionKey::random())).await.unwrap_err()
    })
}

fn prefix(version: u16, kind: u16, header: u32, body: u32) -> Vec<u8> {
    let mut bytes = Prefix { kind: Kind::Hello, header: 0, body: 0 }.encode().to_vec();
    bytes[4..6].copy_from_slice(&version.to_le_bytes());
    bytes[6..8].copy_from_slice(&kind.to_le_bytes());
    bytes[8..12].copy_from_slice(&header.to_le_bytes());
    bytes[12..16].copy_from_slice(&body.to_le_bytes());
    bytes
}

#[test]
fn another_version_is_named_beside_our_own() {
    for version in [0, VERSION + 1, u16::MAX] {
        let error = answered(prefix(version, 1, 100, 0)).to_string();
        let both = format!("the peer speaks version {version} of the protocol, this hpcrt version {VERSION}");
        assert!(error.contains(&both), "{error}");
    }
}

/// At the first bytes that no node says, before anything is waited for or kept.
#[test]
fn strangers_are_refused_at_their_first_words() {
    let small = u32::try_from(HELLO_MAX).unwrap();
    let cases = [
        (b"GET / HTTP/1.0\r\n\r\n".to_vec(), FrameError::Magic),
        (prefix(VERSION, 1, small + 1, 0), FrameError::TooLong(HELLO_MAX + 1)),
        (prefix(VERSION, 1, u32::MAX, 0), FrameError::TooLong(u32::MAX as usize)),
        (prefix(VERSION, 1, 10, 1), FrameError::TooLong(10)),
        (prefix(VERSION, 77, 10, 0), FrameError::Kind(77)),
        ([prefix(VERSION, 1, 10, 0), vec![0xff; 10]].concat(), FrameError::Header),
        ([prefix(VERSION, 3, 10, 0), vec![0; 10]].concat(), FrameError::Header),
    ];
    for (bytes, expected) in cases {
        match answered(bytes) {
            LinkError::Frame(error) => assert_eq!(error, expected),
            other => panic!("{other} instead of {expected}"),
        }
    }
    let welcome = Hello::Welcome { proof: [0; 32] }.encode();
    let early = [prefix(VERSION, 1, u32::try_from(welcome.len()).unwrap(), 0), welcome.to_vec()].concat();
    assert!(matches!(answered(early), LinkError::Frame(FrameError::Header)), "a proof that was not asked for");
}

/// Who has the key is believed up to the protocol's limits.
#[test]
fn lengths_have_limits_for_friends_too() {
    for (header, body) in [(HEADER_MAX + 1, 0), (0, BODY_MAX + 1)] {
        let frame = prefix(VERSION, 2, u32::try_from(header).unwrap(), u32::try_from(body).unwrap());
        let (packets, end) = heard(|_| frame);
        are_first(&packets, 0);
        assert!(matches!(end, LinkError::Frame(FrameError::TooLong(_))), "{end}");
    }
}

#[test]
fn a_listener_without_the_key_is_refused() {
    smol::block_on(async {
        let (ours, mut stranger) = pair();
        let pretending = async {
            let challenge = Packet::new(&Hello::Challenge { nonce: [1; 32] }, Vec::new());
            let welcome = Packet::new(&Hello::Welcome { proof: [1; 32] }, Vec::new());
            for packet in [challenge, welcome] {
                let bytes = prefix(VERSION, 1, u32::try_from(packet.header.len()).unwrap(), 0);
                stranger.write_all(&[bytes, packet.header.to_vec()].concat()).await.unwrap();
            }
        };
        let key = SessionKey::random();
        let (_, refused) = zip(pretending, link::connect(ours, &key, 7, Purpose::Control)).await;
        assert!(matches!(refused, Err(LinkError::Frame(FrameError::Tag))), "{refused:?}");
    });
}

/// The body of a log's frame has no tag of its own: its hash is in the header, and nothing else sees it before that was compared.
#[test]
fn a_body_of_the_log_that_is_not_what_its_header_says_is_not_taken() {
    let log = Log::new(false, 1);
    let record = Record::Chunk { file: 1, offset: 0, len: 3, codec: Codec::Raw };
    let entry = |body: &[u8]| {
        let frame = LogFrame::Entry { seq: 0, record: record.clone(), hash: *blake3::hash(b"abc").as_bytes() };
        Packet::new(&frame, body.to_vec())
    };
    for body in [&b"abd"[..], b"ab", b"abcd"] {
        assert!(matches!(log.receive(0, entry(body)), Err(LinkError::Frame(FrameError::Tag))));
        assert!(log.poll_arrived().is_none() && log.poll_deliver().is_none() && log.next(0) == 0);
    }
    log.receive(0, entry(b"abc")).unwrap();
    assert!(log.poll_arrived().is_some() && log.next(0) == 1);
}
