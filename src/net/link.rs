//! A link: frames over a byte stream, with or without tags. Whatever the stream is (TCP, Unix, an agent's own pipe), the frames are
//! the same.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rkyv::util::AlignedVec;
use smol::future::FutureExt;
use smol::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use smol::{Async, Timer};

use super::alarm::Alarm;
use super::auth::{Handshake, SessionKey, Tags, nonce, same_tag};
use super::wire::frame::{BODY_MAX, FrameError, HEADER_MAX, HELLO_MAX, Kind, Message, PREFIX, Prefix, TAG};
use super::wire::hello::{Hello, Purpose};

/// A peer that says nothing for this long is gone; a live one pings every third of it.
pub const SILENCE: Duration = Duration::from_secs(15);
/// A handshake takes at most this long.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// Bytes beside a header, shared between the links that forward them.
pub type Body = Arc<Vec<u8>>;

/// A frame received or to send.
#[derive(Clone, Debug)]
pub struct Packet {
    pub kind: Kind,
    pub header: Arc<AlignedVec>,
    pub body: Body,
}

impl Packet {
    /// A frame with a message of its kind.
    pub fn new<M: Message>(message: &M, body: impl Into<Body>) -> Packet {
        Packet { kind: M::KIND, header: Arc::new(message.encode()), body: body.into() }
    }

    /// The message.
    ///
    /// # Errors
    /// [`FrameError::Header`] if the frame belongs to another conversation or its header is malformed.
    pub fn message<M: Message>(&self) -> Result<M, FrameError> {
        if self.kind == M::KIND { M::decode(&self.header) } else { Err(FrameError::Header) }
    }
}

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("the connection was closed")]
    Closed,
    #[error("nothing was heard for {} s", SILENCE.as_secs())]
    Silent,
    #[error("the handshake took more than {} s", HANDSHAKE.as_secs())]
    Slow,
    /// The feeder of the log sends those that it feeds to others.
    #[error("it is slow and sends those that it feeds to others")]
    Left,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(io::Error),
}

impl LinkError {
    /// Whoever tries again may have more luck: too many came at once, or something was lost on the way.
    pub fn may_pass(&self) -> bool {
        match self {
            LinkError::Closed | LinkError::Slow => true,
            LinkError::Io(error) => error.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                LinkError::Closed
            }
            _ => LinkError::Io(error),
        }
    }
}

/// The receiving half.
pub struct Reader {
    io: Box<dyn AsyncRead + Send + Unpin>,
    tags: Option<Tags>,
    /// Read ahead: `start..end` of the buffer.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes read ahead, at most.
    ahead: usize,
    /// A peer of whom not a byte comes for so long is lost; `None`: none is. As the present frame was asked for.
    patience: Option<Duration>,
    silence: Alarm,
}

/// The sending half.
pub struct Writer {
    io: Box<dyn AsyncWrite + Send + Unpin>,
    tags: Option<Tags>,
    /// Small parts of a frame, together; between frames at most [`KEPT`] bytes.
    small: Vec<u8>,
}

/// Bodies of at most this many bytes are copied behind their headers.
const SMALL: usize = 4 << 10;
/// A writer keeps room for so many bytes: headers of large directories take megabytes, and are rare.
const KEPT: usize = 4 * SMALL;

/// Bytes read ahead for small frames; larger parts go straight to their place.
const READ_AHEAD: usize = 32 << 10;
/// The same for a peer that has not proved itself: what he sends beyond a handshake stays in the kernel.
const READ_AHEAD_HELLO: usize = 256;

impl Reader {
    /// The next frame; waits without limit, see [`Reader::receive_within`].
    ///
    /// # Errors
    /// See [`LinkError`]; after one the link is unusable.
    pub async fn receive(&mut self) -> Result<Packet, LinkError> {
        self.patience = None;
        self.receive_capped((HEADER_MAX, BODY_MAX)).await
    }

    /// [`Reader::receive`], but a peer silent for [`SILENCE`] is lost. A frame may take any time, as long as some of it comes: pings wait behind it.
    ///
    /// # Errors
    /// See [`LinkError`].
    pub async fn receive_within(&mut self) -> Result<Packet, LinkError> {
        self.patience = Some(SILENCE);
        self.receive_capped((HEADER_MAX, BODY_MAX)).await
    }

