//! The prompt of a hole in a file: what is shown of the file, and of others of its project.
//!
//!     REPO project  SEP path  other file ...  SEP path of this file
//!     PRE prefix SUF suffix MID           or as the family of the model has it
//!
//! Tokens of the context are dealt out as follows, whatever a request asks for: a budget that
//! depended on the length of the answer would give a warm-up (`n_predict: 0`) another prompt than
//! the request that it warms up for, and one that depended on the prefix another with every key.
//!
//! | part    | tokens at most                                                         |
//! |---------|------------------------------------------------------------------------|
//! | answer  | an eighth is kept free                                                 |
//! | suffix  | an eighth, and `n_suffix` (256 where nobody says)                      |
//! | prefix  | five eighths, and `n_prefix`; three beside files picked by the index   |
//! | others  | what is left; of picked files at most 1024                             |
//!
//! Files that a client sends are cut at the front, as llama.cpp does; picked ones are omitted as a
//! whole, the least relevant first, so that the model sees the layout that it was trained on.

use super::window;
use elapid::{FimContext, FimFile, FimTokens, Result, Special, Tokenizer};

/// Tokens of the suffix where nobody says: they are read anew with every key that is pressed.
const N_SUFFIX: usize = 256;

/// Tokens of picked files: more cost more time than they are worth.
const N_PICKED_MAX: usize = 1024;

/// Bytes of code in a token, rather too few than too many.
const BYTES_PER_TOKEN: usize = 3;

/// Where the other files come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// The client chose them.
    Sent,
    /// The index of the project did.
    Picked,
}

pub struct Hole<'a> {
    pub prefix: &'a str,
    pub suffix: &'a str,
    pub n_prefix: Option<usize>,
    pub n_suffix: Option<usize>,
    pub repo: &'a str,
    pub path: &'a str,
    /// The most relevant last.
    pub files: Vec<FimFile<'a>>,
    pub others: Others,
}

pub struct Laid {
    pub ids: Vec<u32>,
    /// Whether something was left out of the file itself.
    pub is_cut: bool,
    pub shown: Vec<Counted>,
}

/// A picked file that is shown, and its tokens.
pub type Counted = (String, usize);

/// Tokens that picked files may take of a context of `n_ctx`.
pub fn n_picked(n_ctx: usize) -> usize {
    (n_ctx / 8 * 3).min(N_PICKED_MAX)
}

/// Bytes that the index may pick for a context of `n_ctx` tokens.
pub fn picked_bytes(n_ctx: usize) -> usize {
    n_picked(n_ctx) * BYTES_PER_TOKEN
}

impl Hole<'_> {
    pub fn prompt(&self, tokenizer: &Tokenizer, fim: &FimTokens, n_ctx: usize) -> Result<Laid> {
        let eighth = n_ctx / 8;
        let n_prefix = if self.others == Others::Sent { 5 * eighth } else { 3 * eighth };
        let n_suffix = self.n_suffix.unwrap_or(N_SUFFIX).min(eighth);
        let n_prefix = self.n_prefix.unwrap_or(usize::MAX).min(n_prefix);
        let (suffix, suffix_is_cut) = window::after(tokenizer, self.suffix, n_suffix)?;
        let (prefix, prefix_is_cut) = window::before(tokenizer, self.prefix, n_prefix)?;
        let begin = tokenizer.begin();
        // Marks, and what the parts above may take at most, so that nothing here depends on them.
        let n_left = n_ctx.saturating_sub(begin.len() + 3 + eighth + n_suffix + n_prefix);
        let (context, shown) = match self.others {
            Others::Sent => {
                let context = FimContext {
                    repo: self.repo,
                    path: self.path,
                    files: self.files.clone(),
                    n_tok_max: n_left,
                };
                (encoded(tokenizer, fim, &context)?, Vec::new())
            }
            Others::Picked => self.picked(tokenizer, fim, n_left.min(n_picked(n_ctx)))?,
        };
        let laid_out = fim.layout(fim.style, &prefix, &suffix);
        let ids = [begin, &context, &laid_out].concat();
        Ok(Laid { ids, is_cut: prefix_is_cut || suffix_is_cut, shown })
    }

    /// What goes before the prompt, in at most `n_max` tokens; the files of it, with their tokens.
    pub fn picked(
        &self,
        tokenizer: &Tokenizer,
        fim: &FimTokens,
        n_max: usize,
    ) -> Result<(Vec<u32>, Vec<Counted>)> {
        let context = |first: usize, n_tok_max| FimContext {
            repo: self.repo,
            path: self.path,
            files: self.files[first..].to_vec(),
            n_tok_max,
        };
        let count = |first| Ok(encoded(tokenizer, fim, &context(first, usize::MAX))?.len());
        let counts = (0..=self.files.len()).map(count).collect::<Result<Vec<usize>>>()?;
        let first = counts.iter().position(|n| *n <= n_max).unwrap_or(self.files.len());
        let shown = (first..self.files.len())
            .map(|n| (self.files[n].path.to_string(), counts[n] - counts[n + 1]));
        Ok((encoded(tokenizer, fim, &context(first, n_max))?, shown.collect()))
    }
}

