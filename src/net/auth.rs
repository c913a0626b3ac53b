//! Who may speak: a handshake by which both sides prove that they have the session key, and the tags of an authenticated link.
//!
//! The listener sends a nonce; the connecting side answers with its own nonce and a keyed BLAKE3 over both nonces, its node number
//! and purpose; the listener answers likewise. Keys per connection and direction come from both nonces, so nothing can be replayed.
//! A frame's tag covers a counter: frames cannot be dropped, repeated or reordered unseen.

use blake3::Hash;

use super::wire::frame::{FrameError, PREFIX, TAG};
use super::wire::hello::{Hello, Purpose};

/// The secret of one session, known to its front end and agents. Never in argv, environment or a log.
#[derive(Clone)]
pub struct SessionKey(pub [u8; 32]);

impl std::fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// Fresh random bytes from the kernel.
pub fn nonce() -> [u8; 32] {
    let mut bytes = [0; 32];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("32 bytes never fail or fall short");
    bytes
}

/// So many hexadecimal digits, 64 at most, that nobody can guess.
pub fn random_name(digits: usize) -> String {
    blake3::hash(&nonce()).to_hex()[..digits].to_owned()
}

/// Two words that nobody can guess.
pub fn random_words() -> [u64; 2] {
    let bytes = nonce();
    [0, 8].map(|at| bytes[at..at + 8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte)))
}

impl SessionKey {
    /// A key nobody else has.
    pub fn random() -> Self {
        SessionKey(nonce())
    }

    /// Hides another key under this one, or shows it again. No two must be hidden with the same nonce.
    pub fn hide(&self, nonce: &[u8; 32], key: &[u8; 32]) -> [u8; 32] {
        let pad = *self.derive("hide", &[nonce]).as_bytes();
        std::array::from_fn(|at| pad[at] ^ key[at])
    }

    fn derive(&self, label: &str, parts: &[&[u8]]) -> Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(label.as_bytes());
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }
}

/// One side's half of the handshake after both nonces are known.
#[derive(Debug)]
pub struct Handshake<'a> {
    key: &'a SessionKey,
    listener: [u8; 32],
    connector: [u8; 32],
    node: u32,
    purpose: Purpose,
}

impl<'a> Handshake<'a> {
    /// The connecting side: answers a challenge.
    ///
    /// # Errors
    /// [`FrameError::Header`] if the listener's first word is something else.
    pub fn answer(
        key: &'a SessionKey,
        challenge: &Hello,
        node: u32,
        purpose: Purpose,
    ) -> Result<(Self, Hello), FrameError> {
        let Hello::Challenge { nonce: listener } = *challenge else { return Err(FrameError::Header) };
        let this = Handshake { key, listener, connector: nonce(), node, purpose };
        let proof = *this.proof("connector").as_bytes();
        let answer = Hello::Proof { node, purpose, nonce: this.connector, proof };
        Ok((this, answer))
    }

    /// The listening side: checks the answer to its challenge `nonce`.
    ///
    /// # Errors
    /// [`FrameError::Tag`] if the proof is wrong.
    pub fn check(
        key: &'a SessionKey,
        listener: [u8; 32],
        answer: &Hello,
    ) -> Result<(Self, Hello, u32, Purpose), FrameError> {
        let Hello::Proof { node, purpose, nonce: connector, proof } = *answer else { return Err(FrameError::Header) };
        let this = Handshake { key, listener, connector, node, purpose };
        if this.proof("connector") != Hash::from(proof) {
            return Err(FrameError::Tag);
        }
        let welcome = Hello::Welcome { proof: *this.proof("listener").as_bytes() };
        Ok((this, welcome, node, purpose))
    }

    /// The connecting side: checks the listener's proof.
    ///
    /// # Errors
    /// [`FrameError::Tag`] if it is wrong.
    pub fn confirm(&self, welcome: &Hello) -> Result<(), FrameError> {
        match *welcome {
            Hello::Welcome { proof } if self.proof("listener") == Hash::from(proof) => Ok(()),
            _ => Err(FrameError::Tag),
        }
    }

    /// Tags for what the connecting side sends, and for what the listener sends.
    pub fn tags(&self) -> (Tags, Tags) {
        let tags = |direction| Tags { key: *self.derive(direction).as_bytes(), counter: 0 };
        (tags("from connector"), tags("from listener"))
    }

    fn proof(&self, side: &str) -> Hash {
        self.derive(side)
    }

    fn derive(&self, label: &str) -> Hash {
        self.key.derive(label, &[&self.listener, &self.connector, &self.node.to_le_bytes(), &[self.purpose as u8]])
    }
}

