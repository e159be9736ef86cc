//! How much of a file is shown to a model that fills a hole in it.
//!
//! What is before the hole may be long, and the model reads it anew unless it begins with the same
//! tokens as the last time. A window that slid with the cursor would begin differently each time.
//! So the beginning of the window is tied to the text: of all lines where it may begin, between one
//! half and the whole of the tokens that are allowed, it is the one with the smallest hash. While
//! the cursor moves on, that stays the same line until it falls out at the far end; what is typed
//! above the window does not move it, nor what is typed below it.
//!
//! A line is hashed with the two after it, because lines like `}` are many.

use elapid::{Result, Special, Tokenizer};

/// Bytes that are looked at for each token that is allowed. A token of more bytes than this, on
/// average, is white space or a line of dashes.
const N_BYTE_PER_TOKEN: usize = 16;

/// The ids of the end of `text`, at most `n_max`, and whether something was left out.
pub fn before(tokenizer: &Tokenizer, text: &str, n_max: usize) -> Result<(Vec<u32>, bool)> {
    let near = near_end(text, n_max.saturating_mul(N_BYTE_PER_TOKEN));
    let all = tokenizer.encode(near, Special::Plain)?;
    if all.len() <= n_max && near.len() == text.len() {
        return Ok((all, false));
    }
    let (low, high) = byte_range(tokenizer, &all, near.len(), n_max);
    if let Some(at) = anchor(near, low, high) {
        let ids = tokenizer.encode(&near[at..], Special::Plain)?;
        if ids.len() <= n_max {
            return Ok((ids, true));
        }
    }
    // One endless line, or a tokenizer that cuts the end alone into more tokens than within all.
    let step = (n_max / 4).max(1);
    let n_cut = all.len().saturating_sub(n_max).div_ceil(step) * step;
    Ok((all[n_cut.min(all.len())..].to_vec(), true))
}

/// The ids of the beginning of `text`, at most `n_max`, and whether something was left out.
pub fn after(tokenizer: &Tokenizer, text: &str, n_max: usize) -> Result<(Vec<u32>, bool)> {
    let mut n_bytes = text.len().min(n_max.saturating_mul(N_BYTE_PER_TOKEN));
    while !text.is_char_boundary(n_bytes) {
        n_bytes -= 1;
    }
    let mut ids = tokenizer.encode(&text[..n_bytes], Special::Plain)?;
    let is_cut = ids.len() > n_max || n_bytes < text.len();
    ids.truncate(n_max);
    Ok((ids, is_cut))
}

/// The last bytes of a text, about `n_bytes`, from the start of a line where there is one.
fn near_end(text: &str, n_bytes: usize) -> &str {
    let mut at = text.len().saturating_sub(n_bytes);
    while !text.is_char_boundary(at) {
        at += 1;
    }
    if at == 0 {
        return text;
    }
    let rest = &text[at..];
    rest.find('\n').map_or(rest, |line| &rest[line + 1..])
}

/// Bytes of the text whose tokens number at most `n_max` to its end, and at most half as many.
fn byte_range(tokenizer: &Tokenizer, ids: &[u32], n_bytes: usize, n_max: usize) -> (usize, usize) {
    let size = |id: &u32| tokenizer.bytes(*id).map_or(0, |bytes| bytes.len());
    let left = |n: usize| n_bytes.saturating_sub(ids.iter().rev().take(n).map(size).sum());
    let half = n_max.div_ceil(2);
    (left(n_max), if ids.len() < half { n_bytes } else { left(half) })
}

/// The start of the line with the smallest hash in this range of bytes.
fn anchor(text: &str, low: usize, high: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    // A blank line, or the end, is nothing to know a place by.
    let begins = |at: &usize| {
        (*at == 0 || bytes[at - 1] == b'\n') && bytes.get(*at).is_some_and(|byte| *byte != b'\n')
    };
    let lines = |at: &usize| bytes[*at..].split(|byte| *byte == b'\n').take(3);
    (low..=high).filter(begins).min_by_key(|at| hash(lines(at)))
}

