//! Files of one project in one sequence, each under its path, as `/infill` shows them to a model:
//!
//! ```text
//! [begin] REPO project \n SEP path \n text SEP path \n PRE prefix SUF suffix MID middle [end] ...
//! ```
//!
//! So a model learns to use what stands in neighbouring files, and that a path says something
//! about a text. Files that follow each other in the corpus, which is sorted by path, form a group
//! of about four rows; a group is drawn as one, and its files are shuffled anew in each epoch. A
//! share of the groups is laid out like this; the others are documents on their own, as a model
//! is also asked without a project.
//!
//! SEP is learned, as the end of the file before it; REPO is not, nor is PRE, SUF or MID. A
//! run of a file that has a hole, or follows one, is shown under the path again.
//!
//! Not here: holes (`fim_training.rs`), rows (`pack.rs`), and which files to show when a model is
//! asked.

use super::fim_training::{Run, Sequence};
use super::{Encoded, Ends, encode_after};
use crate::error::{Error, Result};
use crate::text::fim::FimTokens;
use crate::text::tokenizer::{Special, Tokenizer};

/// Rows that a group of files fills, about: fewer, and rows hold parts of several groups.
pub(super) const N_ROWS_GROUP: usize = 4;

/// How much is shown together with other files of its project.
#[derive(Clone, Debug, PartialEq)]
pub struct ProjectTraining {
    /// Share of the groups that are laid out so, 0 to 1.
    pub rate: f64,
    /// The project of all documents; none where the first folder of a name is its project.
    pub name: Option<String>,
    /// Before the name of the project.
    pub repo: Option<u32>,
    /// Before the path of each file.
    pub sep: u32,
}

/// Lays out groups of files.
pub(super) struct Layout<'a> {
    pub(super) settings: &'a ProjectTraining,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) ends: Ends,
}

impl ProjectTraining {
    /// With the tokens of a vocabulary.
    pub(crate) fn new(
        rate: f64,
        name: Option<String>,
        tokens: Option<FimTokens>,
    ) -> Result<ProjectTraining> {
        if !(0.0..=1.0).contains(&rate) {
            let problem = format!("files shown with their project: the share is {rate}");
            return Err(Error::input(problem, "give a share from 0 to 1"));
        }
        let (repo, sep) = tokens.map(|tokens| (tokens.repo, tokens.sep)).unwrap_or_default();
        let sep = sep.ok_or_else(|| {
            let problem = "the vocabulary has no token to separate files";
            Error::input(problem, "train on each file alone, or use a model for code")
        })?;
        Ok(ProjectTraining { rate, name, repo, sep })
    }

    /// Project and path of a document.
    pub(super) fn place<'a>(&'a self, document: &'a str) -> (&'a str, &'a str) {
        match &self.name {
            Some(name) => (name, document),
            None => document.split_once('/').unwrap_or(("", document)),
        }
    }
}

impl Layout<'_> {
    /// One sequence of the runs of several documents.
    pub(super) fn sequence(&self, documents: &[(&Encoded, Vec<Run>)]) -> Result<Sequence> {
        let mut ids: Vec<u32> = self.ends.begin.into_iter().collect();
        let mut learned = vec![false; ids.len()];
        let encode = |text: &str| encode_after(self.tokenizer, text, Special::Plain);
        for (n, (document, runs)) in documents.iter().enumerate() {
            let (project, path) = self.settings.place(&document.name);
            if let (0, Some(repo)) = (n, self.settings.repo) {
                ids.push(repo);
                learned.push(false);
                ids.extend(encode(&format!("{project}\n"))?);
            }
            let path = encode(&format!("{path}\n"))?;
            for run in runs {
                learned.resize(ids.len(), true);
                ids.push(self.settings.sep);
                ids.extend(&path);
                learned.resize(ids.len(), true);
                let (more, is_learned) = self.body(document, run);
                ids.extend(more);
                learned.extend(is_learned);
            }
        }
        if let Some(end) = self.ends.end.filter(|end| ids.last() != Some(end)) {
            ids.push(end);
            learned.push(true);
        }
        learned[0] = false;
        Ok(Sequence { ids, learned })
    }

    /// The tokens of a run that stand under its path: without the beginning, which the sequence
    /// has, and without the end of a file, which the next separator is.
    fn body<'a>(&self, document: &'a Encoded, run: &'a Run) -> (&'a [u32], &'a [bool]) {
        let (ids, learned, ends_text) = match run {
            Run::Filled(sequence) => (&sequence.ids[..], &sequence.learned[..], false),
            Run::Plain(range) => {
                let is_last = range.end == document.ids.len();
                (&document.ids[range.clone()], &document.learned[range.clone()], is_last)
            }
        };
        // The first token of a later run is the last one of the run before.
        let is_later = matches!(run, Run::Plain(range) if range.start > 0);
        let first =
            is_later || self.ends.begin.is_some() && ids.first() == self.ends.begin.as_ref();
        let last = ends_text && self.ends.end.is_some() && ids.last() == self.ends.end.as_ref();
        let (start, end) = (usize::from(first), ids.len() - usize::from(last));
        let range = start..end.max(start);
        (&ids[range.clone()], &learned[range])
    }
}

