//! Which servers keep which spans: dealt out by how much each lends, twice where a copy is wanted, and dealt anew when one is lost. Decided from
//! numbers alone.

use super::resident::SERVERS;

/// Spans are dealt out by their number modulo this.
pub const PLACES: usize = 256;
/// In place of a server.
pub const NOBODY: u8 = u8::MAX;

/// Who keeps the spans of one place.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Has all of them, and is asked for them.
    pub first: u8,
    /// Is given them, too; [`NOBODY`]: there is no copy.
    pub second: u8,
    /// Not 0: the second has all of them.
    pub whole: u8,
    pub reserved: u8,
}

impl Place {
    const NONE: Place = Place { first: NOBODY, second: NOBODY, whole: 0, reserved: 0 };

    /// Whether a server keeps spans of this place.
    pub fn has(&self, server: u8) -> bool {
        server != NOBODY && (self.first == server || self.second == server)
    }

    /// Without a server that is lost: `None` if nobody else has all.
    pub fn without(self, server: u8) -> Option<Place> {
        match self {
            _ if !self.has(server) => Some(self),
            Place { second, .. } if second == server => Some(Place { second: NOBODY, whole: 0, ..self }),
            Place { second, whole, .. } if second != NOBODY && whole != 0 => {
                Some(Place { first: second, second: NOBODY, whole: 0, reserved: 0 })
            }
            _ => None,
        }
    }
}

/// Deals out places in proportion to `weights`, which are what the servers lend, in any unit; 0: nothing. `mirror`: each to two, as far as there
/// are two.
pub fn deal(weights: &[u64], mirror: bool) -> [Place; PLACES] {
    let mut places = [Place::NONE; PLACES];
    let mut credits = [0i128; SERVERS];
    for (nth, place) in places.iter_mut().enumerate() {
        let one = next(weights, &mut credits, NOBODY);
        let other = if mirror { next(weights, &mut credits, one) } else { NOBODY };
        // Who comes first in every other place is asked as often.
        let (first, second) = if nth % 2 == 1 && other != NOBODY { (other, one) } else { (one, other) };
        *place = Place { first, second, whole: u8::from(second != NOBODY), reserved: 0 };
    }
    places
}

/// The server whose turn it is: with the most credit after each got its weight, which costs it the sum of all weights.
fn next(weights: &[u64], credits: &mut [i128; SERVERS], but: u8) -> u8 {
    let able = |server: &usize| *server != usize::from(but) && weights[*server] > 0;
    let servers = 0..weights.len().min(SERVERS);
    let sum: i128 = weights.iter().map(|weight| i128::from(*weight)).sum();
    servers.clone().for_each(|server| credits[server] += i128::from(weights[server]));
    let Some(chosen) = servers.filter(able).max_by_key(|server| (credits[*server], SERVERS - server)) else {
        return NOBODY;
    };
    credits[chosen] -= sum;
    chosen as u8
}

/// A place that lacks its copy, and who is to keep it: of those in `alive` (a bit each) who keep least for what they lend.
pub fn gap(places: &[Place; PLACES], weights: &[u64], alive: u32) -> Option<(usize, u8)> {
    let nth = places.iter().position(|place| place.second == NOBODY)?;
    let able =
        |server: &usize| alive >> server & 1 == 1 && usize::from(places[nth].first) != *server && weights[*server] > 0;
    let load = |server: usize| places.iter().filter(|place| place.has(server as u8)).count() as u128;
    let less = |a: &usize, b: &usize| (load(*a) * u128::from(weights[*b])).cmp(&(load(*b) * u128::from(weights[*a])));
    let found = (0..weights.len().min(SERVERS)).filter(able).min_by(less)?;
    Some((nth, found as u8))
}
