//! What the program starts uses memory of other nodes, too, also where its LD_PRELOAD was set to something else (by a script, for an allocator) or taken away: its
//! environment has this object in it again then.
//!
//! Hazard: who executes may be a child that shares the parent's memory (`vfork`), on a stack of 32 KiB (glibc's `posix_spawn`). So nothing is written but on that stack, and only
//! what is needed.

use sys::resident::{FILE, PLACE_MAX};

use super::settings;

const NAME: &[u8] = b"LD_PRELOAD=";
/// Variables, and bytes of that one. An environment with more is left as it is.
const MOST: usize = 1 << 10;
const LINE: usize = 4 << 10;

/// A list of strings that ends with a null pointer, or null.
type Environment = *const *const u8;

/// Executes something with this environment.
pub(super) fn with_this<T>(environment: usize, execute: impl Fn(usize) -> T) -> T {
    let (variables, set) = look(environment as Environment);
    let others = set.map(|variable| variable.wrapping_add(NAME.len()));
    if variables > MOST || others.is_some_and(has_this) {
        return execute(environment);
    }
    with_changed(environment, variables, execute)
}

/// How many variables there are, and LD_PRELOAD, if that is one: of several the last, as the dynamic linker has it.
fn look(environment: Environment) -> (usize, Option<*const u8>) {
    let (mut variables, mut set) = (0, None);
    while !environment.is_null() {
        // SAFETY: the program says that it is such a list.
        let variable = unsafe { *environment.add(variables) };
        if variable.is_null() {
            break;
        }
        if begins(variable, NAME) {
            set = Some(variable);
        }
        variables += 1;
    }
    (variables, set)
}

/// Whether a string begins so.
fn begins(string: *const u8, with: &[u8]) -> bool {
    // SAFETY: nothing is read behind its end.
    with.iter().enumerate().all(|(nth, byte)| unsafe { *string.add(nth) } == *byte)
}

/// The parts of this object's path.
fn path() -> [&'static [u8]; 3] {
    let place = &settings::get().place;
    [&place[..place.iter().position(|byte| *byte == 0).unwrap_or(PLACE_MAX)], b"/", FILE.as_bytes()]
}

/// Whether a string names this object.
fn has_this(names: *const u8) -> bool {
    // SAFETY: nothing is read behind its end.
    let places = (0..).map(|nth| names.wrapping_add(nth)).take_while(|at| unsafe { **at } != 0);
    let [place, rest @ ..] = path();
    let mut found = places.filter(|at| begins(*at, place));
    found.any(|at| begins(at.wrapping_add(place.len()), rest[0]) && begins(at.wrapping_add(place.len() + 1), rest[1]))
}

/// With this object behind what is preloaded: some want to be the first.
#[inline(never)]
fn with_changed<T>(environment: usize, variables: usize, execute: impl Fn(usize) -> T) -> T {
    let (mut list, mut line) = ([0; MOST + 2], [0; LINE]);
    let changed = change(environment as Environment, variables, &mut list, &mut line).is_some();
    execute(if changed { list.as_ptr() as usize } else { environment })
}

/// `None`: it does not fit.
fn change(
    environment: Environment,
    variables: usize,
    list: &mut [usize; MOST + 2],
    line: &mut [u8; LINE],
) -> Option<()> {
    let mut len = 0;
    let mut add = |bytes: &[u8]| -> Option<()> {
        line.get_mut(len..len + bytes.len())?.copy_from_slice(bytes);
        len += bytes.len();
        Some(())
    };
    add(NAME)?;
    let mut place = variables;
    for (nth, word) in list.iter_mut().enumerate().take(variables) {
        // SAFETY: there are that many.
        let variable = unsafe { *environment.add(nth) };
        *word = variable as usize;
        if begins(variable, NAME) {
            place = nth;
        }
    }
    if place < variables {
        let others = (list[place] + NAME.len()) as *const u8;
        // SAFETY: the rest of that string.
        let mut bytes = (0..).map(|nth| unsafe { *others.add(nth) }).take_while(|byte| *byte != 0);
        bytes.try_for_each(|byte| add(&[byte]))?;
        add(b":")?;
    }
    path().into_iter().try_for_each(&mut add)?;
    add(&[0])?;
    list[place] = line.as_ptr() as usize;
    Some(())
}