#[cfg(test)]
mod tests {
    use super::super::corpus::Corpus;
    use super::super::fim_training::FimTraining;
    use super::super::pack::{LoadSettings, Loader, Order};
    use super::super::tests::{TEXT, tokenizer};
    use super::super::{Document, Part, encode};
    use super::*;
    use crate::text::fim::FimStyle;
    use std::sync::Arc;

    const ENDS: Ends = Ends { begin: Some(0), end: Some(0) };
    const TOKENS: FimTokens = FimTokens {
        prefix: 1,
        suffix: 2,
        middle: Some(3),
        pad: None,
        repo: Some(4),
        sep: Some(5),
        end: None,
        style: FimStyle::Psm,
    };

    fn loader(documents: &[Document], context: usize, settings: ProjectTraining) -> Loader {
        let tokenizer = tokenizer();
        let encode = |document| encode(document, &tokenizer, ENDS).unwrap();
        let documents: Vec<Encoded> = documents.iter().map(encode).collect();
        let settings = LoadSettings {
            context,
            n_rows: 1,
            seed: 3,
            fim: None,
            project: Some(settings),
            ends: ENDS,
            shuffle: Order::AsGiven,
        };
        Loader::new(Arc::new(Corpus::of(&documents)), settings, Arc::new(tokenizer)).unwrap()
    }

    fn together(name: Option<&str>) -> ProjectTraining {
        ProjectTraining::new(1.0, name.map(String::from), Some(TOKENS)).unwrap()
    }

    /// The segments of the next row as text, special tokens spelled, and what is not learned.
    fn row(loader: &mut Loader) -> Vec<(String, Vec<u32>)> {
        let packed = loader.next_batch().unwrap();
        let segment = |rows: std::ops::Range<usize>| {
            let mut ids = packed.batch.tokens[rows.clone()].to_vec();
            ids.extend(packed.targets[rows.clone()].last());
            let read = rows.filter(|row| packed.weights[*row] == 0.0);
            let read = read.map(|row| packed.targets[row]).collect();
            let spell = |id: &u32| loader.tokenizer().bytes(*id).unwrap_or_default();
            let text = ids.iter().flat_map(|id| match id {
                0 => b"<end>".to_vec(),
                4 => b"<repo>".to_vec(),
                5 => b"<sep>".to_vec(),
                _ => spell(id),
            });
            (String::from_utf8(text.collect()).unwrap(), read)
        };
        packed.batch.segments.iter().map(|segment_| segment(segment_.rows())).collect()
    }

