//! Fill in the middle: the tokens a code model marks prefix, suffix and middle with, and how a
//! prompt is laid out with them.
//!
//! ```text
//! prefix first (PSM):  PRE prefix SUF suffix MID
//! suffix first (SPM):  SUF suffix PRE prefix MID
//! ```
//!
//! `FAMILIES` has the spellings of each family.
//!
//! Codestral is suffix first and begins to write right after the prefix. DeepSeek's `hole` stands
//! where the suffix begins, so that it fits the same layout. CodeLlama's SentencePiece puts a
//! space before every text: prefix and suffix are to be encoded without it, or the model sees a
//! space that is not in the file; its middle ends with `▁<EOT>`.
//!
//! A model without these tokens has no layout, and the caller says so.

/// The order of prefix and suffix in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FimStyle {
    Psm,
    Spm,
}

/// Tokens for fill in the middle, by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FimTokens {
    /// Before the prefix.
    pub prefix: u32,
    /// Before the suffix.
    pub suffix: u32,
    /// After both, where the model begins; Codestral has none.
    pub middle: Option<u32>,
    /// Fills a batch in training.
    pub pad: Option<u32>,
    /// Before the name of the repository.
    pub repo: Option<u32>,
    /// Before the path of each file.
    pub sep: Option<u32>,
    /// Ends the middle, where the family has a token of its own for it.
    pub end: Option<u32>,
    /// The order the family was trained for.
    pub style: FimStyle,
}

/// A file that is shown besides the one being edited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FimFile<'a> {
    /// Its path.
    pub path: &'a str,
    /// Its text, or a part of it.
    pub text: &'a str,
}

/// What surrounds the middle: the file itself and others of the repository.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FimContext<'a> {
    /// Name of the repository.
    pub repo: &'a str,
    /// Path of the file being edited.
    pub path: &'a str,
    /// Other files, the most relevant last, nearest to the middle.
    pub files: Vec<FimFile<'a>>,
    /// Tokens the other files may take; the earliest are dropped.
    pub n_tok_max: usize,
}

/// Spellings of prefix, suffix and middle, one family per row.
pub(super) const FAMILIES: [[&str; 3]; 10] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], // Qwen coder, CodeGemma
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],       // StarCoder 1 and 2
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],       // SantaCoder
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], // DeepSeek coder
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],                         // CodeLlama
    ["<PRE>", "<SUF>", "<MID>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"], // GLM
    ["<|prefix|>", "<|suffix|>", "<|middle|>"],                // Falcon-H1 coder
    ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],    // Seed coder
    ["[PREFIX]", "[SUFFIX]", "[MIDDLE]"],                      // Codestral, without a middle
];

const PADS: [&str; 5] = ["<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<[fim-pad]>", "<PAD>"];

const REPOS: [&str; 6] =
    ["<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>", "<fim-repo>", "<REPO>"];

const SEPS: [&str; 3] = ["<|file_sep|>", "<|file_separator|>", "<file_sep>"];

const ENDS: [&str; 2] = ["▁<EOT>", "<EOT>"];

/// Goes before a file where the family has no separator, as llama.cpp writes it.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

impl FimTokens {
    /// The tokens whose ids the file states by role (GGUF: `tokenizer.ggml.fim_pre_token_id` and
    /// so on), then those found by their spelling; `None` when the vocabulary has none.
    ///
    /// Prefix, suffix and middle are found in one family: a vocabulary may hold odd leftovers of
    /// another.
    pub(crate) fn detect(
        lookup: &dyn Fn(&str) -> Option<u32>,
        role: &dyn Fn(&str) -> Option<u32>,
    ) -> Option<FimTokens> {
        let any = |names: &[&str]| names.iter().find_map(|name| lookup(name));
        // Only Codestral does without a middle.
        let found = FAMILIES.map(|family| (family[0], family.map(lookup))).into_iter().find(
            |(family, [prefix, suffix, middle])| {
                prefix.and(*suffix).is_some() && (middle.is_some() || *family == "[PREFIX]")
            },
        );
        let (family, [prefix, suffix, middle]) = found.unwrap_or_default();
        let middle = role("fim_mid").or(middle);
        let is_codellama = family.ends_with("<PRE>");
        Some(FimTokens {
            prefix: role("fim_pre").or(prefix)?,
            suffix: role("fim_suf").or(suffix)?,
            middle,
            pad: role("fim_pad").or_else(|| any(&PADS)),
            repo: role("fim_rep").or_else(|| any(&REPOS)),
            sep: role("fim_sep").or_else(|| any(&SEPS)),
            end: if is_codellama { any(&ENDS) } else { None },
            style: if middle.is_none() { FimStyle::Spm } else { FimStyle::Psm },
        })
    }

