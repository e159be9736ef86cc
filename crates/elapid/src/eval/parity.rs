//! Two models on the same prompts: how far apart their logits are.
//!
//! Behind the receipt of a conversion: the file that was written is read again and compared with
//! the model it was made from.

use crate::error::Result;
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::Tensor;
use crate::tensor::batch::Batch;
use crate::tensor::rng::Rng;
use crate::text::tokenizer::{Special, Tokenizer};

/// Tokens of a prompt.
const N_TOK: usize = 48;

/// What the prompts say: code and prose, marks, digits and letters of several scripts.
const TEXTS: [&str; 4] = [
    "fn main() {\n    let mut sum = 0;\n    for i in 0..10 {\n        sum += i * i;\n    }\n    \
     show(sum);\n}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n",
    "def fibonacci(n):\n    \"\"\"Return the n-th number.\"\"\"\n    a, b = 0, 1\n    for _ in \
     range(n):\n        a, b = b, a + b\n    return a\n\nclass Node:\n    def __init__(self):\n",
    "Once upon a time there was a small model that lived on a person's own machine. It read the \
     code that was there, and learned to finish the lines that were begun. Nobody else saw them.",
    "In 1843, 3.14159 x 2 = 6.28318; Äpfel, naïve café, привет, 你好 and ½ of a dozen: \
     [1, 2, 3] {\"a\": null} <b>bold</b> $HOME/.config && echo done | sort -u > out.txt",
];

/// Prompts for a model: the fixed texts in its tokens, or fixed ids where it has no tokenizer.
pub fn prompts(tokenizer: Option<&Tokenizer>, n_vocab: usize) -> Result<Vec<Vec<u32>>> {
    let mut list = Vec::new();
    for (idx, text) in TEXTS.iter().enumerate() {
        let mut ids = match tokenizer {
            Some(tokenizer) => tokenizer.encode(text, Special::Plain)?,
            None => {
                let rng = Rng::new(0, idx as u64);
                (0..N_TOK as u64).map(|n| rng.below(n, n_vocab as u64) as u32).collect()
            }
        };
        ids.truncate(N_TOK);
        ids.retain(|&id| (id as usize) < n_vocab);
        if !ids.is_empty() {
            list.push(ids);
        }
    }
    Ok(list)
}

/// How far apart two models are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parity {
    pub n_prompts: usize,
    /// Tokens in all of them.
    pub n_tok: usize,
    /// Largest difference of a logit; infinite where one is not a number.
    pub logit_difference: f64,
    /// Tokens after which both models like the same token best.
    pub n_top1: usize,
    /// Mean divergence of the second's next-token distribution from the first's, in nats.
    pub divergence: f64,
}

impl Parity {
    /// Share of tokens with the same best next token.
    pub fn top1(&self) -> f64 {
        self.n_top1 as f64 / self.n_tok.max(1) as f64
    }
}

/// Compares the second model with the first.
pub fn compare(pair: [(&Model, &Weights); 2], prompts: &[Vec<u32>]) -> Result<Parity> {
    let mut parity = Parity { n_prompts: prompts.len(), ..Parity::default() };
    for ids in prompts {
        let [a, b] = pair.map(|(model, weights)| logits(model, weights, ids));
        let (a, b) = (a?, b?);
        let n_vocab = a.dims2().1;
        for (a, b) in a.to_vec().chunks(n_vocab).zip(b.to_vec().chunks(n_vocab)) {
            parity.add(a, b);
        }
    }
    parity.divergence /= parity.n_tok.max(1) as f64;
    Ok(parity)
}

/// Logits after each token of a prompt: (n_tok, n_vocab).
fn logits(model: &Model, weights: &Weights, ids: &[u32]) -> Result<Tensor> {
    let tape = Tape::off();
    let batch = Batch::from_sequences(&[ids]);
    let forward = model.forward(&tape, weights, &batch, None, ForwardOptions::default())?;
    Ok(model.logits(&tape, weights, &forward.hidden).value().clone())
}

impl Parity {
    fn add(&mut self, a: &[f32], b: &[f32]) {
        self.n_tok += 1;
        for (a, b) in a.iter().zip(b) {
            let difference = f64::from(*a - *b).abs();
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            self.logit_difference = self.logit_difference.max(difference);
        }
        let best = |x: &[f32]| (0..x.len()).max_by(|&i, &j| x[i].total_cmp(&x[j]));
        self.n_top1 += (best(a) == best(b)) as usize;
        let log_sum = |x: &[f32]| {
            let top = x.iter().fold(f32::NEG_INFINITY, |top, &x| top.max(x)) as f64;
            top + x.iter().map(|&x| (f64::from(x) - top).exp()).sum::<f64>().ln()
        };
        let (of_a, of_b) = (log_sum(a), log_sum(b));
        let terms = a.iter().zip(b).map(|(&a, &b)| {
            let (log_a, log_b) = (f64::from(a) - of_a, f64::from(b) - of_b);
            log_a.exp() * (log_a - log_b)
        });
        self.divergence += terms.sum::<f64>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_in_one_logit_is_seen_in_every_figure() {
        let mut same = Parity::default();
        same.add(&[1.0, 2.0, -1.0], &[1.0, 2.0, -1.0]);
        assert_eq!((same.logit_difference, same.n_top1, same.divergence), (0.0, 1, 0.0));
        let mut other = Parity::default();
        other.add(&[1.0, 2.0, -1.0], &[2.5, 2.0, -1.0]);
        assert_eq!((other.logit_difference, other.n_top1), (1.5, 0));
        assert!(other.divergence > 0.1);
        let mut broken = Parity::default();
        broken.add(&[1.0, 2.0], &[f32::NAN, 2.0]);
        assert_eq!(broken.logit_difference, f64::INFINITY);
    }
}
