//! Tokens and the logarithms of their probabilities, in the two forms OpenAI has.

use elapid::Token;
use elapid::Tokenizer;
use serde_json::{Map, Value, json};

/// JSON has no minus infinity; OpenAI writes this.
const NEVER: f32 = -9999.0;

pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { NEVER }
}

/// The bytes of a token, and as text.
pub fn spelled(tokenizer: &Tokenizer, id: u32) -> (Vec<u8>, String) {
    let bytes = tokenizer.bytes(id).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (bytes, text)
}

/// `logprobs` of a completion; `offset` is where its first token begins, in characters.
pub fn of_completion(tokenizer: &Tokenizer, tokens: &[Token], mut offset: usize) -> Value {
    let (mut texts, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let (_, text) = spelled(tokenizer, token.id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        own.push(finite(token.logprob));
        let mut top = Map::new();
        for &(id, logprob) in &token.top {
            top.insert(spelled(tokenizer, id).1, json!(finite(logprob)));
        }
        tops.push(top);
    }
    json!({
        "tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets,
    })
}

/// `logprobs` of a chat.
pub fn of_chat(tokenizer: &Tokenizer, tokens: &[Token]) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (bytes, text) = spelled(tokenizer, id);
        json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
    };
    let content = tokens.iter().map(|token| {
        let mut item = entry(token.id, token.logprob);
        let top = token.top.iter().map(|&(id, logprob)| entry(id, logprob));
        item["top_logprobs"] = top.collect();
        item
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}
