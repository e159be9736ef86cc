//! Words that readers who know PyTorch and llama.cpp would not search for.
//! (tidy: allow words, this is the list)

use crate::source::Source;

/// Files that are read.
pub const EXTENSIONS: &[&str] = &["rs", "md", "html"];

/// A word, and what to say instead. `*` stands for any ending.
pub struct Word {
    pub not: &'static str,
    pub but: &'static str,
}

const fn word(not: &'static str, but: &'static str) -> Word {
    Word { not, but }
}

pub const WORDS: &[Word] = &[
    word("graphics processor*", "GPU"),
    word("the processor*", "the CPU"),
    word("foresee*", "predict"),
    word("the way back", "the backward pass"),
    word("goes on", "resumes or continues"),
    word("go on", "resume or continue"),
    word("leave away", "omit"),
    word("leave it away", "omit it"),
    word("leaves it away", "omits it"),
    word("the begin of", "the start of"),
    word("who asks", "the caller, the client"),
];

/// Files and lines in which `word` is found.
pub fn places(sources: &[Source], word: &Word) -> Vec<String> {
    let sources = sources.iter().filter(|source| !source.allows("words"));
    let places = |source: &Source| -> Vec<String> {
        let lines = lines_with(&source.text, word.not).into_iter();
        lines.map(|line| format!("{}:{line}", source.path)).collect()
    };
    sources.flat_map(places).collect()
}

/// Lines of `text` on which `word` begins, also where the rest is on the next.
pub fn lines_with(text: &str, word: &str) -> Vec<usize> {
    let mut joined = String::with_capacity(text.len());
    let mut starts = Vec::new();
    for line in text.lines() {
        starts.push(joined.len());
        let line = line.trim().trim_start_matches(['/', '!', '*', '#', '>']).trim();
        joined.push_str(&line.to_lowercase());
        joined.push(' ');
    }
    let (word, has_ending) = match word.strip_suffix('*') {
        Some(word) => (word, true),
        None => (word, false),
    };
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let is_found = |at: &usize| {
        let before = joined[..*at].chars().next_back();
        let after = joined[at + word.len()..].chars().next();
        !before.is_some_and(is_letter) && (has_ending || !after.is_some_and(is_letter))
    };
    let found = joined.match_indices(word).map(|found| found.0).filter(is_found);
    found.map(|at| starts.partition_point(|start| *start <= at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_words_in_any_case_and_over_the_ends_of_lines() {
        assert_eq!(lines_with("x\nThe way back", "the way back"), [2]);
        assert_eq!(lines_with("//! a\n/// on the way\n/// back.", "the way back"), [2]);
        assert_eq!(lines_with("graphics processors", "graphics processor*"), [1]);
        assert_eq!(lines_with("it was foreseen", "foresee*"), [1]);
        assert_eq!(lines_with("\"goes on\"; goes on", "goes on"), [1, 1]);
    }

    #[test]
    fn takes_no_part_of_a_word_for_the_word() {
        assert_eq!(lines_with("goes once, cargoes on, goes one", "goes on"), [0; 0]);
        assert_eq!(lines_with("unforeseen", "foresee*"), [0; 0]);
    }
}
