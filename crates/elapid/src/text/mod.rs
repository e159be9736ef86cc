//! Text and tokens: tokenizers, training of a vocabulary, chat templates, fill-in-the-middle.

pub mod chat;
pub mod fim;
pub mod tokenizer;
pub mod vocab;
