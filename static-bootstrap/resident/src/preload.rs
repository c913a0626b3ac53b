//! What the program starts uses memory of other nodes, too, also where its LD_PRELOAD was set to something else (by a script, for an allocator) or taken away: its
//! environment has this object in it again then.

use sys::resident::{FILE, PLACE_MAX};

use super::settings;

const NAME: &[u8] = b"LD_PRELOAD=";
/// Variables, and bytes of that one. An environment with more is left as it is.
const MOST: usize = 1 << 10;
const LINE: usize = 4 << 10;

/// Executes something with this environment: a list of strings that ends with a null pointer, or null.
pub(super) fn with_this<T>(environment: usize, execute: impl Fn(usize) -> T) -> T {
    let (mut list, mut line) = ([0; MOST + 1], [0; LINE]);
    let changed = change(environment as *const *const u8, &mut list, &mut line).is_some();
    execute(if changed { list.as_ptr() as usize } else { environment })
}

/// `None`: it need not be changed, or cannot be.
fn change(environment: *const *const u8, list: &mut [usize; MOST + 1], line: &mut [u8; LINE]) -> Option<()> {
    let mut variables = 0;
    let mut set = None;
    if !environment.is_null() {
        loop {
            // SAFETY: the program says that it is such a list.
            let variable = unsafe { *environment.add(variables) };
            if variable.is_null() {
                break;
            }
            // SAFETY: a string, of which nothing is read behind its end.
            if NAME.iter().enumerate().all(|(nth, byte)| unsafe { *variable.add(nth) } == *byte) {
                // Of several the dynamic linker takes the last.
                set = Some(variables);
            }
            *list[..MOST].get_mut(variables)? = variable as usize;
            variables += 1;
        }
    }
    let place = &settings::get().place;
    let place = &place[..place.iter().position(|byte| *byte == 0).unwrap_or(PLACE_MAX)];
    let mut len = 0;
    let mut add = |bytes: &[u8]| -> Option<usize> {
        line.get_mut(len..len + bytes.len())?.copy_from_slice(bytes);
        len += bytes.len();
        Some(len)
    };
    let ours = add(NAME)?..[place, b"/", FILE.as_bytes()].into_iter().try_fold(0, |_, part| add(part))?;
    if let Some(nth) = set {
        add(b":")?;
        let others = (list[nth] + NAME.len()) as *const u8;
        // SAFETY: the rest of that string.
        let mut bytes = (0..).map(|nth| unsafe { *others.add(nth) }).take_while(|byte| *byte != 0);
        bytes.try_for_each(|byte| add(&[byte]).map(drop))?;
    }
    let end = add(&[0])? - 1;
    if line[ours.end..end].windows(ours.len()).any(|part| *part == line[ours.clone()]) {
        return None;
    }
    *list[..MOST].get_mut(set.unwrap_or(variables))? = line.as_ptr() as usize;
    Some(())
}
