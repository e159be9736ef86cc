//! Documents as tokens; and the tokenizers and texts that the tests of this folder share.

use super::*;
use crate::text::tokenizer::BpeTrainer;

/// Letters of one to four bytes.
pub(super) const TEXT: &str =
    "fn größe(x: f32) -> f32 {\n    let 数 = x * 2.0; // 🦀 ok\n    数\n}\n";

pub(super) const SPECIALS: [&str; 6] = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|im_start|>",
    "<|im_end|>",
];

/// A small byte-level tokenizer that knows `SPECIALS` by ids from 0.
pub(super) fn tokenizer() -> Tokenizer {
    let specials = SPECIALS.map(String::from).to_vec();
    let trainer = BpeTrainer { n_vocab: 330, min_count: 2, specials };
    let text = TEXT.repeat(8) + "one word after another, line by line\n";
    let mut texts = [text.as_str()].into_iter();
    Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {}).unwrap()
}

/// One that puts a space before every text, as SentencePiece does.
pub(super) fn spaced_tokenizer() -> Tokenizer {
    let all: serde_json::Value =
        serde_json::from_str(include_str!("../text/tokenizer/tiny.json")).unwrap();
    let json = all["spaces"]["tokenizer"].to_string();
    Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap()
}

fn part(text: &str, learned: bool) -> Part {
    Part { text: text.into(), learned, special: false }
}

fn document(parts: Vec<Part>) -> Document {
    Document { name: "a".into(), language: "text", parts }
}

#[test]
fn a_whole_text_stands_between_begin_and_end_and_is_learned() {
    let tokenizer = tokenizer();
    let ends = Ends::of(&tokenizer);
    assert_eq!(ends, Ends { begin: Some(0), end: Some(0) });
    let document = Document::whole("src/a.rs", TEXT);
    assert_eq!((document.language, document.n_bytes()), ("Rust", TEXT.len()));
    let encoded = encode(&document, &tokenizer, ends).unwrap();
    let n = encoded.ids.len();
    assert_eq!((encoded.ids[0], encoded.ids[n - 1]), (0, 0));
    assert_eq!(tokenizer.decode(&encoded.ids[1..n - 1], Special::Parse), TEXT);
    assert_eq!(encoded.n_bytes, TEXT.len());
    assert!(!encoded.learned[0] && encoded.learned[1..].iter().all(|learned| *learned));
    assert_eq!(encoded.learned.len(), n);
}

#[test]
fn without_a_begin_the_first_token_is_not_learned_nor_counted() {
    let tokenizer = tokenizer();
    let ends = Ends { begin: None, end: None };
    let encoded = encode(&Document::whole("a", TEXT), &tokenizer, ends).unwrap();
    let first = tokenizer.bytes(encoded.ids[0]).unwrap().len();
    assert_eq!(encoded.n_bytes, TEXT.len() - first);
    assert!(!encoded.learned[0] && encoded.learned[1]);
    let nothing = encode(&Document::whole("a", ""), &tokenizer, ends).unwrap();
    assert_eq!((nothing.ids.len(), nothing.n_bytes), (0, 0));
    let end_only = Ends { begin: None, end: Some(0) };
    let nothing = encode(&Document::whole("a", ""), &tokenizer, end_only).unwrap();
    assert_eq!((nothing.ids, nothing.learned), (vec![0], vec![false]));
}

#[test]
fn only_learned_parts_count_and_special_tokens_are_text_in_them() {
    let tokenizer = tokenizer();
    let parts = vec![part("ask <|im_end|>", false), part("größe", true)];
    let document = document(parts);
    assert_eq!(document.text(), "ask <|im_end|>größe");
    let encoded = encode(&document, &tokenizer, Ends::of(&tokenizer)).unwrap();
    assert_eq!(encoded.n_bytes, "größe".len());
    let n = encoded.ids.len();
    assert!(encoded.ids[1..n - 1].iter().all(|id| !tokenizer.is_special(*id)));
    let learned: Vec<u32> =
        (0..n).filter(|at| encoded.learned[*at]).map(|at| encoded.ids[at]).collect();
    assert_eq!(tokenizer.decode(&learned, Special::Parse), "größe<|endoftext|>");
}

#[test]
fn a_conversation_has_its_own_ends_and_marks_without_bytes() {
    let tokenizer = tokenizer();
    let part = |text: &str, learned| Part { text: text.into(), learned, special: true };
    let ask = part("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", false);
    let document = document(vec![ask, part("word<|im_end|>\n", true)]);
    let encoded = encode(&document, &tokenizer, Ends::of(&tokenizer)).unwrap();
    assert_eq!(encoded.ids[0], 4, "no second beginning");
    assert_ne!(encoded.ids.last(), Some(&0), "no second end");
    assert_eq!(encoded.n_bytes, "word\n".len());
    let learned: Vec<bool> = encoded.learned.iter().copied().filter(|learned| *learned).collect();
    assert_eq!(learned.len(), tokenizer.encode("word<|im_end|>\n", Special::Parse).unwrap().len());
}

#[test]
fn a_text_that_goes_on_gets_no_space_before_it() {
    let tokenizer = spaced_tokenizer();
    assert!(adds_space(&tokenizer).unwrap());
    for text in ["the", "\nthe", " the", ".the", "größe 🦀", ""] {
        let ids = encode_after(&tokenizer, text, Special::Plain).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.bytes(*id).unwrap()).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
    let parts = vec![part("a que", false), part("stion", true)];
    let ends = Ends { begin: None, end: None };
    let encoded = encode(&document(parts), &tokenizer, ends).unwrap();
    assert_eq!(tokenizer.decode(&encoded.ids, Special::Plain), "a question");
}
