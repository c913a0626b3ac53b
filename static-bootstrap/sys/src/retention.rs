//! What stays when room is needed: decided from what comes back how soon after it went, since nothing tells of accesses to what is here.
//!
//! First in, first out never has what a sweep over more memory than fits needs next. So what came back after it had gone is kept, as far as there is room for that, and the
//! rest passes through what is left. Now and then something kept goes, too: by when it is missed, it is known how much sooner something else must have come back to be kept instead.
//!
//! Through the columns of a matrix, of each page a little is used for some columns, and then no more: those pages are kept from the first time on, and what was kept first goes for them.
//! One that went before it was used up is seldom kept again: less is left of its use. What else comes back beside them, as large pieces that cost less to bring than as many pages one by one,
//! is kept only if nothing at all of what goes for it is missed sooner.
//!
//! What is missed as soon as it has gone is used all the time, unless a little more is swept over than fits: then nearly all that comes back does so. As long as little does, it is kept, and
//! what has been kept for longest goes for it; but not what came back like that itself, the first time that this would go.

use core::ops::Range;

use super::afresh::Afresh;

/// Of so many pieces that are not kept one has something kept go: usually, and until half of [`TRIALS`] did.
const TRIAL_EVERY: u32 = 16;
const TRIAL_FIRST: u32 = 2;
/// Kept pieces that went and were not missed yet, or were the last that were.
const TRIALS: usize = 16;
/// What has not been missed while as much has gone as fits so many times is not used any more.
const TURNS: u64 = 8;
/// Pages of a piece that is as one of a run, if runs are, unless it comes with steps: such pieces are to stay until they are used.
const LARGE: usize = 32;
/// Of so many pages that come, one is to be in such a piece, or of a run; and one is to come with steps where columns begin to be gone through, and where they still are.
const LARGE_EVERY: u64 = 8;
const STEPS_EVERY: [u64; 2] = [4, 12];
/// Of so many pages of columns that come back one is kept where no more fits.
const AGAIN: u64 = 12;
/// What comes back before as much has gone as this part of what fits does so at once; and is kept while it is less than one page in so many that come back.
const AT_ONCE: u64 = 8;
const AT_ONCE_EVERY: u64 = 4;
/// What went for a trial has its place until this part of the time has passed in which other things come back.
const SOONER: u64 = 2;
/// That is no more than one part in so many of what is kept.
const OUT: u64 = 8;
/// What went before as much went as can fit at most, so many times, begins to be used anew: less may be what the columns themselves bring until they come to it again.
const ANEW: u64 = 3;
/// Of so many pages that come, one is used anew at most while it is known how much is used; and what comes after this many times as much as fits tells no more of that.
const BACK_EVERY: u64 = 4;
const FAR: u64 = 2;
/// Times in which as much goes as can fit at most, divided.
const GRAINS: u64 = 128;

/// Something kept that went.
#[derive(Debug, Clone, Copy)]
struct Trial {
    /// Its first page, and how many it has.
    page: u64,
    pages: u64,
    since: u64,
    /// How much went until it was missed.
    took: Option<u64>,
}

impl Trial {
    fn meets(&self, comes: &Range<u64>) -> bool {
        self.page < comes.end && comes.start < self.page + self.pages
    }
}

/// How pages come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comes {
    Alone,
    /// As part of a run that goes on.
    OfRun,
    /// With steps.
    WithSteps,
}

/// From where to take what goes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// What came first of that which is not kept.
    Passing,
    /// What has been kept for longest.
    Kept,
    /// Something kept, so many pages behind what was taken like that before, and so on all around.
    Sample(usize),
}

impl Source {
    /// Whether it is something kept that goes.
    pub fn is_kept(self) -> bool {
        self != Source::Passing
    }
}

/// See the module. Amounts are pages.
#[derive(Debug)]
pub struct Retention {
    /// All that fits beside slots, and beside as few of them as can be; and what may be kept of it: while hardly any large pieces or parts of runs come; while they do, and are
    /// not crowded, or are; while pages come with steps.
    room: u64,
    most: u64,
    limits: [u64; 4],
    crowded: bool,
    kept: u64,
    /// What came lately, what of that in large pieces, what with steps, and what came back; of those, what did so at once, and the sum of how much came since they came before.
    came: u64,
    large: u64,
    stepped: u64,
    back: u64,
    at_once: u64,
    aparts: u64,
    /// Whether columns are gone through; and what came back of them and was not kept.
    columns: bool,
    passed: u64,
    /// What has gone so far; of that, until what can fit at most changed last; and the time then, since time is told in parts of that.
    gone: u64,
    gone_then: u64,
    then: u64,
    refused: u32,
    trials: [Option<Trial>; TRIALS],
    oldest: usize,
    afresh: Afresh,
}