    /// Tokens that end a middle besides those that end a text: a model that begins another file
    /// or another hole is done with this one.
    pub fn stops(&self) -> Vec<u32> {
        let more = [self.middle, self.pad, self.repo, self.sep, self.end];
        let mut list = vec![self.prefix, self.suffix];
        list.extend(more.iter().flatten());
        list.sort_unstable();
        list.dedup();
        list
    }

    /// The prompt for what is to stand between `prefix` and `suffix`.
    ///
    /// Without a middle token the suffix comes first whatever `style` says: the model could not
    /// know where the prefix continues.
    pub fn layout(&self, style: FimStyle, prefix: &[u32], suffix: &[u32]) -> Vec<u32> {
        let mut parts = [&[self.prefix], prefix, &[self.suffix], suffix];
        if style == FimStyle::Spm || self.middle.is_none() {
            parts.rotate_left(2);
        }
        let mut ids = parts.concat();
        ids.extend(self.middle);
        ids
    }

    /// What goes before the prompt to show the repository, as llama.cpp's `/infill` lays it out:
    ///
    /// ```text
    /// REPO name \n
    /// SEP path \n text        for each other file
    /// SEP path \n             of the file being edited
    /// ```
    ///
    /// Where the family has no separator, other files are set off by a line of dashes. `encode`
    /// gives the ids of plain text, without special tokens. When all is too long the front is
    /// cut off, so that the last file and the path stay.
    pub fn context(
        &self,
        context: &FimContext<'_>,
        encode: &mut dyn FnMut(&str) -> Vec<u32>,
    ) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut section = |token: Option<u32>, text: &str| {
            ids.extend(token);
            ids.extend(encode(text));
        };
        if self.repo.is_some() {
            section(self.repo, &format!("{}\n", context.repo));
        }
        for file in &context.files {
            match self.sep {
                Some(_) => section(self.sep, &format!("{}\n", file.path)),
                None => section(None, SNIPPET),
            }
            section(None, file.text);
        }
        if self.sep.is_some() {
            section(self.sep, &format!("{}\n", context.path));
        }
        let n_cut = ids.len().saturating_sub(context.n_tok_max);
        ids.drain(..n_cut);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of these tokens, with ids from 100.
    fn detect(vocab: &[&str]) -> Option<FimTokens> {
        detect_with(vocab, &[])
    }

    fn detect_with(vocab: &[&str], roles: &[(&str, u32)]) -> Option<FimTokens> {
        let lookup = |name: &str| {
            let at = vocab.iter().position(|token| *token == name)?;
            Some(100 + at as u32)
        };
        let role = |name: &str| roles.iter().find(|role| role.0 == name).map(|role| role.1);
        FimTokens::detect(&lookup, &role)
    }

