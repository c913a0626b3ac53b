//! What the program starts uses memory of other nodes, too, also where its LD_PRELOAD was set to something else (by a script, for an allocator) or taken away: its
//! environment has this object in it again then.
//!
//! Hazard: who executes may be a child that shares the parent's memory (`vfork`), on a stack of 32 KiB (glibc's `posix_spawn`). So nothing is written but on that stack, and only
//! what is needed.

use core::ffi::{CStr, c_char};

use sys::resident::FILE;

use super::settings;

const NAME: &[u8] = b"LD_PRELOAD=";
/// Variables, and bytes of that one. An environment with more is left as it is.
const MOST: usize = 1 << 10;
const LINE: usize = 4 << 10;

type Text = *const c_char;

/// Executes something with this environment: a list of strings that ends with a null pointer, or null.
pub(super) fn with_this<T>(environment: usize, execute: impl Fn(usize) -> T) -> T {
    let variables = list(environment as *const Text);
    // Of several the dynamic linker takes the last.
    let set = variables.iter().rposition(|variable| bytes(*variable).starts_with(NAME));
    let names = set.map(|nth| &bytes(variables[nth])[NAME.len()..]);
    if names.is_some_and(has_this) {
        return execute(environment);
    }
    with_changed(variables, set, names, |changed| execute(changed.unwrap_or(environment)))
}

fn list<'a>(environment: *const Text) -> &'a [Text] {
    if environment.is_null() {
        return &[];
    }
    // SAFETY: the program says that it is such a list.
    unsafe {
        let len = (0..).take_while(|nth| !(*environment.add(*nth)).is_null()).count();
        core::slice::from_raw_parts(environment, len)
    }
}

fn bytes<'a>(variable: Text) -> &'a [u8] {
    // SAFETY: the program says that it is a string, and waits until it is executed.
    unsafe { CStr::from_ptr(variable) }.to_bytes()
}

/// Whether this object is named there.
fn has_this(names: &[u8]) -> bool {
    let place = settings::get().place();
    let rest = |name: &'_ [u8]| Some(name.strip_prefix(place)?.strip_prefix(b"/")? == FILE.as_bytes());
    names.windows(place.len() + 1 + FILE.len()).any(|name| rest(name) == Some(true))
}

/// With this object behind the `names` of what is preloaded, since some want to be the first; with `None` if that does not fit.
#[inline(never)]
fn with_changed<T>(
    variables: &[Text],
    set: Option<usize>,
    names: Option<&[u8]>,
    execute: impl Fn(Option<usize>) -> T,
) -> T {
    let (mut list, mut line) = ([core::ptr::null(); MOST + 2], [0; LINE]);
    let (names, colon): (_, &[u8]) = names.map_or((&[][..], b""), |names| (names, b":"));
    let mut change = || {
        list[..MOST].get_mut(..variables.len())?.copy_from_slice(variables);
        list[set.unwrap_or(variables.len())] = line.as_ptr().cast();
        let mut left = &mut line[..];
        for part in [NAME, names, colon, settings::get().place(), b"/", FILE.as_bytes(), b"\0"] {
            left.split_off_mut(..part.len())?.copy_from_slice(part);
        }
        Some(())
    };
    let fits = change().is_some();
    execute(fits.then_some(list.as_ptr() as usize))
}