/// FNV-1a, mixed once more: its high bits decide.
fn hash<'a>(lines: impl Iterator<Item = &'a [u8]>) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for line in lines {
        for byte in line.iter().chain(b"\n") {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash ^= hash >> 32;
    hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elapid::BpeTrainer;

    fn tokenizer() -> Tokenizer {
        let trainer = BpeTrainer { n_vocab: 300, min_count: 2, specials: Vec::new() };
        let text = file(50);
        let mut texts = [text.as_str()].into_iter();
        Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {}).unwrap()
    }

    fn line(n: usize) -> String {
        match n % 7 {
            0 => "}\n".into(),
            1 => "\n".into(),
            _ => format!("    let value_{n} = compute({});\n", n * n % 97),
        }
    }

    fn file(n_lines: usize) -> String {
        (0..n_lines).map(line).collect()
    }

    /// The texts of windows as the cursor goes down a file, line by line.
    fn windows(tokenizer: &Tokenizer, text: &str, n_max: usize) -> Vec<String> {
        let ends = text.char_indices().filter(|(_, ch)| *ch == '\n').map(|(at, _)| at + 1);
        ends.map(|end| {
            let (ids, _) = before(tokenizer, &text[..end], n_max).unwrap();
            assert!(ids.len() <= n_max);
            tokenizer.decode(&ids, Special::Plain)
        })
        .collect()
    }

    #[test]
    fn a_text_that_fits_is_kept_whole() {
        let tokenizer = tokenizer();
        let (ids, is_cut) = before(&tokenizer, "let a;\nlet b;\n", 100).unwrap();
        assert_eq!(tokenizer.decode(&ids, Special::Plain), "let a;\nlet b;\n");
        assert!(!is_cut);
        assert_eq!(before(&tokenizer, "", 100).unwrap(), (Vec::new(), false));
    }

    #[test]
    fn the_begin_of_the_window_moves_in_large_steps() {
        let tokenizer = tokenizer();
        let (text, n_max) = (file(600), 400);
        let windows = windows(&tokenizer, &text, n_max);
        let begin = |window: &String| text.find(window.as_str()).unwrap();
        let mut n_moves = 0;
        for pair in windows.windows(2) {
            n_moves += usize::from(begin(&pair[0]) != begin(&pair[1]));
            assert!(begin(&pair[0]) <= begin(&pair[1]), "it never goes back");
        }
        // About a quarter of a window each time.
        let n_tok = tokenizer.encode(&text, Special::Plain).unwrap().len();
        assert!(n_moves <= 10 * n_tok / n_max, "{n_moves} moves in {n_tok} tokens");
        for window in &windows[300..] {
            let n = tokenizer.encode(window, Special::Plain).unwrap().len();
            assert!((n_max / 2 - 2..=n_max).contains(&n), "{n}");
        }
    }

    #[test]
    fn what_is_typed_above_the_window_does_not_move_it() {
        let tokenizer = tokenizer();
        let text = file(600);
        let plain = before(&tokenizer, &text, 400).unwrap();
        let edited = format!("// a new line\n{}", text.replacen("value_9 ", "other ", 1));
        assert_eq!(before(&tokenizer, &edited, 400).unwrap(), plain);
    }

    #[test]
    fn a_line_without_end_is_cut_by_tokens() {
        let tokenizer = tokenizer();
        let text = "abc ".repeat(2000);
        let (ids, is_cut) = before(&tokenizer, &text, 100).unwrap();
        assert!(is_cut && (50..=100).contains(&ids.len()), "{}", ids.len());
        let (ids, is_cut) = after(&tokenizer, &text, 100).unwrap();
        assert!(is_cut && ids.len() == 100);
        assert_eq!(before(&tokenizer, &text, 0).unwrap(), (Vec::new(), true));
    }
}
