//! SentencePiece vocabularies: joins from scores, scores from joins.
//!
//! SentencePiece has no list of joins. Two neighbours join if their texts together are a token;
//! the token of the highest score goes first, of equals the leftmost. That is the same as a list
//! of all ways to cut each token in two, ranked by the token's score, equal scores equal ranks.
//!
//! A token may need a character that is no token itself: it gets a virtual symbol, which stands
//! for its bytes wherever it stays alone.

use std::collections::HashSet;

use super::bpe::{FoldMap, Merges};
use super::encoder::{Prefix, Spaces};
use super::tokens::{SPACE_MARK, Tokens};

/// Tokens longer than this are found in text only as special ones: trying every cut of a token of
/// a megabyte would take an hour.
const LEN_MAX: usize = 1024;

/// The token of each byte: `<0x0A>`, or the byte itself.
fn byte_tokens(tokens: &Tokens) -> Vec<Option<u32>> {
    let find = |byte: u8| {
        let name = format!("<0x{byte:02X}>");
        tokens.find(name.as_bytes()).or_else(|| tokens.find(&[byte]))
    };
    (0..=255).map(find).collect()
}

/// Characters that stand before a U+2581 inside a token.
pub(super) fn glue(tokens: &Tokens) -> Vec<char> {
    let mut glue: Vec<char> = Vec::new();
    for id in 0..tokens.len() as u32 {
        let Ok(text) = std::str::from_utf8(tokens.text(id)) else { continue };
        for (at, _) in text.match_indices(SPACE_MARK) {
            let before = text[..at].chars().next_back().filter(|letter| *letter != SPACE_MARK);
            glue.extend(before.filter(|letter| !glue.contains(letter)));
        }
    }
    glue
}

/// The single letter of a text that has one.
pub(super) fn only_char(text: &str) -> Option<char> {
    let mut letters = text.chars();
    letters.next().filter(|_| letters.next().is_none())
}

/// The symbols of single characters that are tokens.
pub(super) fn char_symbols(tokens: &Tokens) -> FoldMap<u64, u32> {
    let mut symbols = FoldMap::default();
    for id in 0..tokens.len() as u32 {
        let text = tokens.text(id);
        if let Some(letter) = std::str::from_utf8(text).ok().and_then(only_char)
            && let Some(id) = tokens.find(text)
        {
            symbols.insert(u64::from(letter), id);
        }
    }
    symbols
}

/// Ranks by descending score; equal scores have equal ranks, what is no number comes last.
fn ranks(scores: &[f32]) -> Vec<u32> {
    let clean = |score: &f32| if score.is_nan() { f32::NEG_INFINITY } else { *score + 0.0 };
    let mut sorted: Vec<f32> = scores.iter().map(clean).collect();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted.dedup();
    let rank = |score: &f32| sorted.partition_point(|other| *other > clean(score)) as u32;
    scores.iter().map(rank).collect()
}

/// Every way to cut a token of the vocabulary in two parts, as (left, right, token).
///
/// `single` is asked for the symbol of a part that is one character.
pub(super) fn cuts(
    tokens: &Tokens,
    mut single: impl FnMut(char) -> Option<u32>,
) -> Vec<(u32, u32, u32)> {
    let mut list = Vec::new();
    let lens: HashSet<usize> = (0..tokens.len() as u32).map(|id| tokens.text(id).len()).collect();
    for id in 0..tokens.len() as u32 {
        let text = tokens.text(id);
        if text.len() > LEN_MAX || tokens.find(text) != Some(id) {
            continue;
        }
        let Ok(text) = std::str::from_utf8(text) else { continue };
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            let mut part = |part: &str| match only_char(part) {
                Some(letter) => single(letter),
                None if lens.contains(&part.len()) => tokens.find(part.as_bytes()),
                None => None,
            };
            if let (Some(left), Some(right)) = (part(left), part(right)) {
                list.push((left, right, id));
            }
        }
    }
    list
}

/// The symbols, joins and virtual symbols of a vocabulary with scores.
pub(super) fn from_scores(tokens: &Tokens, scores: &[f32]) -> (Spaces, Merges, Vec<Vec<u32>>) {
    let ranks = ranks(&scores[..tokens.len()]);
    let bytes = byte_tokens(tokens);
    let mut symbols = char_symbols(tokens);
    let mut virtuals: Vec<Vec<u32>> = Vec::new();
    let cuts = cuts(tokens, |letter| {
        let n_symbols = (tokens.len() + virtuals.len()) as u32;
        let symbol = symbols.entry(u64::from(letter)).or_insert_with(|| {
            let utf8 = letter.encode_utf8(&mut [0; 4]).as_bytes().to_vec();
            virtuals.push(utf8.iter().filter_map(|byte| bytes[usize::from(*byte)]).collect());
            n_symbols
        });
        Some(*symbol)
    });
    let mut merges = Merges::with_capacity(cuts.len());
    for (left, right, id) in cuts {
        merges.insert_first(left, right, ranks[id as usize], id);
    }
    let glue = glue(tokens);
    (Spaces { prefix: Prefix::Each, symbols, bytes, unknown: None, glue }, merges, virtuals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_have_equal_ranks_and_nan_comes_last() {
        assert_eq!(ranks(&[1.0, f32::NAN, 3.0, 1.0, -0.0, 0.0]), [1, 3, 0, 1, 2, 2]);
    }

    #[test]
    fn a_single_letter_is_one_letter() {
        assert_eq!(only_char("é"), Some('é'));
        assert_eq!(only_char(""), None);
        assert_eq!(only_char("ab"), None);
    }
}