    fn encode(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn every_family_is_found_by_its_spelling() {
        for vocab in FAMILIES.iter().filter(|vocab| vocab[0] != "[PREFIX]") {
            let tokens = detect(vocab).unwrap();
            assert_eq!((tokens.prefix, tokens.suffix, tokens.middle), (100, 101, Some(102)));
            assert_eq!(tokens.style, FimStyle::Psm);
            assert_eq!(tokens.layout(FimStyle::Psm, &[1, 2], &[3]), [100, 1, 2, 101, 3, 102]);
            assert_eq!(tokens.layout(FimStyle::Spm, &[1, 2], &[3]), [101, 3, 100, 1, 2, 102]);
        }
    }

    #[test]
    fn a_vocabulary_without_the_tokens_or_with_some_of_them_gives_none() {
        assert_eq!(detect(&[]), None);
        assert_eq!(detect(&["<s>", "</s>", "a"]), None);
        assert_eq!(detect(&["<|fim_prefix|>", "<|fim_suffix|>"]), None);
        assert_eq!(detect(&["<|fim_prefix|>", "<fim_suffix>", "<fim-middle>"]), None);
        assert_eq!(detect(&["[PREFIX]"]), None);
    }

    #[test]
    fn leftovers_of_another_family_do_not_mix_in() {
        let tokens = detect(&["<|fim_prefix|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]);
        let tokens = tokens.unwrap();
        assert_eq!((tokens.prefix, tokens.suffix, tokens.middle), (101, 102, Some(103)));
    }

    #[test]
    fn codestral_has_the_suffix_first_and_no_middle() {
        let tokens = detect(&["[SUFFIX]", "[PREFIX]"]).unwrap();
        assert_eq!((tokens.style, tokens.middle), (FimStyle::Spm, None));
        assert_eq!(tokens.layout(tokens.style, &[1, 2], &[3]), [100, 3, 101, 1, 2]);
        let asked_otherwise = tokens.layout(FimStyle::Psm, &[1, 2], &[3]);
        assert_eq!(asked_otherwise, [100, 3, 101, 1, 2]);
    }

    #[test]
    fn the_rest_of_a_family_is_found_and_stops_a_middle() {
        let vocab = [
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_middle|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ];
        let tokens = detect(&vocab).unwrap();
        assert_eq!((tokens.pad, tokens.repo, tokens.sep), (Some(103), Some(104), Some(105)));
        assert_eq!(tokens.stops(), [100, 101, 102, 103, 104, 105]);
        let gemma = detect(&[vocab[0], vocab[1], vocab[2], "<|file_separator|>"]).unwrap();
        assert_eq!((gemma.sep, gemma.repo), (Some(103), None));
        let granite = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>"];
        let granite = detect(&granite).unwrap();
        assert_eq!((granite.pad, granite.repo, granite.sep), (Some(103), Some(104), None));
        let star = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"];
        let star = detect(&star).unwrap();
        assert_eq!((star.repo, star.sep), (Some(103), Some(104)));
        let llama = detect(&["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]).unwrap();
        assert_eq!((llama.end, llama.stops()), (Some(103), vec![100, 101, 102, 103]));
        let chat = detect(&[vocab[0], vocab[1], vocab[2], "<EOT>"]).unwrap();
        assert_eq!(chat.end, None, "only CodeLlama ends a middle with EOT");
    }

    #[test]
    fn ids_of_the_file_go_before_names() {
        let roles = [("fim_pre", 7), ("fim_sep", 9)];
        let tokens = detect_with(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], &roles);
        let tokens = tokens.unwrap();
        assert_eq!((tokens.prefix, tokens.suffix, tokens.sep), (7, 101, Some(9)));
        let all = [("fim_pre", 1), ("fim_suf", 2), ("fim_mid", 3)];
        let tokens = detect_with(&[], &all).unwrap();
        assert_eq!(tokens.layout(FimStyle::Psm, &[50], &[60]), [1, 50, 2, 60, 3]);
        assert_eq!(detect_with(&[], &[("fim_pre", 1)]), None);
    }

    #[test]
    fn the_repository_is_laid_out_as_llama_cpp_does() {
        let vocab =
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"];
        let tokens = detect(&vocab).unwrap();
        let files = vec![FimFile { path: "a", text: "xy" }, FimFile { path: "b", text: "z" }];
        let mut context = FimContext { repo: "r", path: "c", files, n_tok_max: usize::MAX };
        let line = u32::from(b'\n');
        let ids = tokens.context(&context, &mut encode);
        let want = [103, 114, line, 104, 97, line, 120, 121, 104, 98, line, 122, 104, 99, line];
        assert_eq!(ids, want);
        context.n_tok_max = 4;
        assert_eq!(tokens.context(&context, &mut encode), want[11..]);
        context.n_tok_max = 0;
        assert!(tokens.context(&context, &mut encode).is_empty());
    }

    #[test]
    fn without_a_separator_files_are_set_off_by_dashes() {
        let tokens = detect(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]).unwrap();
        let files = vec![FimFile { path: "a", text: "xy" }];
        let context = FimContext { repo: "r", path: "c", files, n_tok_max: 100 };
        let want = encode("\n\n--- snippet ---\n\nxy");
        assert_eq!(tokens.context(&context, &mut encode), want);
    }
}