    async fn receive_capped(&mut self, limit: (usize, usize)) -> Result<Packet, LinkError> {
        let mut bytes = [0; PREFIX];
        self.read_exact(&mut bytes).await?;
        let prefix = Prefix::decode(&bytes, limit)?;
        let mut header = AlignedVec::with_capacity(prefix.header);
        header.resize(prefix.header, 0);
        self.read_exact(&mut header).await?;
        if self.tags.is_some() {
            let tag = self.read_tag().await?;
            let expected = self.tags.as_mut().map(|t| t.header(&bytes, &header));
            check(expected, &tag)?;
        }
        let mut body = vec![0; prefix.body];
        self.read_exact(&mut body).await?;
        if self.tags.is_some() && prefix.body > 0 && prefix.kind != Kind::Log {
            let tag = self.read_tag().await?;
            let expected = self.tags.as_ref().map(|t| t.body().with(&body).finish());
            check(expected, &tag)?;
        }
        Ok(Packet { kind: prefix.kind, header: Arc::new(header), body: Arc::new(body) })
    }

    async fn read_tag(&mut self) -> Result<[u8; TAG], LinkError> {
        let mut tag = [0; TAG];
        self.read_exact(&mut tag).await?;
        Ok(tag)
    }

    async fn read_exact(&mut self, mut to: &mut [u8]) -> Result<(), LinkError> {
        loop {
            let ready = (self.end - self.start).min(to.len());
            let (now, later) = to.split_at_mut(ready);
            now.copy_from_slice(&self.buffer[self.start..self.start + ready]);
            self.start += ready;
            to = later;
            if to.is_empty() {
                return Ok(());
            }
            let straight = to.len() >= self.ahead;
            if !straight {
                // Zeroed once, not with every frame.
                self.buffer.resize(self.ahead, 0);
                (self.start, self.end) = (0, 0);
            }
            let place = if straight { &mut *to } else { &mut self.buffer[..] };
            let count = read(&mut self.io, place, &mut self.silence, self.patience).await?;
            if straight {
                to = &mut to[count..];
            } else {
                self.end = count;
            }
        }
    }
}

/// What comes next, a byte at least. A peer of whom none comes within `patience` is lost.
async fn read(
    io: &mut (impl AsyncRead + Unpin),
    to: &mut [u8],
    silence: &mut Alarm,
    patience: Option<Duration>,
) -> Result<usize, LinkError> {
    // Begins when there was nothing: what has come is never late.
    let silent = async {
        match patience {
            Some(patience) => silence.at(Instant::now() + patience).await,
            None => smol::future::pending().await,
        }
        Err(LinkError::Silent)
    };
    match async { Ok(io.read(to).await?) }.or(silent).await? {
        0 => Err(LinkError::Closed),
        count => Ok(count),
    }
}

/// Compares a tag with the one that is right; without one to compare with none is.
pub(super) fn check(expected: Option<[u8; TAG]>, tag: &[u8; TAG]) -> Result<(), LinkError> {
    if expected.is_some_and(|expected| same_tag(&expected, tag)) { Ok(()) } else { Err(FrameError::Tag.into()) }
}

impl Writer {
    /// Sends one frame.
    ///
    /// # Errors
    /// See [`LinkError`]; after one the link is unusable.
    pub async fn send(&mut self, packet: &Packet) -> Result<(), LinkError> {
        let prefix = Prefix { kind: packet.kind, header: packet.header.len(), body: packet.body.len() }.encode();
        let (mut header_tag, mut body_tag) = ([0; TAG], [0; TAG]);
        let (mut header_tag_len, mut body_tag_len) = (0, 0);
        if let Some(tags) = &mut self.tags {
            header_tag = tags.header(&prefix, &packet.header);
            header_tag_len = TAG;
            if !packet.body.is_empty() && packet.kind != Kind::Log {
                body_tag = tags.body().with(&packet.body).finish();
                body_tag_len = TAG;
            }
        }
        // Small parts go together: the peer wakes up once for all of them.
        self.small.clear();
        for part in [&prefix, &packet.header[..], &header_tag[..header_tag_len]] {
            self.small.extend_from_slice(part);
        }
        if packet.body.len() <= SMALL {
            self.small.extend_from_slice(&packet.body);
            self.small.extend_from_slice(&body_tag[..body_tag_len]);
            self.io.write_all(&self.small).await?;
        } else {
            self.io.write_all(&self.small).await?;
            self.io.write_all(&packet.body).await?;
            if body_tag_len > 0 {
                self.io.write_all(&body_tag).await?;
            }
        }
        self.small.clear();
        self.small.shrink_to(KEPT);
        Ok(self.io.flush().await?)
    }
}

/// The two halves over a stream that needs no proof: an agent's private pipe or a socket pair.
pub fn trusted(
    input: impl AsyncRead + Send + Unpin + 'static,
    output: impl AsyncWrite + Send + Unpin + 'static,
) -> (Reader, Writer) {
    let reader = Reader {
        io: Box::new(input),
        tags: None,
        buffer: Vec::new(),
        start: 0,
        end: 0,
        ahead: READ_AHEAD,
        patience: None,
        silence: Alarm::default(),
    };
    (reader, Writer { io: Box::new(output), tags: None, small: Vec::new() })
}

