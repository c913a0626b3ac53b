//! What hpcrt itself tells the user: queued, and written where it may wait, so that a reader who does not read holds up nothing else.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use async_channel::{Receiver, Sender, bounded};

use super::overlay::Spawner;
use super::progress::{Counters, Progress};
use crate::sys::patient::Patient;

/// Texts that wait to be written, at most; what is said beyond is dropped. A line for each of many hosts comes at once.
const WAITING: usize = 1 << 14;

/// One thing to do for the user's eyes.
#[derive(Debug)]
enum Word {
    Text(String),
    Show(Counters),
    /// The progress line goes.
    Clear,
    /// Whoever holds the other end sees this dropped when all before was written.
    Mark(Sender<()>),
}

/// See the module.
#[derive(Debug)]
pub struct Voice(Sender<Word>);

/// Who writes.
struct Speaker {
    to: Patient,
    /// How far the job is, until the line goes.
    progress: Option<Progress>,
}

impl Voice {
    /// Speaks on `to`.
    pub fn new(tasks: &Spawner, to: File, progress: Option<Progress>) -> Voice {
        let (words, waiting) = bounded(WAITING);
        tasks.spawn(speak(Speaker { to: Patient(to), progress }, waiting)).detach();
        Voice(words)
    }

    /// Has something written, as it is.
    pub fn say(&self, text: String) {
        let _ = self.0.try_send(Word::Text(text));
    }

    /// Shows how far the job is, if there is a line for that.
    pub fn show(&self, counters: Counters) {
        let _ = self.0.try_send(Word::Show(counters));
    }

    /// Has the progress line removed; see [`Voice::heard`].
    pub fn clear(&self) {
        let _ = self.0.try_send(Word::Clear);
    }

    /// Waits until all that was said is written, as long as that may take.
    pub async fn heard(&self) {
        let (mark, written) = bounded(1);
        let _ = self.0.send(Word::Mark(mark)).await;
        let _ = written.recv().await;
    }
}

async fn speak(mut speaker: Speaker, waiting: Receiver<Word>) {
    while let Ok(word) = waiting.recv().await {
        if !matches!(word, Word::Text(_)) && speaker.progress.is_none() {
            continue;
        }
        speaker = smol::unblock(move || {
            speaker.handle(word);
            speaker
        })
        .await;
    }
    // It may have a line to remove.
    if speaker.progress.is_some() {
        smol::unblock(move || drop(speaker)).await;
    }
}

impl Speaker {
    fn handle(&mut self, word: Word) {
        let Speaker { to, progress } = self;
        match word {
            Word::Text(text) => {
                // Nobody can be told that this fails.
                let mut write = || drop(to.write_all(text.as_bytes()));
                match progress {
                    Some(progress) => progress.suspend(write),
                    None => write(),
                }
            }
            Word::Show(counters) => progress.iter_mut().for_each(|line| line.update(&counters, Instant::now())),
            Word::Clear => drop(progress.take()),
            Word::Mark(mark) => drop(mark),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::rc::Rc;

    use smol::LocalExecutor;

    use super::*;

    #[test]
    fn who_does_not_read_holds_up_nobody() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let tasks = Rc::new(LocalExecutor::new());
        let (voice, mut heard) = (Voice::new(&tasks, writer.into(), None), String::new());
        let line = format!("{}\n", "x".repeat(99));
        smol::block_on(tasks.run(async {
            for _ in 0..3 * WAITING {
                voice.say(line.clone());
            }
            let reader = smol::unblock(move || {
                File::from(reader).read_to_string(&mut heard).unwrap();
                heard
            });
            voice.heard().await;
            drop(voice);
            let heard = reader.await;
            assert!(heard.len() >= WAITING * line.len() && heard.len() % line.len() == 0, "{}", heard.len());
        }));
    }
}