impl Retention {
    pub const NEW: Retention = Retention {
        room: 0,
        most: 0,
        limits: [0; 4],
        crowded: false,
        kept: 0,
        came: 0,
        large: 0,
        stepped: 0,
        back: 0,
        at_once: 0,
        aparts: 0,
        columns: false,
        passed: 0,
        gone: 0,
        gone_then: 0,
        then: 0,
        refused: 0,
        trials: [None; TRIALS],
        oldest: 0,
        afresh: Afresh::NEW,
    };

    /// So much fits, and at `most` so much when few slots are used. These amounts at least are not kept: of what fits usually, and while large pieces or parts of runs come, or crowded ones;
    /// and of the most while columns are gone through, where what slots take is to come from what is not kept.
    pub fn fit(&mut self, room: usize, most: usize, passing: [usize; 4]) {
        if self.most != most as u64 {
            (self.then, self.gone_then) = (self.now(), self.gone);
        }
        (self.room, self.most) = (room as u64, most as u64);
        let of = [room, room, room, most];
        self.limits = core::array::from_fn(|nth| of[nth].saturating_sub(passing[nth]) as u64);
    }

    /// Whether runs are crowded ([`super::policy::Policy::is_crowded`]).
    pub fn crowd(&mut self, crowded: bool) {
        self.crowded = crowded;
    }

    fn limit(&self) -> u64 {
        if self.is_afresh() {
            return 0;
        }
        self.limits[match LARGE_EVERY * self.large >= self.came {
            _ if self.columns => 3,
            true if self.crowded => 2,
            true => 1,
            false => 0,
        }]
    }

    /// Nothing is kept now, and all that can be is to be room.
    pub fn is_afresh(&self) -> bool {
        self.afresh.now
    }

    /// Now, to note it of what goes; never 0.
    pub fn time(&self) -> u16 {
        (self.now() % u64::from(u16::MAX)) as u16 + 1
    }

    /// In grains, of whatever size they were.
    fn now(&self) -> u64 {
        self.then + (self.gone - self.gone_then) / self.grain()
    }

    fn grain(&self) -> u64 {
        (self.most / GRAINS).max(1)
    }

    /// Pages of a range come, so many, which went at this time, or never did (0). Whether they are kept.
    pub fn arrive(&mut self, comes: Range<u64>, pages: usize, went: u16, how: Comes) -> bool {
        let steps = how == Comes::WithSteps;
        let (gone, large) = (self.gone, how == Comes::OfRun || pages >= LARGE && !steps);
        self.came += pages as u64;
        self.large += if large { pages as u64 } else { 0 };
        self.stepped += if steps { pages as u64 } else { 0 };
        self.columns = STEPS_EVERY[usize::from(self.columns)] * self.stepped > self.came;
        if went != 0 {
            self.back += pages as u64;
            self.at_once += if self.is_at_once(went) { pages as u64 } else { 0 };
            self.aparts += pages as u64 * self.apart(went).min(FAR * self.most);
            self.afresh.count(pages as u64, gone, self.since(went));
        }
        if self.came > self.room / 2 {
            let of_those = [&mut self.large, &mut self.stepped, &mut self.back, &mut self.at_once, &mut self.aparts];
            of_those.into_iter().chain([&mut self.came]).for_each(|pages| *pages /= 2);
        }
        for trial in self.trials.iter_mut().flatten().filter(|trial| trial.meets(&comes) && trial.took.is_none()) {
            trial.took = Some(gone - trial.since);
        }
        let keep = if self.is_afresh() {
            false
        } else if steps || self.columns && !large {
            self.keeps_of_columns(pages as u64, went, steps)
        } else {
            went != 0 && self.keeps_of_what_came_back(pages as u64, went)
        };
        self.kept += if keep { pages as u64 } else { 0 };
        keep
    }

    /// What is used anew is kept, and of what came back as much as there is room for, and little more; in place of others only what comes without steps.
    fn keeps_of_columns(&mut self, pages: u64, went: u16, steps: bool) -> bool {
        let anew = went == 0 || self.since(went) > ANEW * self.most;
        if anew || self.fits(pages) || !steps && self.is_sooner(went) {
            return true;
        }
        self.refused += 1;
        self.passed += pages;
        let keep = self.passed >= AGAIN * pages;
        self.passed -= if keep { AGAIN * pages } else { 0 };
        keep
    }

    fn keeps_of_what_came_back(&mut self, pages: u64, went: u16) -> bool {
        let keep = self.fits(pages) || self.is_sooner(went) || self.is_used_all_the_time(went);
        self.refused += u32::from(!keep);
        keep
    }

    /// There is room for so much more that is kept, and for what went for a trial and may come back soon.
    fn fits(&self, pages: u64) -> bool {
        let is_out = |trial: &&Trial| {
            !self.columns && trial.took.is_none() && SOONER * (self.gone - trial.since) * self.back < self.aparts
        };
        let out = self.trials.iter().flatten().filter(is_out).map(|trial| trial.pages).sum::<u64>();
        self.kept + out.min(self.kept / OUT) + pages <= self.limit()
    }

