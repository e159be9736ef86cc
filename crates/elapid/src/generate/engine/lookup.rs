//! Guesses from what was read: the tokens that followed the last few the time before.
//!
//! Code and answers about a text repeat it. Where the last three tokens (or two) occurred before,
//! what followed them there is guessed to follow now; one pass then checks all guesses, at little
//! more than the price of one token, as the weights are read once. Each position draws from its
//! own logits with its own counter, guessed or not, so the answer is the same: a guess that is not
//! what was drawn is dropped, with all behind it. (The same, but for rounding: a pass over several
//! rows may round its logits otherwise than one over a single row, as any batch may.)
//!
//! Guesses that fail cost time, so that their number follows their luck: all right doubles it,
//! none right makes it pause, for longer each time.

/// Lengths of what is looked for, in tokens; the longest that is found counts.
const N_GRAMS: [usize; 2] = [3, 2];
/// Passes without a guess after a row of failures, at most.
const N_PAUSE_MAX: usize = 32;

pub(super) struct Lookup {
    n_max: usize,
    n_next: usize,
    n_failed: u32,
    /// Passes to let go by.
    n_pause: usize,
    /// Guesses made, and how many were right.
    pub(super) n_guessed: usize,
    pub(super) n_accepted: usize,
}

impl Lookup {
    /// At most `n_max` guesses at a time; zero for none.
    pub(super) fn new(n_max: usize) -> Lookup {
        Lookup { n_max, n_next: n_max, n_failed: 0, n_pause: 0, n_guessed: 0, n_accepted: 0 }
    }

    /// What may follow `tokens`, at most `n_room` of it.
    pub(super) fn guess(&mut self, tokens: &[u32], n_room: usize) -> Vec<u32> {
        let n = self.n_next.min(n_room);
        if n == 0 || self.n_pause > 0 {
            self.n_pause = self.n_pause.saturating_sub(1);
            return Vec::new();
        }
        N_GRAMS.iter().find_map(|&n_gram| find(tokens, n_gram, n)).unwrap_or_default()
    }

    /// Hears how many of the guesses were right.
    pub(super) fn learn(&mut self, n_guessed: usize, n_accepted: usize) {
        if n_guessed == 0 {
            return;
        }
        self.n_guessed += n_guessed;
        self.n_accepted += n_accepted;
        if n_accepted == 0 {
            self.n_failed += 1;
            self.n_pause = (1 << self.n_failed.min(16)).min(N_PAUSE_MAX);
            self.n_next = 1.max(self.n_next / 2);
            return;
        }
        self.n_failed = 0;
        self.n_next = match n_accepted == n_guessed {
            true => 2 * self.n_next,
            false => n_accepted + 1,
        };
        self.n_next = self.n_next.min(self.n_max);
    }
}

/// What followed the last `n_gram` tokens where they last occurred before; where that reaches the
/// end it goes round.
fn find(tokens: &[u32], n_gram: usize, n: usize) -> Option<Vec<u32>> {
    let (before, tail) = tokens.split_at_checked(tokens.len().checked_sub(n_gram)?)?;
    let at = (0..before.len()).rev().find(|&at| tokens[at..at + n_gram] == *tail)?;
    let mut guess: Vec<u32> = Vec::with_capacity(n);
    for idx in at + n_gram..at + n_gram + n {
        guess.push(tokens.get(idx).copied().unwrap_or_else(|| guess[idx - tokens.len()]));
    }
    Some(guess)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_place_of_the_longest_match_is_gone_on_from() {
        let mut lookup = Lookup::new(4);
        assert_eq!(lookup.guess(&[1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], 9), [9, 8, 7, 6]);
        assert_eq!(lookup.guess(&[1, 2, 3, 9, 4, 2, 3, 5, 1, 2, 3], 2), [9, 4], "three before two");
        assert_eq!(lookup.guess(&[2, 3, 9, 2, 3, 5, 1, 2, 3], 3), [5, 1, 2], "the latest");
        assert_eq!(lookup.guess(&[7, 1, 2, 1, 2], 4), [1, 2, 1, 2], "round and round");
        assert_eq!(lookup.guess(&[4, 4, 4], 4), [4; 4]);
        for tokens in [&[][..], &[1], &[1, 2], &[1, 2, 3, 4]] {
            assert!(lookup.guess(tokens, 4).is_empty(), "{tokens:?}");
        }
        assert!(Lookup::new(0).guess(&[1, 1, 1, 1], 4).is_empty());
    }

    #[test]
    fn luck_decides_how_much_is_guessed() {
        let same = [5; 40];
        let mut lookup = Lookup::new(8);
        assert_eq!(lookup.guess(&same, 99).len(), 8);
        lookup.learn(8, 2);
        assert_eq!(lookup.guess(&same, 99).len(), 3, "one more than were right");
        lookup.learn(3, 3);
        assert_eq!(lookup.guess(&same, 99).len(), 6);
        lookup.learn(6, 6);
        assert_eq!(lookup.guess(&same, 99).len(), 8, "never more than were asked for");
        let mut pauses = Vec::new();
        for _ in 0..7 {
            lookup.learn(8, 0);
            let n = (0..).take_while(|_| lookup.guess(&same, 99).is_empty()).count();
            pauses.push(n);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 32, 32]);
        assert_eq!((lookup.n_guessed, lookup.n_accepted), (73, 11));
    }
}
