//! A new tokenizer from text: a byte-level BPE, trained (`train_bpe.rs`) and ready for use.

use super::tokens::Kind;
use super::{Engine, Tokenizer, gguf, names, pre};
use crate::error::{Error, Result};
use crate::text::train_bpe::{BpeTrainer, TrainedBpe};
use serde_json::{Map, Value};

impl Tokenizer {
    /// Trains on `texts`, cut by the pre-tokenizer that GGUF files call `pre`; `progress` hears of
    /// tokens made and wanted. The same texts give the same tokenizer on any number of threads.
    pub fn train(
        trainer: &BpeTrainer,
        pre: &str,
        texts: &mut dyn Iterator<Item = &str>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Tokenizer> {
        const FILE: &str = "the new tokenizer";
        let stages = names::find(FILE, pre)?.stages(FILE)?;
        let cut = |text: &str, emit: &mut dyn FnMut(&str)| {
            let mut keep = |word: &str| {
                emit(word);
                Ok(())
            };
            // A pattern that gives up on a piece leaves it whole: one long word.
            if pre::split(&stages, text, &mut keep).is_err() {
                emit(text);
            }
        };
        let TrainedBpe { vocab, merges } = trainer.train(texts, &cut, progress)?;
        let ids: Map<String, Value> =
            vocab.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
        let json = serde_json::to_vec(&ids).map_err(|error| {
            Error::input(error.to_string(), "special tokens are texts that differ")
        })?;
        let lines: String =
            merges.iter().map(|(left, right)| format!("{left} {right}\n")).collect();
        let merges = format!("#version: 0.2\n{lines}");
        let mut tokenizer =
            Tokenizer::from_vocab_merges([FILE, FILE], &json, merges.as_bytes(), pre)?;
        for id in 0..trainer.specials.len() as u32 {
            tokenizer.tokens.set_kind(id, Kind::Control);
        }
        if let Engine::Own(encoder) = &mut tokenizer.engine {
            encoder.raw = gguf::finder(FILE, &tokenizer.tokens)?;
        }
        Ok(tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Special;
    use super::*;

    #[test]
    fn a_trained_tokenizer_gives_text_back_and_knows_its_special_tokens() {
        let trainer = BpeTrainer {
            n_vocab: 300,
            min_count: 2,
            specials: vec!["<|end|>".into(), "<|fim_prefix|>".into()],
        };
        let text = "fn main() { let x = 1; }\nfn main() { let y = 2; }\n".repeat(20);
        let train = || {
            let mut texts = [text.as_str()].into_iter();
            Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {})
        };
        let tokenizer = train().unwrap();
        let ids = tokenizer.encode("fn main() {é", Special::Plain).unwrap();
        assert!(ids.len() < 8, "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, Special::Parse), "fn main() {é");
        assert_eq!(tokenizer.encode("a<|end|>", Special::Parse).unwrap().last(), Some(&0));
        assert!(!tokenizer.encode("a<|end|>", Special::Plain).unwrap().contains(&0));
        assert_eq!(tokenizer.id("<|fim_prefix|>"), Some(1));
        // Through tokenizer.json and GGUF it stays the same.
        let json = tokenizer.to_json().unwrap();
        assert_eq!(train().unwrap().to_json().unwrap(), json);
        let again = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
        let through = Tokenizer::from_gguf("m.gguf", tokenizer.to_gguf().unwrap()).unwrap();
        for other in [again, through] {
            for special in [Special::Plain, Special::Parse] {
                let text = "let main = x<|end|> + <|fim_prefix|>";
                let want = tokenizer.encode(text, special).unwrap();
                assert_eq!(other.encode(text, special).unwrap(), want);
            }
        }
    }
}