    /// What went then came back sooner than what is kept does.
    fn is_sooner(&self, went: u16) -> bool {
        self.apart(went) * 4 < self.missed() * 3
    }

    /// Whether what went at this time, and comes now, does so at once; nothing does while columns are gone through, where what is left of its use is told otherwise.
    pub fn is_at_once(&self, went: u16) -> bool {
        !self.columns && went != 0 && self.since(went) < self.room / AT_ONCE
    }

    fn is_used_all_the_time(&self, went: u16) -> bool {
        self.is_at_once(went) && AT_ONCE_EVERY * self.at_once < self.back
    }

    /// How much came since something came that went at this time: it passed through what is not kept.
    fn apart(&self, went: u16) -> u64 {
        self.since(went) + self.room.saturating_sub(self.kept)
    }

    /// How much is used, if nearly all that comes had been here before: what comes until the same comes again, and what is kept, but for that of which nothing is missed when it goes.
    fn used(&self) -> Option<u64> {
        if self.columns || BACK_EVERY * (self.came - self.back) >= self.came {
            return None;
        }
        let trials = self.trials.iter().flatten();
        let missed = trials.clone().filter(|trial| trial.took.is_some()).count() as u64;
        let dead = trials.filter(|trial| trial.took.is_none() && self.gone - trial.since > self.room).count() as u64;
        let doubt = TRIALS as u64 / 4;
        let kept = self.kept * (missed + doubt) / (missed + dead + doubt);
        Some(self.aparts / self.back.max(1) + kept)
    }

    /// How much went since this time.
    fn since(&self, went: u16) -> u64 {
        self.grains(went) * self.grain()
    }

    /// The same in grains.
    fn grains(&self, went: u16) -> u64 {
        let turns = u64::from(u16::MAX);
        (u64::from(self.time()) + turns - u64::from(went)) % turns
    }

    /// Whether so much was tried that it says something.
    fn is_tried(&self) -> bool {
        self.trials.iter().flatten().count() >= TRIALS / 2
    }

    /// How much goes until something kept that went is missed: half of it, by pages, or any of columns at least.
    fn missed(&self) -> u64 {
        if !self.is_tried() {
            return 0;
        }
        let mut all = [(0, 0); TRIALS];
        let mut len = 0;
        for trial in self.trials.iter().flatten() {
            all[len] = (trial.took.unwrap_or(self.gone - trial.since), trial.pages);
            len += 1;
        }
        let all = &mut all[..len];
        all.sort_unstable();
        let mut half = if self.columns { 0 } else { all.iter().map(|(_, pages)| pages).sum::<u64>() / 2 };
        let typical = all.iter().find(|(_, pages)| {
            let is = *pages > half;
            half = half.saturating_sub(*pages);
            is
        });
        typical.map_or(0, |(took, _)| *took)
    }

    /// Where the next is that goes.
    pub fn source(&self) -> Source {
        let every = if self.is_tried() { TRIAL_EVERY } else { TRIAL_FIRST };
        let tries = self.kept > 0 && self.refused >= every && self.is_free();
        if self.kept > self.limit() {
            Source::Kept
        } else if tries && !self.columns && self.oldest.is_multiple_of(2) {
            Source::Sample(self.kept as usize * 2 / TRIALS)
        } else if tries {
            Source::Kept
        } else {
            Source::Passing
        }
    }

    /// Whether the oldest trial has come to an end. Pages of columns are missed in the next one, or not any more.
    fn is_free(&self) -> bool {
        let most = if self.columns { 1 } else { TURNS } * self.room;
        self.trials[self.oldest].is_none_or(|trial| trial.took.is_some() || self.gone - trial.since > most)
    }

    /// So many pages from this one on went from there.
    pub fn leave(&mut self, first: u64, pages: usize, from: Source) {
        if from.is_kept() {
            self.kept = self.kept.saturating_sub(pages as u64);
            if self.is_free() {
                self.trials[self.oldest] =
                    Some(Trial { page: first, pages: pages as u64, since: self.gone, took: None });
                self.oldest = (self.oldest + 1) % TRIALS;
                self.refused = 0;
            }
        }
        self.gone += pages as u64;
        let used = self.used();
        if self.afresh.begins(self.gone, self.most, used) {
            self.trials = [None; TRIALS];
        }
    }

    /// Pages that are here are kept from now on.
    pub fn join(&mut self, pages: usize) {
        self.kept += pages as u64;
    }

    /// Kept pages are not the program's any more.
    pub fn forget(&mut self, pages: usize) {
        self.kept = self.kept.saturating_sub(pages as u64);
    }
}
