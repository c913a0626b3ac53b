//! Members that share a board with their agent: what they ask there, and when their calls are over.
//!
//! The board counts the members that are calling. Who makes them all says `look` on its socket, so the agent hears once of an operation (of what
//! rank 0 gives not even that: it looks when it has that); and whoever has waited for a second, so that it hears of those that do not come. Calls leave the count before anybody can see that they
//! are answered, else the next operation's would be counted with them. A member that gathers does not wait for the answer (rank 0 does) and
//! may call the next operation meanwhile: it stays counted then, and is not woken for the first.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::members::{End, Members};
use crate::net::collective::text::{self, Request};
use crate::sys::board::Board;

impl Members {
    /// Gives a member its place on the board, which is made for the first.
    pub(super) fn share_board(&self, member: usize) {
        let made = match self.board.get() {
            _ if self.without_board => Err(io::ErrorKind::Unsupported.into()),
            Some(_) => Ok(()),
            None => Board::new(self.ends.borrow().len()).map(|board| drop(self.board.set(board))),
        };
        let (Ok(()), Some(board)) = (&made, self.board.get()) else {
            let why = made.err().map_or_else(String::new, |error| error.to_string());
            return self.reply(member, &text::error(&why));
        };
        let mut ends = self.ends.borrow_mut();
        let Some(Some(end)) = ends.get_mut(member) else { return };
        let reply = text::done(&[member.to_string().as_bytes()]);
        let memory = board.memory();
        let fds = [memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // It waits for this, so there is room. One that asks twice has one place.
        let sent = rustix::net::sendmsg(&end.socket, &[IoSlice::new(&reply)], &mut control, flags);
        if sent.is_ok() && !std::mem::replace(&mut end.shares, true) {
            self.sharing.set(self.sharing.get() + 1);
            board.set_members(self.sharing.get());
        }
    }

    /// Takes the requests that stand on the board.
    pub(super) fn look(&self) {
        let Some(board) = self.board.get() else { return };
        self.look_again.set(true);
        // Replies may ask for another look; that is this one's.
        if self.looking.replace(true) {
            return;
        }
        while self.look_again.take() {
            self.look_once(board);
        }
        self.looking.set(false);
    }

    fn look_once(&self, board: &Board) {
        let members = self.ends.borrow().len();
        for member in 0..members {
            let asked = match &mut self.ends.borrow_mut()[member] {
                Some(end) if end.shares && !end.on_board => {
                    let asked = board.request(member);
                    end.on_board = asked.is_some();
                    asked
                }
                _ => None,
            };
            let Some(request) = asked else { continue };
            self.hold(member);
            match text::parse(&request) {
                Ok(Some((call @ Request::Call(..), len))) if len == request.len() => self.obey(member, call),
                _ => self.reply(member, &text::error("only calls stand on a board")),
            }
        }
    }

    /// What rank 0 gives may be here: takes the calls for it, of which nobody says `look` before.
    pub(super) fn lose_patience(&self) {
        if let Some(board) = self.board.get().filter(|_| !self.branch.borrow().is_patient()) {
            board.set_patient(false);
            self.look();
        }
    }

    /// A member that shares the board calls on its socket.
    pub(super) fn count_call(&self, member: usize) {
        let of = |end: &End| end.shares && !end.on_board && !end.held;
        let counts = self.ends.borrow()[member].as_ref().is_some_and(of);
        if let Some(board) = self.board.get().filter(|_| counts) {
            self.hold(member);
            if board.add_call() {
                self.look();
            }
        }
    }

    fn hold(&self, member: usize) {
        if let Some(Some(end)) = self.ends.borrow_mut().get_mut(member) {
            end.held = true;
            self.held.set(self.held.get() + 1);
        }
    }

    /// The calls of these members are about to be answered. Returns whether there are some on the board that nobody will say `look` for.
    pub(super) fn release(&self, members: impl Iterator<Item = usize>) -> bool {
        let Some(board) = self.board.get() else { return false };
        let mut ends = self.ends.borrow_mut();
        let (mut held, mut released) = (0, 0);
        for member in members {
            let Some(end) = &mut ends[member] else { continue };
            if std::mem::take(&mut end.held) {
                held += 1;
                end.counted = end.on_board && board.unanswered(member) > 1;
                released += u32::from(!end.counted);
            }
        }
        if held == 0 {
            return false;
        }
        self.held.set(self.held.get() - held);
        board.remove_calls(released) > self.held.get()
    }

    /// Answers a member's request on the board; false: the reply is to be said on the socket.
    pub(super) fn answer_on(&self, board: &Board, member: usize, end: &mut End, reply: &[u8]) -> bool {
        let answered = board.answer(member, reply);
        // It has asked again since it left the count, and relied on being in it.
        if answered.asks && !std::mem::take(&mut end.counted) {
            board.add_call();
            self.look_again.set(true);
        }
        self.answered.set(self.answered.get() || !answered.asks);
        answered.fits
    }

    /// Wakes those that were answered on the board.
    pub(super) fn ring(&self) {
        if let Some(board) = self.board.get().filter(|_| self.answered.take()) {
            board.ring();
        }
    }

    /// A member does not take part any more.
    pub(super) fn close(&self, member: usize) {
        self.release(std::iter::once(member));
        let shared = self.ends.borrow_mut()[member].take().is_some_and(|end| end.shares);
        if let Some(board) = self.board.get().filter(|_| shared) {
            self.sharing.set(self.sharing.get() - 1);
            board.set_members(self.sharing.get());
            // It may have been the last that the others waited for.
            self.look();
        }
    }
}