/// Tags of one direction of one link.
pub struct Tags {
    key: [u8; 32],
    counter: u64,
}

impl std::fmt::Debug for Tags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tags").field("counter", &self.counter).finish_non_exhaustive()
    }
}

impl Tags {
    /// The key, and how many frames there were: for the one process that goes on with this direction of the link.
    pub fn secret(&self) -> ([u8; 32], u64) {
        (self.key, self.counter)
    }

    /// The tag of the next frame's header; must be called once per frame, in order.
    pub fn header(&mut self, prefix: &[u8; PREFIX], header: &[u8]) -> [u8; TAG] {
        self.counter += 1;
        self.begin(b"header").with(prefix).with(header).finish()
    }

    /// Begins the tag of the same frame's body, which is added to it in order.
    pub fn body(&self) -> Tagging {
        self.begin(b"body")
    }

    fn begin(&self, what: &'static [u8]) -> Tagging {
        Tagging { hasher: blake3::Hasher::new_keyed(&self.key), counter: self.counter, what }
    }
}

/// The tag of what is added to it.
pub struct Tagging {
    hasher: blake3::Hasher,
    counter: u64,
    what: &'static [u8],
}

impl std::fmt::Debug for Tagging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tagging").field("counter", &self.counter).finish_non_exhaustive()
    }
}

impl Tagging {
    /// What comes next.
    #[must_use]
    pub fn with(mut self, bytes: &[u8]) -> Tagging {
        self.hasher.update(bytes);
        self
    }

    /// That was all. What tells frames and their parts apart comes last: so a page lies where the hash's own blocks do.
    pub fn finish(mut self) -> [u8; TAG] {
        self.hasher.update(&self.counter.to_le_bytes()).update(self.what);
        let mut tag = [0; TAG];
        tag.copy_from_slice(&self.hasher.finalize().as_bytes()[..TAG]);
        tag
    }
}

/// Compares tags without telling by time where they differ.
pub fn same_tag(a: &[u8; TAG], b: &[u8; TAG]) -> bool {
    a.iter().zip(b).fold(0, |acc, (x, y)| acc | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn programs_make_the_same_tags() {
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let lengths =
            (0..200).chain([1023, 1024, 1025, 2048, 2049, 3072, 8193, 16384, 16385, 65536, 1 << 20, (1 << 20) + 12]);
        for len in lengths.chain((0..40).map(|n| n * 7_919)) {
            for cut in [0, 12, len / 3, len / 2 / 16_384 * 16_384] {
                let (first, second) = bytes[..len].split_at(cut.min(len));
                let theirs = blake3::keyed_hash(&[7; 32], &bytes[..len]);
                for mut ours in crate::sys::blake3::Hasher::every_way(&[7; 32]) {
                    ours.update(first);
                    ours.update(second);
                    assert_eq!(ours.tag(), theirs.as_bytes()[..TAG], "{len} bytes, cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn two_who_share_the_key_agree_and_others_do_not() {
        let key = SessionKey::random();
        let challenge = nonce();
        let (mine, answer) = Handshake::answer(&key, &Hello::Challenge { nonce: challenge }, 3, Purpose::Log).unwrap();
        let (theirs, welcome, node, purpose) = Handshake::check(&key, challenge, &answer).unwrap();
        mine.confirm(&welcome).unwrap();
        assert_eq!((node, purpose), (3, Purpose::Log));
        let (mut a, mut b) = (mine.tags().0, theirs.tags().0);
        assert_eq!(a.header(&[1; PREFIX], b"x"), b.header(&[1; PREFIX], b"x"));
        let first = a.header(&[1; PREFIX], b"x");
        assert_ne!(first, a.header(&[1; PREFIX], b"x"), "a repeated frame must not verify");

        let stranger = SessionKey::random();
        assert_eq!(Handshake::check(&stranger, challenge, &answer).err(), Some(FrameError::Tag));
        assert_eq!(Handshake::check(&key, nonce(), &answer).err(), Some(FrameError::Tag), "a replayed answer");
        let Hello::Proof { purpose, nonce, proof, .. } = answer else { unreachable!() };
        let other = Hello::Proof { node: 3, purpose: Purpose::Control, nonce, proof };
        assert_eq!(Handshake::check(&key, challenge, &other).err(), Some(FrameError::Tag), "another purpose");
        assert!(mine.confirm(&Hello::Welcome { proof }).is_err(), "what the one side said is not the other's proof");
        let forged = Hello::Proof { node: 4, purpose, nonce, proof };
        assert_eq!(Handshake::check(&key, challenge, &forged).err(), Some(FrameError::Tag), "another's node number");
    }
}
