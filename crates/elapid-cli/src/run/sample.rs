//! Which held-out documents are measured where there is no time for all.

use elapid::{Encoded, Tokenizer};
use std::collections::BTreeMap;

/// Where there are so many documents, each gives at most its share of the tokens, or `N_TOK_MIN`: a
/// few long ones would say little of the others.
const SHARE: usize = 12;
const N_TOK_MIN: usize = 512;

/// Documents of about so many tokens, of each language its share: those of the smallest hashes of
/// names, so that the choice is stable and has nothing to do with the alphabet. Long ones and the
/// last are cut.
pub fn sample(documents: &[Encoded], n_tok_max: usize, tokenizer: &Tokenizer) -> Vec<Encoded> {
    let n_all: usize = documents.iter().map(|document| document.ids.len()).sum();
    if n_all <= n_tok_max {
        return documents.to_vec();
    }
    let mut of_language: BTreeMap<&str, Vec<&Encoded>> = BTreeMap::new();
    for document in documents {
        of_language.entry(document.language).or_default().push(document);
    }
    // Where a document stands among its language, from 0 to 1: languages take turns by that.
    let mut order: Vec<(f64, &Encoded)> = Vec::new();
    for list in of_language.values_mut() {
        list.sort_by_key(|document| elapid::name_hash(&document.name));
        let n = list.len() as f64;
        order.extend(
            list.iter().enumerate().map(|(at, document)| ((at as f64 + 0.5) / n, *document)),
        );
    }
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut list = Vec::new();
    let mut n_left = n_tok_max;
    let n_each = (n_tok_max / SHARE.min(documents.len())).max(N_TOK_MIN);
    for (_, document) in order {
        let n = document.ids.len().min(n_left).min(n_each);
        // A few tokens of a document say little of it.
        if n < document.ids.len().min(64) {
            break;
        }
        list.push(document.cut(n, tokenizer));
        n_left -= n;
    }
    list
}