    #[test]
    fn files_of_a_project_follow_each_other_under_their_paths() {
        let documents = [
            Document::whole("p/src/a.rs", "one\n"),
            Document::whole("p/src/b.rs", "two word\n"),
            Document::whole("q/c.py", TEXT),
        ];
        let n_tok = |documents: &[Document], settings: ProjectTraining| {
            loader(documents, 64, settings).n_tok_epoch()
        };
        let n = n_tok(&documents, together(None));
        let mut loader = loader(&documents, n, together(None));
        let found = row(&mut loader);
        let first = "<end><repo>p\n<sep>src/a.rs\none\n<sep>src/b.rs\ntwo word\n<end>";
        assert_eq!(found[0], (first.into(), vec![4]));
        assert_eq!(found[1].0, format!("<end><repo>q\n<sep>c.py\n{TEXT}<end>"));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn all_documents_are_of_one_project_that_is_named() {
        let documents = [Document::whole("src/a.rs", "one\n"), Document::whole("b.rs", "two\n")];
        let n = loader(&documents, 64, together(Some("mine"))).n_tok_epoch();
        let found = row(&mut loader(&documents, n, together(Some("mine"))));
        let text = "<end><repo>mine\n<sep>src/a.rs\none\n<sep>b.rs\ntwo\n<end>";
        assert_eq!(found, [(text.into(), vec![4])]);
    }

    #[test]
    fn a_group_is_no_longer_than_four_rows_and_prompts_stand_alone() {
        let mut documents: Vec<Document> =
            (0..12).map(|n| Document::whole(format!("p/{n}"), TEXT)).collect();
        let part = |learned| Part { text: "word".into(), learned, special: false };
        let parts = vec![part(false), part(true)];
        documents.insert(6, Document { name: "p/prompt".into(), language: "text", parts });
        let mut loader = loader(&documents, 40, together(None));
        let mut all = String::new();
        while loader.cursor().epoch == 0 {
            all.extend(row(&mut loader).into_iter().map(|segment| segment.0));
        }
        let groups: Vec<&str> = all.split("<repo>").skip(1).collect();
        let n_files = |group: &&str| group.matches("<sep>").count();
        assert!(groups.iter().all(|group| (1..12).contains(&n_files(group))), "{all}");
        assert!(groups.iter().any(|group| n_files(group) > 1), "{all}");
        assert!(all.contains("<end>wordword<end>"), "{all}");
    }

    #[test]
    fn a_share_of_the_groups_is_laid_out_anew_in_each_epoch_and_after_a_seek() {
        let documents: Vec<Document> =
            (0..60).map(|n| Document::whole(format!("p{}/{n}", n / 3), TEXT.repeat(2))).collect();
        let half = ProjectTraining { rate: 0.5, ..together(None) };
        let tokenizer = tokenizer();
        let encoded = documents.iter().map(|it| encode(it, &tokenizer, ENDS).unwrap());
        let corpus = Arc::new(Corpus::of(&encoded.collect::<Vec<_>>()));
        let fim = FimTraining { rate: 0.5, spm: 0.5, tokens: TOKENS };
        let settings = LoadSettings {
            context: 64,
            n_rows: 4,
            seed: 3,
            fim: Some(fim),
            project: Some(half),
            ends: ENDS,
            shuffle: Order::Shuffled,
        };
        let tokenizer = Arc::new(tokenizer);
        let new = || Loader::new(corpus.clone(), settings.clone(), tokenizer.clone()).unwrap();
        let mut loader = new();
        let mut epochs = [Vec::new(), Vec::new(), Vec::new()];
        let mut middle = None;
        while let Some(ids) = epochs.get_mut(loader.cursor().epoch as usize) {
            let cursor = loader.cursor();
            let packed = loader.next_batch().unwrap();
            ids.extend(packed.batch.tokens.iter().copied());
            if cursor.epoch == 1 && cursor.row > 8 {
                middle.get_or_insert((cursor, packed.targets));
            }
        }
        let n = |epoch: &Vec<u32>, id: u32| epoch.iter().filter(|it| **it == id).count();
        for epoch in &epochs {
            assert!((3..18).contains(&n(epoch, 4)), "{} groups of 20", n(epoch, 4));
            // A run with a hole, and what follows it, stand under the path again.
            assert!(n(epoch, 5) > 2 * n(epoch, 4) && n(epoch, 3) > 10);
        }
        assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
        let (mut again, (cursor, targets)) = (new(), middle.unwrap());
        again.seek(cursor).unwrap();
        assert_eq!(again.next_batch().unwrap().targets, targets);
    }

    #[test]
    fn a_vocabulary_without_the_tokens_and_wrong_shares_are_refused() {
        let without = FimTokens { sep: None, ..TOKENS };
        for (rate, tokens, words) in [
            (0.5, None, "no token to separate files"),
            (0.5, Some(without), "no token to separate files"),
            (1.5, Some(TOKENS), "the share is 1.5"),
        ] {
            let error = ProjectTraining::new(rate, None, tokens).unwrap_err();
            assert!(error.report().contains(words), "{error}");
        }
    }
}
