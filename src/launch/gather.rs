//! Equal output of many ranks, kept once.
//!
//! A rank's output so far is the beginning of a document. As long as its next bytes agree with the document (or extend
//! it) nothing is stored; where they differ, the rank gets a document of its own. 1,024 ranks that say the same cost
//! the memory of one.

use std::collections::HashMap;

/// Documents tried for a rank that left its own, newest first: bounds the time when all outputs differ.
const CANDIDATES: usize = 16;

/// How much of which document a rank has said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Said {
    document: usize,
    len: usize,
}

/// The output of all ranks on one stream.
#[derive(Debug)]
pub(super) struct Gather {
    documents: Vec<Vec<u8>>,
    said: Vec<Said>,
    stored: usize,
}

impl Gather {
    pub(super) fn new(ranks: u32) -> Self {
        Gather { documents: Vec::new(), said: vec![Said::default(); ranks as usize], stored: 0 }
    }

    /// Bytes kept.
    pub(super) fn stored(&self) -> usize {
        self.stored
    }

    /// The next bytes of `rank`, which must be below the number of ranks.
    pub(super) fn add(&mut self, rank: u32, bytes: &[u8]) {
        let at = self.said[rank as usize];
        let beginning = self.documents.get(at.document).map_or(&[][..], |text| &text[..at.len]);
        let agrees = |&document: &usize| {
            let text = &self.documents[document];
            let Some(tail) = text.get(at.len..) else { return false };
            let common = tail.len().min(bytes.len());
            tail[..common] == bytes[..common] && (document == at.document || text[..at.len] == *beginning)
        };
        let own = (at.len > 0).then_some(at.document);
        let newest = (0..self.documents.len()).rev().take(CANDIDATES);
        let document = match own.into_iter().chain(newest).find(agrees) {
            Some(document) => document,
            None => {
                let beginning = beginning.to_vec();
                self.stored += beginning.len();
                self.documents.push(beginning);
                self.documents.len() - 1
            }
        };
        let text = &mut self.documents[document];
        let news = bytes.get(text.len() - at.len..).unwrap_or_default();
        text.extend_from_slice(news);
        self.stored += news.len();
        self.said[rank as usize] = Said { document, len: at.len + bytes.len() };
    }

    /// The different outputs with the ranks that said them (ascending), in order of their first rank. Ranks that said
    /// nothing are left out.
    pub(super) fn groups(&self) -> Vec<(Vec<u32>, &[u8])> {
        let mut by_place: HashMap<Said, Vec<u32>> = HashMap::new();
        for (rank, &said) in self.said.iter().enumerate().filter(|(_, said)| said.len > 0) {
            by_place.entry(said).or_default().push(rank as u32);
        }
        let mut by_text: HashMap<&[u8], Vec<u32>> = HashMap::new();
        for (said, mut ranks) in by_place {
            by_text.entry(&self.documents[said.document][..said.len]).or_default().append(&mut ranks);
        }
        let mut groups: Vec<_> = by_text.into_iter().map(|(text, ranks)| (ranks, text)).collect();
        groups.iter_mut().for_each(|(ranks, _)| ranks.sort_unstable());
        groups.sort_unstable();
        groups
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn equal_output_is_kept_once() {
        let mut gather = Gather::new(1000);
        for part in [&b"hello "[..], b"world\n"] {
            (0..1000).for_each(|rank| gather.add(rank, part));
        }
        assert_eq!(gather.stored(), 12);
        assert_eq!(gather.groups(), [((0..1000).collect(), &b"hello world\n"[..])]);
    }

    proptest! {
        #[test]
        fn nothing_is_mixed_up(parts in prop::collection::vec((0u32..5, "[ab]{0,3}"), 0..60)) {
            let mut gather = Gather::new(5);
            let mut expected = vec![Vec::new(); 5];
            for (rank, part) in &parts {
                gather.add(*rank, part.as_bytes());
                expected[*rank as usize].extend_from_slice(part.as_bytes());
            }
            let groups = gather.groups();
            for (rank, text) in expected.iter().enumerate() {
                let mine: Vec<_> = groups.iter().filter(|(ranks, _)| ranks.contains(&(rank as u32))).collect();
                prop_assert_eq!(mine.len(), usize::from(!text.is_empty()));
                prop_assert!(mine.iter().all(|(_, said)| said == text));
            }
            let mut texts: Vec<_> = groups.iter().map(|(_, text)| *text).collect();
            texts.sort_unstable();
            texts.dedup();
            prop_assert_eq!(texts.len(), groups.len());
        }
    }
}
