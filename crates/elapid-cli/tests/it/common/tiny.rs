//! Tiny models with random weights, made on the spot: they know nothing, but what they say depends
//! on everything that they have read.

use super::{rng::Rng, tensors};
use elapid::{BpeTrainer, Device, Method, Model, Session, Tokenizer};
use serde_json::{Value, json};
use std::path::Path;

/// What a model is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Attention,
    Mamba,
    Hybrid,
    /// Attention, and of eight experts two.
    Experts,
}

impl Kind {
    pub const ALL: [Kind; 3] = [Kind::Attention, Kind::Mamba, Kind::Hybrid];

    fn layers(self) -> Value {
        match self {
            Kind::Attention => json!(["attention"]),
            Kind::Experts => json!(["attention", "attention"]),
            Kind::Mamba => json!(["mamba1", "mamba1"]),
            Kind::Hybrid => json!(["mamba2", "attention"]),
        }
    }
}

/// Tokens that a new vocabulary has besides text.
pub const SPECIALS: [&str; 6] = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|im_start|>",
    "<|im_end|>",
];

/// A template in the manner of ChatML.
pub const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
    {{ message.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// How a model is made.
pub struct Tiny {
    pub kind: Kind,
    /// Heads of attention, each with keys of its own.
    pub n_head: usize,
    pub n_ctx: usize,
    /// Whether there are tokens for fill in the middle.
    pub fim: bool,
    /// Whether there is a chat template.
    pub chat: bool,
}

impl Tiny {
    pub fn new(kind: Kind) -> Tiny {
        Tiny { kind, n_head: 1, n_ctx: 1 << 16, fim: true, chat: true }
    }

    fn feed_forward(&self) -> &str {
        if self.kind == Kind::Experts { "experts" } else { "dense" }
    }

    /// Writes it to a directory.
    pub fn write(&self, dir: &Path) {
        let mut specials: Vec<String> = SPECIALS.iter().map(|token| token.to_string()).collect();
        specials.retain(|token| self.fim || !token.contains("fim"));
        let trainer = BpeTrainer { n_vocab: 768, min_count: 2, specials };
        let text: String = lines(400, 1).join("\n");
        let mut texts = [text.as_str()].into_iter();
        let tokenizer = Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {}).unwrap();
        // Large weights: with small ones a model says the same whatever it has read.
        let config = json!({
            "model_type": "elapid", "vocab_size": tokenizer.n_vocab(), "d_model": 32,
            "layers": self.kind.layers(),
            "attention": {"n_head": self.n_head, "n_kv_head": self.n_head, "d_head": 16},
            "mamba1": {"d_state": 4}, "mamba2": {"d_state": 8, "d_head": 16},
            "feed_forward": self.feed_forward(), "dense": {"d_ff": 48}, "tied": false,
            "experts": {"n_expert": 8, "n_used": 2, "d_ff": 32}, "n_ctx": self.n_ctx,
            "init_std": 0.3,
        });
        let mut about = json!({"eos_token": "<|endoftext|>"});
        if self.chat {
            about["chat_template"] = json!(TEMPLATE);
        }
        let texts = vec![
            ("tokenizer.json", tokenizer.to_json().unwrap().into_bytes()),
            ("tokenizer_config.json", about.to_string().into_bytes()),
        ];
        let model = Model::fresh("tiny", config.to_string(), texts).unwrap();
        let mut session = Session::new(model, &Device::cpu(1).unwrap()).unwrap();
        session.adapt(&Method::Full, None, 3).unwrap();
        session.save(dir).unwrap();
        say_text(&dir.join("model.safetensors"), &tokenizer);
    }
}

/// Keeps the model to plain text: the logit of any other token is zero, which is never the largest.
/// So a greedy answer is as long as it may be.
fn say_text(path: &Path, tokenizer: &Tokenizer) {
    tensors::change(path, "lm_head.weight", |shape, numbers| {
        for (id, row) in numbers.chunks_exact_mut(shape[1]).enumerate() {
            let bytes = tokenizer.bytes(id as u32).unwrap_or_default();
            let is_text = bytes.iter().all(|byte| (b' '..=b'~').contains(byte));
            let token = tokenizer.token(id as u32).unwrap_or_default();
            if !is_text || SPECIALS.contains(&token.as_str()) {
                row.fill(0.0);
            }
        }
    });
}

/// Lines of made-up code, the same for the same seed.
pub fn lines(n: usize, seed: u64) -> Vec<String> {
    let rng = Rng::new(seed, 0);
    let nouns = ["count", "index", "value", "node", "buffer", "offset", "limit", "result", "item"];
    let verbs = ["push", "find", "insert", "merge", "split", "update", "remove", "read", "write"];
    let pick = |list: &[&'static str], at: u64| list[rng.below(at, list.len() as u64) as usize];
    let line = |n: u64| {
        let (a, b) = (pick(&nouns, 8 * n), pick(&nouns, 8 * n + 1));
        let (verb, number) = (pick(&verbs, 8 * n + 2), rng.below(8 * n + 3, 1000));
        match n % 8 {
            0 => format!("/// Calls {verb} for each {a} below {number}."),
            1 => format!("pub fn {verb}_{a}_{n}({b}: usize, {a}s: &mut Vec<u32>) -> usize {{"),
            2 => format!("    let mut {a} = {b}.{verb}({number});"),
            3 => format!("    for {b} in 0..{a}.len() {{"),
            4 => format!("        {a}s.{verb}({b} + {number});"),
            5 => "    }".to_string(),
            6 => format!("    {a} + {number}"),
            _ => "}".to_string(),
        }
    };
    (0..n as u64).map(line).collect()
}