/// [`trusted`] over descriptors.
///
/// # Errors
/// A descriptor that epoll cannot watch.
pub fn trusted_fds(input: OwnedFd, output: OwnedFd) -> io::Result<(Reader, Writer)> {
    Ok(trusted(Async::new(std::fs::File::from(input))?, Async::new(std::fs::File::from(output))?))
}

/// A stream between hosts.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin + Clone + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + Clone + 'static> Stream for T {}

/// The connecting side of the handshake.
///
/// # Errors
/// A wrong key, another version, a stranger, or no answer within [`HANDSHAKE`].
pub async fn connect(
    stream: impl Stream,
    key: &SessionKey,
    node: u32,
    purpose: Purpose,
) -> Result<(Reader, Writer), LinkError> {
    challenged(stream).await?.answer(key, node, purpose).await
}

/// A connection on which the listener has spoken. It goes on with whoever answers, so of several only one may be answered.
#[derive(Debug)]
pub struct Challenged {
    reader: Reader,
    writer: Writer,
    challenge: Hello,
    /// The handshake is late then.
    until: Instant,
}

/// The first half of [`connect`].
///
/// # Errors
/// As [`connect`].
pub async fn challenged(stream: impl Stream) -> Result<Challenged, LinkError> {
    let until = Instant::now() + HANDSHAKE;
    let (mut reader, writer) = strange(stream);
    let challenge = hello(&mut reader).or(late(HANDSHAKE, LinkError::Slow)).await?;
    Ok(Challenged { reader, writer, challenge, until })
}

impl Challenged {
    /// The second half of [`connect`], in what is left of [`HANDSHAKE`].
    ///
    /// # Errors
    /// As [`connect`].
    pub async fn answer(self, key: &SessionKey, node: u32, purpose: Purpose) -> Result<(Reader, Writer), LinkError> {
        let Challenged { mut reader, mut writer, challenge, until } = self;
        let shake = async {
            let (handshake, answer) = Handshake::answer(key, &challenge, node, purpose)?;
            writer.send(&Packet::new(&answer, Vec::new())).await?;
            handshake.confirm(&hello(&mut reader).await?)?;
            let (mine, theirs) = handshake.tags();
            (writer.tags, reader.tags, reader.ahead) = (Some(mine), Some(theirs), READ_AHEAD);
            Ok((reader, writer))
        };
        shake.or(late(until.saturating_duration_since(Instant::now()), LinkError::Slow)).await
    }
}

/// The listening side of the handshake: the link, the node that connects and what it wants.
///
/// # Errors
/// As [`connect`].
pub async fn accept(stream: impl Stream, key: &SessionKey) -> Result<(Reader, Writer, u32, Purpose), LinkError> {
    let shake = async {
        let (mut reader, mut writer) = strange(stream);
        let nonce = nonce();
        writer.send(&Packet::new(&Hello::Challenge { nonce }, Vec::new())).await?;
        let (handshake, welcome, node, purpose) = Handshake::check(key, nonce, &hello(&mut reader).await?)?;
        writer.send(&Packet::new(&welcome, Vec::new())).await?;
        let (theirs, mine) = handshake.tags();
        (writer.tags, reader.tags, reader.ahead) = (Some(mine), Some(theirs), READ_AHEAD);
        Ok((reader, writer, node, purpose))
    };
    shake.or(late(HANDSHAKE, LinkError::Slow)).await
}

/// The two halves over a stream whose peer has proved nothing yet.
fn strange(stream: impl Stream) -> (Reader, Writer) {
    let (reader, writer) = trusted(stream.clone(), stream);
    (Reader { ahead: READ_AHEAD_HELLO, ..reader }, writer)
}

async fn hello(reader: &mut Reader) -> Result<Hello, LinkError> {
    Ok(reader.receive_capped((HELLO_MAX, 0)).await?.message()?)
}

/// Takes a proved link apart, for who goes on with the stream itself: the tags of what is sent, and of what is received.
///
/// # Errors
/// The peer has said something already.
pub fn into_tags(reader: Reader, writer: Writer) -> Result<Option<(Tags, Tags)>, LinkError> {
    if reader.start != reader.end {
        return Err(FrameError::Header.into());
    }
    Ok(writer.tags.zip(reader.tags))
}

