//! Which files of a folder are learned: the engine's filters, near copies and split.

use crate::failure::{Done, Failure};
use elapid::{
    BYTE_MAX, Signature, Split, SplitBy, SplitItem, Unwanted, cut_end, language_of_path,
    near_copies, split, unwanted_content, unwanted_path,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use wasm_bindgen::prelude::*;

/// A file that is kept.
struct Kept {
    name: String,
    text: String,
    language: &'static str,
    date: Option<f64>,
}

/// Files of a folder, seen one by one.
#[wasm_bindgen]
#[derive(Default)]
pub struct Folder {
    kept: Vec<Kept>,
    left_out: Vec<(String, String)>,
}

#[wasm_bindgen]
impl Folder {
    /// An empty one.
    #[wasm_bindgen(constructor)]
    pub fn new() -> Folder {
        Folder::default()
    }

    /// Whether a file is worth reading, by its path and size; if not, it is noted as left out.
    pub fn wants(&mut self, path: String, n_bytes: f64) -> bool {
        let too_large = || (n_bytes > BYTE_MAX as f64).then_some(Unwanted::TooLarge);
        match unwanted_path(&path).or_else(too_large) {
            Some(reason) => {
                self.left_out.push((path, reason.to_string()));
                false
            }
            None => true,
        }
    }

    /// A file that was read; `date` is any number that grows with time.
    pub fn add(&mut self, path: String, bytes: Vec<u8>, date: Option<f64>) {
        if let Some(reason) = unwanted_content(&path, &bytes) {
            self.left_out.push((path, reason.to_string()));
            return;
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let language = language_of_path(&path);
        self.kept.push(Kept { name: path, text, language, date });
    }

    /// Divides what was kept, as JSON: names and texts to learn and to measure with, languages,
    /// and what was left out.
    pub fn divide(mut self, share: f64) -> Done<String> {
        if !(0.0..1.0).contains(&share) {
            return Err(Failure::input(format!("`heldOut` is {share}"), "it is a share below one"));
        }
        self.kept.sort_by(|a, b| a.name.cmp(&b.name));
        let clusters = self.without_copies();
        let languages = self.languages();
        let items = self.kept.iter().zip(&clusters).map(|(kept, cluster)| SplitItem {
            name: &kept.name,
            language: kept.language,
            n_bytes: kept.text.len(),
            is_text: true,
            cluster: *cluster,
            date: kept.date.map(|date| date as i64),
        });
        let items: Vec<SplitItem> = items.collect();
        let drawn = if share > 0.0 { split(&items, share) } else { None };
        let (train, held_out) = self.sides(drawn);
        let left_out = self.left_out.iter();
        let left_out = left_out.map(|(name, reason)| json!({ "name": name, "reason": reason }));
        let json = json!({
            "train": train, "heldOut": held_out, "languages": languages,
            "leftOut": left_out.collect::<Vec<_>>(),
        });
        Ok(json.to_string())
    }
}

impl Folder {
    /// Leaves out copies; for each of the others the number of its cluster.
    fn without_copies(&mut self) -> Vec<usize> {
        let signatures: Vec<Signature> =
            self.kept.iter().map(|kept| Signature::new(&kept.text)).collect();
        let text = |idx: usize| Ok::<_, std::convert::Infallible>(self.kept[idx].text.clone());
        let Ok(found) = near_copies(&signatures, &text);
        let names: Vec<String> = self.kept.iter().map(|kept| kept.name.clone()).collect();
        let mut clusters = Vec::new();
        let all = std::mem::take(&mut self.kept);
        for (kept, (cluster, copy)) in all.into_iter().zip(found) {
            match copy.map(|of| Unwanted::NearDuplicate { of: names[of].clone() }) {
                Some(reason) => self.left_out.push((kept.name, reason.to_string())),
                None => {
                    self.kept.push(kept);
                    clusters.push(cluster);
                }
            }
        }
        clusters
    }

    fn languages(&self) -> Vec<Value> {
        let mut by_name: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for kept in &self.kept {
            let counts = by_name.entry(kept.language).or_default();
            *counts = (counts.0 + 1, counts.1 + kept.text.len());
        }
        let mut list: Vec<_> = by_name.into_iter().collect();
        list.sort_by_key(|(_, (_, n_bytes))| std::cmp::Reverse(*n_bytes));
        let mut values = Vec::new();
        for (name, (n_files, n_bytes)) in list {
            values.push(json!({ "language": name, "files": n_files, "bytes": n_bytes }));
        }
        values
    }

    /// What is learned and what is held out.
    fn sides(&self, drawn: Option<Split>) -> (Vec<Value>, Vec<Value>) {
        let file = |name: &str, text: &str| json!({ "name": name, "text": text });
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (idx, kept) in self.kept.iter().enumerate() {
            let is_held = drawn.as_ref().filter(|it| it.held_out.binary_search(&idx).is_ok());
            let Some(drawn) = is_held else {
                train.push(file(&kept.name, &kept.text));
                continue;
            };
            let end = (drawn.by == SplitBy::End).then(|| cut_end(&kept.text, drawn.share));
            match end.flatten() {
                None => held_out.push(file(&kept.name, &kept.text)),
                Some(at) => {
                    let (first, last) = kept.text.split_at(at);
                    train.push(file(&kept.name, first));
                    held_out.push(file(&kept.name, last));
                }
            }
        }
        (train, held_out)
    }
}
