//! Texts that end an answer, and never show.
//!
//! For each stop text the longest beginning of it that the answer ends with is known, byte by byte
//! (Knuth, Morris and Pratt, 1977). As much of the answer is held back as the longest of them: it
//! may yet become a stop. The stop that is complete first ends the answer; of several that end
//! with the same byte, the longest. What comes out depends on the text, not on how it was cut.
//!
//! Both are UTF-8, so a stop that matches begins and ends between characters.

pub(super) struct Stops {
    list: Vec<Stop>,
    /// What the longest beginning of a stop holds back.
    held: String,
}

struct Stop {
    text: String,
    /// For each beginning of the text, from one byte on: the longest shorter one it ends with.
    borders: Vec<usize>,
    /// Bytes of the text that the answer ends with.
    n_matched: usize,
}

/// What is known of a text so far.
#[derive(Debug, PartialEq)]
pub(super) enum Seen {
    /// This much more of it is certain.
    Text(String),
    /// This much more, and then came this stop.
    Stop(String, String),
}

impl Stop {
    fn new(text: &str) -> Stop {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len()];
        for at in 1..bytes.len() {
            borders[at] = follow(bytes, &borders, borders[at - 1], bytes[at]);
        }
        Stop { text: text.into(), borders, n_matched: 0 }
    }

    /// Takes a byte; whether the stop is complete.
    fn push(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        self.n_matched = follow(bytes, &self.borders, self.n_matched, byte);
        self.n_matched == bytes.len()
    }
}

/// The bytes matched when `n` were and another comes; `n` is less than all.
fn follow(bytes: &[u8], borders: &[usize], mut n: usize, byte: u8) -> usize {
    while n > 0 && bytes[n] != byte {
        n = borders[n - 1];
    }
    n + usize::from(bytes[n] == byte)
}

impl Stops {
    /// Stops at these; empty texts stop nothing.
    pub(super) fn new(texts: &[String]) -> Stops {
        let texts = texts.iter().filter(|text| !text.is_empty());
        Stops { list: texts.map(|text| Stop::new(text)).collect(), held: String::new() }
    }

    /// Takes more text; nothing may follow a stop.
    pub(super) fn push(&mut self, text: &str) -> Seen {
        let n_before = self.held.len();
        self.held.push_str(text);
        for (idx, byte) in text.bytes().enumerate() {
            // Every stop takes every byte, so that the longest of those that end here is known.
            let complete = self.list.iter_mut().filter_map(|stop| {
                let is_complete = stop.push(byte);
                is_complete.then(|| stop.text.clone())
            });
            if let Some(stop) = complete.max_by_key(String::len) {
                self.held.truncate(n_before + idx + 1 - stop.len());
                return Seen::Stop(std::mem::take(&mut self.held), stop);
            }
        }
        let n_held = self.list.iter().map(|stop| stop.n_matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - n_held);
        Seen::Text(std::mem::replace(&mut self.held, rest))
    }

    /// The text is over: what was held back belongs to it.
    pub(super) fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::rng::Rng;

    /// The text before the first stop to be complete, and that stop, looked for in the plain way.
    fn naive(text: &str, stops: &[String]) -> (String, Option<String>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let ends = stops.iter().filter(|stop| !stop.is_empty());
            let ends = ends.filter(|stop| text[..end].ends_with(stop.as_str()));
            if let Some(stop) = ends.max_by_key(|stop| stop.len()) {
                return (text[..end - stop.len()].into(), Some(stop.clone()));
            }
        }
        (text.into(), None)
    }

    /// How much of the end of `text` may yet become a stop.
    fn n_held(text: &str, stops: &[String]) -> usize {
        let starts =
            stops.iter().flat_map(|stop| (0..stop.len()).map(move |n| &stop.as_bytes()[..n]));
        starts.filter(|start| text.as_bytes().ends_with(start)).map(<[u8]>::len).max().unwrap_or(0)
    }

    fn random(rng: &Rng, from: u64, n_max: u64) -> String {
        let n = rng.below(from, n_max + 1);
        (0..n)
            .map(|n| ["a", "b", "\u{e9}", "\u{e8}"][rng.below(from + 1 + n, 4) as usize])
            .collect()
    }

    #[test]
    fn any_text_in_any_pieces_shows_what_a_plain_search_leaves_and_no_more_too_soon() {
        for case in 0..3000 {
            let rng = Rng::new(case, 1);
            let text = random(&rng, 0, 24);
            let stops: Vec<String> = (0..3).map(|n| random(&rng, 100 + 20 * n, 5)).collect();
            let (want, want_stop) = naive(&text, &stops);
            let (mut looker, mut shown, mut got_stop) = (Stops::new(&stops), String::new(), None);
            let (mut rest, mut read) = (&text[..], 0);
            while !rest.is_empty() && got_stop.is_none() {
                let n = 1 + rng.below(200 + rest.len() as u64, 4) as usize;
                let n = rest.char_indices().nth(n).map_or(rest.len(), |it| it.0);
                let (piece, after) = rest.split_at(n);
                (rest, read) = (after, read + n);
                match looker.push(piece) {
                    Seen::Text(more) => {
                        shown += &more;
                        let held = n_held(&text[..read], &stops);
                        assert_eq!(shown, text[..read - held], "{text:?} {stops:?}");
                    }
                    Seen::Stop(more, stop) => {
                        shown += &more;
                        got_stop = Some(stop);
                    }
                }
            }
            if got_stop.is_none() {
                shown += &looker.finish();
            }
            assert_eq!((shown, got_stop), (want, want_stop), "{text:?} {stops:?}");
        }
    }

    #[test]
    fn a_stop_that_overlaps_itself_is_found_and_long_ones_cost_no_more() {
        let mut stops = Stops::new(&["aabaabaac".into()]);
        assert_eq!(stops.push("xaabaaba"), Seen::Text("x".into()));
        assert_eq!(stops.push("abaac!"), Seen::Stop("aab".into(), "aabaabaac".into()));
        // The square of this length would be felt.
        let long = "a".repeat(1 << 18) + "b";
        let mut stops = Stops::new(std::slice::from_ref(&long));
        for _ in 0..1 << 9 {
            assert_eq!(stops.push(&"a".repeat(1 << 9)), Seen::Text(String::new()));
        }
        assert_eq!(stops.push("ab"), Seen::Stop("a".into(), long));
    }
}