/// The error, after that time; for racing with what should come first.
///
/// # Errors
/// Always.
pub async fn late<T>(after: Duration, error: LinkError) -> Result<T, LinkError> {
    Timer::after(after).await;
    Err(error)
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reader").field("tags", &self.tags).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("tags", &self.tags).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::*;
    use smol::net::unix::UnixStream;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn frames_cross_an_authenticated_link() {
        smol::block_on(async {
            let key = SessionKey::random();
            let (a, b) = pair();
            let (left, right) = smol::future::zip(connect(a, &key, 7, Purpose::Log), accept(b, &key)).await;
            let ((_, mut writer), (mut reader, _, node, purpose)) = (left.unwrap(), right.unwrap());
            assert_eq!((node, purpose), (7, Purpose::Log));
            let message = Hello::Welcome { proof: [3; 32] };
            for size in [0, 1, 100_000] {
                let packet = Packet::new(&message, vec![size as u8; size]);
                let (sent, got) = smol::future::zip(writer.send(&packet), reader.receive()).await;
                sent.unwrap();
                let got = got.unwrap();
                assert_eq!(got.message::<Hello>().unwrap(), message);
                assert_eq!(got.body, packet.body);
            }
        });
    }

    /// Gives so many of its bytes every time, after a while; then nothing.
    struct Slow {
        bytes: Vec<u8>,
        portion: usize,
        pause: Option<Timer>,
    }

    const PAUSE: Duration = Duration::from_millis(60);
    const PATIENCE: Duration = Duration::from_millis(100);

    impl AsyncRead for Slow {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, to: &mut [u8]) -> Poll<io::Result<usize>> {
            if self.bytes.is_empty() {
                return Poll::Pending;
            }
            std::task::ready!(Pin::new(self.pause.get_or_insert_with(|| Timer::after(PAUSE))).poll(cx));
            self.pause = None;
            let count = self.portion.min(to.len()).min(self.bytes.len());
            to[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes.drain(..count);
            Poll::Ready(Ok(count))
        }
    }

    /// A frame that takes longer than a silent peer has, read ahead and straight to its place.
    #[test]
    fn whoever_says_something_is_not_silent() {
        smol::block_on(async {
            for body in [100, 4 * READ_AHEAD] {
                let prefix = Prefix { kind: Kind::Log, header: 8, body }.encode();
                let bytes = [&prefix[..], &vec![7; 8 + body]].concat();
                let input = Slow { portion: bytes.len() / 5, bytes, pause: None };
                let mut reader = Reader { patience: Some(PATIENCE), ..trusted(input, smol::io::sink()).0 };
                let limit = (HEADER_MAX, BODY_MAX);
                let packet = reader.receive_capped(limit).await.unwrap();
                assert_eq!((packet.header.as_slice(), &*packet.body), (&[7; 8][..], &vec![7; body]));
                let end = reader.receive_capped(limit).await;
                assert!(matches!(end, Err(LinkError::Silent)), "{end:?}");
            }
        });
    }

    #[test]
    fn a_large_header_leaves_no_memory_behind() {
        smol::block_on(async {
            let (mut writer, small) = (trusted(smol::io::empty(), smol::io::sink()).1, vec![1; SMALL]);
            for header in [1 << 20, 100] {
                let mut bytes = AlignedVec::new();
                bytes.resize(header, 0);
                let packet = Packet { kind: Kind::Log, header: Arc::new(bytes), body: Arc::new(small.clone()) };
                writer.send(&packet).await.unwrap();
                assert!(writer.small.is_empty() && writer.small.capacity() <= KEPT, "{}", writer.small.capacity());
            }
        });
    }

    #[test]
    fn another_key_is_refused_on_both_sides() {
        smol::block_on(async {
            let (a, b) = pair();
            let (key, other) = (SessionKey::random(), SessionKey::random());
            let connecting = async {
                let result = connect(a, &key, 1, Purpose::Control).await;
                assert!(matches!(result, Err(LinkError::Closed)), "{result:?}");
            };
            let accepting = async {
                let result = accept(b, &other).await;
                assert!(matches!(result, Err(LinkError::Frame(FrameError::Tag))), "{result:?}");
            };
            smol::future::zip(connecting, accepting).await;
        });
    }

    #[test]
    fn altered_bytes_are_refused() {
        smol::block_on(async {
            let key = SessionKey::random();
            let (a, b) = pair();
            let (left, right) = smol::future::zip(connect(a, &key, 7, Purpose::Log), accept(b, &key)).await;
            let (mut reader, mut writer) = (right.unwrap().0, left.unwrap().1);
            let mut packet = Packet::new(&Hello::Welcome { proof: [3; 32] }, vec![1; 10]);
            writer.send(&packet).await.unwrap();
            reader.receive().await.unwrap();
            // The same bytes again: a replay. The tag of a skipped counter stands for any alteration.
            writer.tags.as_mut().unwrap().header(&[0; PREFIX], b"");
            packet.body = Arc::new(vec![2; 10]);
            writer.send(&packet).await.unwrap();
            assert!(matches!(reader.receive().await, Err(LinkError::Frame(FrameError::Tag))));
        });
    }
}
