//! Text from ids, one by one, never half a character.
//!
//! Bytes are kept back until they are whole characters. What can never become one is shown as
//! U+FFFD, so that all pieces together are what [`Tokenizer::decode`] says of all ids together.

use super::{Codec, Special, Tokenizer};
use std::ops::Deref;

/// Ids of a foreign tokenizer that are decoded again with each new one, at most.
const N_CONTEXT_MAX: usize = 32;
/// The same where they cannot be decoded without those before them.
const N_KEPT_MAX: usize = 1024;

/// Decodes ids as they come; `T` is a reference or an `Arc`.
pub struct Stream<T> {
    tokenizer: T,
    special: Special,
    /// Bytes that are no whole character yet.
    pending: Vec<u8>,
    /// Whether nothing has been shown yet.
    is_first: bool,
    /// For foreign tokenizers: the last ids, and how much of their text has been shown.
    context: Vec<u32>,
    n_shown: usize,
}

impl<T: Deref<Target = Tokenizer>> Stream<T> {
    /// From the beginning of a text and without special tokens.
    pub fn new(tokenizer: T) -> Stream<T> {
        Stream {
            tokenizer,
            special: Special::Plain,
            pending: Vec::new(),
            is_first: true,
            context: Vec::new(),
            n_shown: 0,
        }
    }

    /// Shows special tokens or drops them, which is what it does unless told.
    pub fn showing(mut self, special: Special) -> Stream<T> {
        self.special = special;
        self
    }

    /// Continues a text that ends with `ids`: a first space is then text.
    pub fn after(mut self, ids: &[u32]) -> Stream<T> {
        self.is_first &= ids.is_empty();
        if let Codec::Foreign(foreign) = &self.tokenizer.codec {
            self.context = ids[ids.len().saturating_sub(N_CONTEXT_MAX / 2)..].to_vec();
            self.n_shown = foreign.decode(&self.context, self.special).len();
        }
        self
    }

    /// Takes an id and returns the whole characters there are now.
    pub fn push(&mut self, id: u32) -> String {
        if let Codec::Foreign(_) = self.tokenizer.codec {
            self.context.push(id);
            return self.foreign();
        }
        if self.special == Special::Plain && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.tokenizer.tokens.push_bytes(id, &mut self.pending);
        if self.is_first && !self.pending.is_empty() {
            self.is_first = false;
            if self.tokenizer.strips_space && self.pending[0] == b' ' {
                self.pending.remove(0);
            }
        }
        whole_characters(&mut self.pending)
    }

    /// Returns what is left: half characters as U+FFFD.
    pub fn finish(self) -> String {
        match &self.tokenizer.codec {
            Codec::Foreign(foreign) => {
                let text = foreign.decode(&self.context, self.special);
                text.get(self.n_shown..).unwrap_or("").to_string()
            }
            Codec::Own(_) => String::from_utf8_lossy(&self.pending).into_owned(),
        }
    }

    /// Decodes the context again and returns what is new; the crate decodes lists, not bytes.
    fn foreign(&mut self) -> String {
        let Codec::Foreign(foreign) = &self.tokenizer.codec else { return String::new() };
        let text = foreign.decode(&self.context, self.special);
        // Half a character shows as U+FFFD at the end; the next id may complete it.
        if text.ends_with('\u{fffd}') {
            return String::new();
        }
        let new = text.get(self.n_shown..).unwrap_or("").to_string();
        self.n_shown = text.len();
        if self.context.len() > N_CONTEXT_MAX {
            // The first ids are forgotten unless the others need them, as bytes of a run may.
            let rest = &self.context[N_CONTEXT_MAX / 2..];
            let rest_text = foreign.decode(rest, self.special);
            if text.ends_with(&rest_text) || self.context.len() > N_KEPT_MAX {
                self.n_shown = rest_text.len();
                self.context = rest.to_vec();
            }
        }
        new
    }
}

/// Takes whole characters from the front of `bytes`, and U+FFFD for what cannot become one.
fn whole_characters(bytes: &mut Vec<u8>) -> String {
    let bad = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let is_half = std::str::from_utf8(bad).is_err_and(|error| error.error_len().is_none());
    let n_done = bytes.len() - if is_half { bad.len() } else { 0 };
    let text = String::from_utf8_lossy(&bytes[..n_done]).into_owned();
    bytes.drain(..n_done);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_what_the_whole_would_be() {
        let text = "aé中🚀".as_bytes();
        let broken = [text, &[0xff, b'x', 0xe4, 0xb8, b'y', 0xf0, 0x9f], text, &[0xc3]].concat();
        let mut pending = Vec::new();
        let mut got = String::new();
        for byte in &broken {
            pending.push(*byte);
            got += &whole_characters(&mut pending);
        }
        got += &String::from_utf8_lossy(&pending);
        assert_eq!(got, String::from_utf8_lossy(&broken));
    }
}