fn encoded(tokenizer: &Tokenizer, fim: &FimTokens, context: &FimContext<'_>) -> Result<Vec<u32>> {
    let mut error = None;
    let mut encode = |text: &str| {
        tokenizer.encode(text, Special::Plain).unwrap_or_else(|problem| {
            error = Some(problem);
            Vec::new()
        })
    };
    let ids = fim.context(context, &mut encode);
    error.map_or(Ok(ids), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elapid::BpeTrainer;

    const SPECIALS: [&str; 5] =
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"];

    fn tokenizer() -> Tokenizer {
        let specials = SPECIALS.iter().map(|token| token.to_string()).collect();
        let trainer = BpeTrainer { n_vocab: 300, min_count: 2, specials };
        let mut texts = ["fn main() {}\n"].into_iter();
        Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {}).unwrap()
    }

    fn hole<'a>(files: &[(&'a str, &'a str)]) -> Hole<'a> {
        Hole {
            prefix: "fn a() {\n",
            suffix: "\n}\n",
            n_prefix: None,
            n_suffix: None,
            repo: "shop",
            path: "src/a.rs",
            files: files.iter().map(|(path, text)| FimFile { path, text }).collect(),
            others: Others::Picked,
        }
    }

    #[test]
    fn a_prompt_has_the_layout_of_training() {
        let tokenizer = tokenizer();
        let fim = tokenizer.fim().unwrap();
        let laid = hole(&[("b.rs", "b();\n"), ("c.rs", "c();\n")]);
        let laid = laid.prompt(&tokenizer, &fim, 4096).unwrap();
        let want = "<|repo_name|>shop\n<|file_sep|>b.rs\nb();\n<|file_sep|>c.rs\nc();\n\
            <|file_sep|>src/a.rs\n<|fim_prefix|>fn a() {\n<|fim_suffix|>\n}\n<|fim_middle|>";
        assert_eq!(tokenizer.decode(&laid.ids, Special::Parse), want);
        assert_eq!(laid.shown[0].0, "b.rs");
        let n_b = tokenizer.encode("b.rs\nb();\n", Special::Plain).unwrap().len() + 1;
        assert!(laid.shown[0].1.abs_diff(n_b) <= 1, "{:?}", laid.shown);
        assert!(!laid.is_cut);
    }

    #[test]
    fn picked_files_that_do_not_fit_are_omitted_whole_from_the_front() {
        let tokenizer = tokenizer();
        let fim = tokenizer.fim().unwrap();
        let long = "let value = 12345;\n".repeat(30);
        let hole = hole(&[("long.rs", &long), ("c.rs", "c();\n")]);
        let laid = hole.prompt(&tokenizer, &fim, 400).unwrap();
        let text = tokenizer.decode(&laid.ids, Special::Parse);
        assert!(text.starts_with("<|repo_name|>shop\n<|file_sep|>c.rs\n"), "{text}");
        assert_eq!(laid.shown.len(), 1);
        assert!(laid.ids.len() <= 400);
    }
}
