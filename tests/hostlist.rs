//! Host lists against their inverse and against ClusterShell, whose notation users know.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use hpcrt::launch::{fold::fold, hostlist::expand};
use proptest::prelude::*;

fn sorted(names: &[String]) -> Vec<String> {
    names.iter().cloned().collect::<BTreeSet<_>>().into_iter().collect()
}

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "n[0-9]{1,3}",
        "r[0-3]c[0-3]",
        "r0?[0-2]s[0-2]n[0-3]-ib",
        "[a-z]{1,3}",
        "10\\.0\\.[0-1]\\.[0-9]{1,2}",
        "n[0-9]{17,22}",
        "::[1-9]"
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn expand_is_the_inverse_of_fold(names in prop::collection::vec(name(), 1..60)) {
        let folded = fold(&names);
        prop_assert_eq!(sorted(&expand(&folded).unwrap()), sorted(&names), "{}", folded);
    }
}

/// For each line: the sorted names, and the form ClusterShell folds them to; or "error".
const ORACLE: &str = "
import sys
from ClusterShell.NodeSet import NodeSet
for line in sys.stdin:
    try:
        nodes = NodeSet(line.strip())
        print(' '.join(sorted(nodes)) + ';' + str(nodes))
    except Exception:
        print('error')
";

fn clustershell(lists: &[String]) -> Option<Vec<String>> {
    let mut child =
        Command::new("python3").args(["-c", ORACLE]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
    let text = lists.join("\n") + "\n";
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().ok()?;
    let _ = writer.join();
    output
        .status
        .success()
        .then(|| String::from_utf8(output.stdout).expect("ASCII in, ASCII out").lines().map(str::to_owned).collect())
}

#[test]
fn agrees_with_clustershell() {
    let mut random = fastrand::Rng::with_seed(20);
    let mut lists = Vec::new();
    for _ in 0..2000 {
        let mut list = String::new();
        for item in 0..random.usize(1..5) {
            if item > 0 {
                list.push(random.choice([',', ',', '!']).unwrap());
            }
            for _ in 0..random.usize(1..3) {
                list.push(random.choice(['a', 'b']).unwrap());
                let digits = random.usize(1..4);
                let (lo, len) = (random.u32(0..10u32.pow(digits as u32 - 1) * 2), random.u32(0..12));
                match random.u32(0..16) {
                    0..=3 => list += &format!("{lo}"),
                    4..=6 => list += &format!("[{lo}-{}]", lo + len),
                    7..=9 => list += &format!("[{lo:0digits$}-{:0digits$}]", lo + len),
                    10..=12 => list += &format!("[{lo}-{}/{}]", lo + len, random.u32(1..4)),
                    13 => list += &format!("[0{lo}-{}]", lo + len),
                    _ => list += &format!("[{lo:0digits$},{},{}-{}]", lo + 20, lo + 30, lo + 31),
                }
            }
        }
        lists.push(list);
    }
    let Some(answers) = clustershell(&lists) else {
        eprintln!("SKIPPED agrees_with_clustershell: python3 with ClusterShell (pip install ClusterShell) is not here");
        return;
    };
    assert_eq!(answers.len(), lists.len());
    let (mut errors, mut longer) = (0, 0);
    for (list, answer) in lists.iter().zip(&answers) {
        match (expand(list), answer.split_once(';')) {
            (Ok(names), Some((expected, folded))) => {
                assert_eq!(sorted(&names).join(" "), expected, "{list}");
                let ours = fold(&names);
                if names.iter().all(|name| name.matches(['a', 'b']).count() == 1) {
                    assert_eq!(sorted_items(&ours), sorted_items(folded), "{list}");
                }
                longer += usize::from(ours.len() > folded.len());
            }
            (Err(_), Some((expected, _))) => assert_eq!(expected, "", "{list}: we refuse it"),
            (Err(_), None) => errors += 1,
            (Ok(names), None) => panic!("{list}: ClusterShell refuses it, we say {names:?}"),
        }
    }
    eprintln!("{} lists, {errors} refused by both, {longer} folded longer than ClusterShell does", lists.len());
    assert!(errors < lists.len() / 2, "the lists must be mostly valid to say anything");
}

/// The items and ranges of a folded form, whatever order they stand in.
fn sorted_items(folded: &str) -> Vec<String> {
    let mut items: Vec<String> = folded.split([',', '[', ']']).map(str::to_owned).collect();
    items.sort();
    items
}
