//! Measuring and generating with whole models: what must hold whatever the layers are.

use crate::data::{Document, Encoded, Part};
use crate::error::Result;
use crate::eval::{
    DocScore, EvalSettings, FimSettings, Subject, Summary, fim_exact_match, measure,
};
use crate::generate::sample::{Sampling, pick};
use crate::generate::{GenerateSettings, generate, generate_many};
use crate::model::config::Config;
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::tensor::gpu::later::wait;
use crate::tensor::rng::Rng;
use crate::text::tokenizer::BpeTrainer;
use crate::text::tokenizer::{Special, Tokenizer};
use crate::train::{StepSettings, Trainer};
use serde_json::{Value, json};
use std::ops::ControlFlow;

const N_VOCAB: usize = 40;

/// `measure`, waited for.
fn measured(
    model: &Model,
    weights: &Weights,
    docs: &[Encoded],
    settings: &EvalSettings,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<DocScore>> {
    wait(measure(model, weights, docs, settings, on_progress))
}

/// Every mixer alone and all together, with every kind of feed-forward.
fn configs() -> Vec<Value> {
    let own = |layers: Value, n_vocab: usize| {
        json!({
            "model_type": "elapid", "vocab_size": n_vocab, "d_model": 16, "layers": layers,
            "tied": true, "eps": 1e-3, "init_std": 0.2, "n_ctx": 64,
            "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba3": {"d_state": 8, "d_head": 8, "n_group": 2, "expand": 2, "rank": 2,
                       "rope_fraction": 1.0, "out_norm": true, "decay": "softplus"},
            "attention": {"n_head": 4, "n_kv_head": 2, "d_head": 6, "window": 6,
                          "rope_base": 5000.0, "qk_norm": true},
            "dense": {"d_ff": 24, "activation": "gelu"},
            "experts": {"n_expert": 4, "n_used": 2, "d_ff": 8, "d_shared": 12},
        })
    };
    let alone = ["mamba1", "mamba2", "mamba3", "attention", "short_conv"];
    let mut list: Vec<Value> =
        alone.iter().map(|mixer| own(json!([mixer, mixer]), N_VOCAB)).collect();
    list.push(own(
        json!([
            "mamba1",
            {"mixer": "short_conv", "feed_forward": "experts"},
            {"mixer": "mamba2", "feed_forward": "none"},
            "attention"
        ]),
        N_VOCAB,
    ));
    list
}

fn build(device: &Device, config: &Value) -> (Model, Weights) {
    let mut config = Config::from_json("test", &config.to_string()).unwrap();
    config.init_std = 0.3;
    let model = Model::new(config);
    let weights = Weights::init(device, model.specs(), 7);
    (model, weights)
}

fn tokens(n_tok: usize, seed: u64) -> Vec<u32> {
    let rng = Rng::new(seed, 1);
    (0..n_tok as u64).map(|n| rng.below(n, N_VOCAB as u64) as u32).collect()
}

/// A document of random tokens of which all but the first are learned.
fn doc(name: &str, n_tok: usize, seed: u64) -> Encoded {
    let learned = (0..n_tok).map(|at| at > 0).collect();
    Encoded {
        name: name.into(),
        language: if seed.is_multiple_of(2) { "Rust" } else { "text" },
        n_bytes: 3 * n_tok,
        ids: tokens(n_tok, seed),
        learned,
    }
}

/// Negative log-likelihood of `ids[at]` behind `ids[from..at]`, and whether it was the best guess.
fn nll(model: &Model, weights: &Weights, ids: &[u32], from: usize, at: usize) -> (f64, bool) {
    let tape = Tape::off();
    let batch = Batch::from_sequences(&[&ids[from..at]]);
    let hidden = model.forward(&tape, weights, &batch, None, ForwardOptions::default()).unwrap();
    let logits = model.logits(&tape, weights, &hidden.hidden);
    let logits = &logits.value().f32()[(at - from - 1) * N_VOCAB..];
    let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let target = logits[ids[at] as usize];
    (sum.ln() - f64::from(target), logits.iter().all(|&l| l <= target))
}

/// The first token that is read when token `at` is scored.
fn read_from(at: usize, settings: &EvalSettings) -> usize {
    let step = settings.context - settings.overlap;
    let window = at.saturating_sub(settings.context).div_ceil(step);
    window * step
}

fn settings(context: usize, overlap: usize, n_tok_batch: usize) -> EvalSettings {
    EvalSettings { context, overlap, n_tok_batch }
}

#[test]
fn windows_equal_a_plain_loop_over_tokens_for_every_mixer() {
    let device = Device::cpu(2).unwrap();
    for config in configs() {
        let (model, weights) = build(&device, &config);
        let mut docs = vec![doc("a", 23, 1), doc("b", 1, 2), doc("c", 2, 3), doc("d", 8, 4)];
        // A prompt of eleven tokens, and a gap.
        docs[0].learned[..11].fill(false);
        docs[0].learned[15] = false;
        for settings in [settings(8, 4, 20), settings(5, 0, 1), settings(7, 6, 1000)] {
            let scores = measured(&model, &weights, &docs, &settings, &mut |_, _| {}).unwrap();
            for (doc, score) in docs.iter().zip(&scores) {
                let learned = (1..doc.ids.len()).filter(|&at| doc.learned[at]);
                let found: Vec<(f64, bool)> = learned
                    .map(|at| nll(&model, &weights, &doc.ids, read_from(at, &settings), at))
                    .collect();
                let sum: f64 = found.iter().map(|token| token.0).sum();
                assert!((score.nll - sum).abs() < 1e-3, "{settings:?}: {} for {sum}", score.nll);
                assert_eq!(score.n_tok, found.len());
                assert_eq!(score.n_top1, found.iter().filter(|token| token.1).count());
                assert!((score.blocks.iter().sum::<f64>() - score.nll).abs() < 1e-9);
            }
        }
    }
}

#[test]
fn every_learned_token_is_scored_once_for_awkward_lengths() {
    let device = Device::cpu(1).unwrap();
    let (model, weights) = build(&device, &configs()[0]);
    for (context, overlap) in [(1, 0), (2, 1), (4, 0), (4, 2), (6, 5)] {
        let docs: Vec<Encoded> = (0..20).map(|n| doc("d", n, n as u64)).collect();
        let settings = settings(context, overlap, 9);
        let mut last = (0, 0);
        let scores = measured(&model, &weights, &docs, &settings, &mut |done, total| {
            assert!(done > last.0 && done <= total);
            last = (done, total);
        });
        for (n_tok, score) in scores.unwrap().iter().enumerate() {
            assert_eq!(score.n_tok, n_tok.saturating_sub(1), "{context} {overlap}: {n_tok}");
        }
        assert!(last.0 == last.1 && last.0 > 0);
    }
}

#[test]
fn one_window_is_the_loss_of_the_model() {
    let device = Device::cpu(2).unwrap();
    let (model, weights) = build(&device, &configs()[4]);
    let docs = [doc("a", 17, 1)];
    let score =
        &measured(&model, &weights, &docs, &EvalSettings::new(64), &mut |_, _| {}).unwrap()[0];
    let batch = Batch::from_sequences(&[&docs[0].ids[..16]]);
    let targets = Targets { ids: &docs[0].ids[1..], weights: &[1.0; 16], norm: 16.0 };
    let out = model.loss(&Tape::off(), &weights, &batch, &targets, ForwardOptions::default());
    let loss = f64::from(out.unwrap().loss.value().f32()[0]);
    assert!((score.nll / 16.0 - loss).abs() < 1e-6);
    let summary = Summary::of(std::slice::from_ref(score)).unwrap();
    assert!((summary.total.loss() - loss).abs() < 1e-6);
    assert!((summary.total.perplexity() - loss.exp()).abs() < 1e-4);
    let bits = score.nll / 51.0 / std::f64::consts::LN_2;
    assert!((summary.total.bits_per_byte() - bits).abs() < 1e-12);
}

#[test]
fn measures_have_the_same_bits_on_any_number_of_threads() {
    let run = |n_threads| -> Vec<DocScore> {
        let device = Device::cpu(n_threads).unwrap();
        let (model, weights) = build(&device, &configs()[4]);
        let docs: Vec<Encoded> = (0..9).map(|n| doc("d", 5 * n + 1, n as u64)).collect();
        measured(&model, &weights, &docs, &settings(16, 8, 40), &mut |_, _| {}).unwrap()
    };
    assert!(run(1) == run(2) && run(1) == run(3));
}

#[test]
fn languages_are_summed_and_what_cannot_be_measured_is_an_error() {
    let device = Device::cpu(1).unwrap();
    let (model, weights) = build(&device, &configs()[0]);
    let docs = [doc("a", 9, 1), doc("b", 20, 2), doc("c", 5, 3)];
    let scores = measured(&model, &weights, &docs, &EvalSettings::new(8), &mut |_, _| {}).unwrap();
    let summary = Summary::of(&scores).unwrap();
    let names: Vec<&str> = summary.languages.iter().map(|language| language.0).collect();
    assert_eq!(names, ["Rust", "text"], "that of the most bytes first");
    assert_eq!((summary.languages[1].1.n_docs, summary.languages[1].1.n_tok), (2, 12));
    assert_eq!((summary.total.n_docs, summary.total.n_tok, summary.total.n_bytes), (3, 31, 102));
    assert_eq!(summary.interval, None, "102 bytes are too little");
    assert!(Summary::of(&[]).is_err());
    let mut quiet = |_: usize, _: usize| {};
    assert!(measured(&model, &weights, &docs, &settings(8, 8, 10), &mut quiet).is_err());
    let mut marked = docs[0].clone();
    marked.learned.pop();
    assert!(measured(&model, &weights, &[marked], &EvalSettings::new(8), &mut quiet).is_err());
    let mut foreign = docs[0].clone();
    foreign.ids[3] = N_VOCAB as u32;
    assert!(measured(&model, &weights, &[foreign], &EvalSettings::new(8), &mut quiet).is_err());
    // A prompt alone asks for nothing.
    let mut prompt = docs[0].clone();
    prompt.learned.fill(false);
    let scores = measured(&model, &weights, &[prompt], &EvalSettings::new(8), &mut quiet).unwrap();
    assert_eq!((scores[0].n_tok, scores[0].nll), (0, 0.0));
    assert!(Summary::of(&scores).is_err());
}

/// Logits behind the last of these tokens, from the whole sequence.
fn whole(model: &Model, weights: &Weights, ids: &[u32]) -> Vec<f32> {
    let tape = Tape::off();
    let batch = Batch::from_sequences(&[ids]);
    let hidden = model.forward(&tape, weights, &batch, None, ForwardOptions::default()).unwrap();
    let logits = model.logits(&tape, weights, &hidden.hidden);
    logits.value().f32()[(ids.len() - 1) * N_VOCAB..].to_vec()
}

/// How far the largest logit is above the second.
fn lead(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted[N_VOCAB - 1] - sorted[N_VOCAB - 2]
}

#[test]
fn generated_tokens_are_those_of_whole_sequences_for_every_mixer() {
    let device = Device::cpu(2).unwrap();
    for config in configs() {
        let (model, weights) = build(&device, &config);
        let prompts = [tokens(7, 1), tokens(1, 2), tokens(20, 3)];
        let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
        for sampling in [Sampling::greedy(), Sampling { top_k: Some(12), ..Sampling::plain(3) }] {
            let settings = GenerateSettings { n_max: 14, sampling, stops: vec![] };
            let go = |_: usize, _: u32| ControlFlow::Continue(());
            let many = generate_many(&model, &weights, &prompts, &settings, go).unwrap();
            for (idx, (prompt, got)) in prompts.iter().zip(&many).enumerate() {
                assert_eq!(got.len(), 14);
                let mut ids = prompt.to_vec();
                for (n, &id) in got.iter().enumerate() {
                    let logits = whole(&model, &weights, &ids);
                    let counter = (idx as u64) << 32 | n as u64;
                    let want = pick(&logits, &sampling, counter).unwrap();
                    let is_close = sampling.temperature == 0.0 && lead(&logits) < 1e-3;
                    assert!(id == want || is_close, "{config}: token {n} of {idx}: {id} {want}");
                    ids.push(id);
                }
            }
            let one = generate(&model, &weights, prompts[0], &settings, |_| go(0, 0)).unwrap();
            assert_eq!(one, many[0]);
        }
    }
}

#[test]
fn sequences_end_at_stops_at_breaks_and_at_the_limit_without_touching_the_others() {
    let device = Device::cpu(1).unwrap();
    let (model, weights) = build(&device, &configs()[4]);
    let prompts = [tokens(5, 1), tokens(9, 2), tokens(3, 3)];
    let prompts: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..]).collect();
    let mut settings = GenerateSettings { n_max: 20, sampling: Sampling::plain(5), stops: vec![] };
    let go = |_: usize, _: u32| ControlFlow::Continue(());
    let free = generate_many(&model, &weights, &prompts, &settings, go).unwrap();
    settings.stops = vec![free[0][4]];
    let mut heard: Vec<Vec<u32>> = vec![Vec::new(); 3];
    let got = generate_many(&model, &weights, &prompts, &settings, |idx, id| {
        heard[idx].push(id);
        if idx == 1 && heard[1].len() == 3 { ControlFlow::Break(()) } else { go(idx, id) }
    });
    let got = got.unwrap();
    assert_eq!(got, heard, "what is told is what is returned");
    for (idx, (got, free)) in got.iter().zip(&free).enumerate() {
        let n_stop = free.iter().position(|id| settings.stops.contains(id)).unwrap_or(20);
        let n_want = if idx == 1 { n_stop.min(3) } else { n_stop };
        assert_eq!(got[..], free[..n_want], "sequence {idx}");
    }
    assert!(got[0].len() < 20, "the stop was met");
    settings.n_max = 0;
    assert_eq!(
        generate_many(&model, &weights, &prompts, &settings, go).unwrap(),
        vec![Vec::<u32>::new(); 3]
    );
    assert!(generate(&model, &weights, &[], &settings, |_| go(0, 0)).is_err());
    assert!(generate_many(&model, &weights, &[], &settings, go).unwrap().is_empty());
}

/// A tokenizer with tokens for fill in the middle, or without.
fn tokenizer(specials: &[&str], text: &str) -> Tokenizer {
    let specials = specials.iter().map(|token| token.to_string()).collect();
    let trainer = BpeTrainer { n_vocab: 300, min_count: 2, specials };
    Tokenizer::train(&trainer, "gpt-2", &mut [text].into_iter(), &mut |_, _| {}).unwrap()
}

const SPECIALS: [&str; 4] = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

fn whole_doc(name: &str, text: &str) -> Document {
    let part = Part { text: text.into(), learned: true, special: false };
    Document { name: name.into(), language: "Rust", parts: vec![part] }
}

#[test]
fn a_model_that_has_learned_the_middle_by_heart_fills_every_hole() {
    let text = "fn alpha_beta() {\n    let first = 1;\n}\n";
    let tokenizer = tokenizer(&SPECIALS, &text.repeat(9));
    let device = Device::cpu(2).unwrap();
    let mut config = configs()[2].clone();
    config["vocab_size"] = json!(tokenizer.n_vocab());
    config["attention"]["window"] = json!(64);
    let (model, weights) = build(&device, &config);
    let docs = [whole_doc("a.rs", text), whole_doc("short", "x\ny\n")];
    let settings = FimSettings::new(1, 64);
    let run = |model: &Model, weights: &Weights| {
        let subject = Subject { model, weights, tokenizer: &tokenizer };
        fim_exact_match(subject, &docs, &settings, &mut |_, _| {}).unwrap()
    };
    let before = run(&model, &weights);
    assert_eq!((before.docs[0].n_holes, before.docs[0].n_exact), (1, 0));
    assert_eq!(before.skipped.len(), 1);
    assert!(before.skipped[0].1.contains("long enough"));
    // What the prompt must be, put together by hand: the one hole is the second line.
    let encode = |text: &str| tokenizer.encode(text, Special::Plain).unwrap();
    let (prefix, suffix) = (encode("fn alpha_beta() {\n"), encode("\n}\n"));
    let mut ids = vec![0, 1];
    ids.extend(prefix);
    ids.push(2);
    ids.extend(suffix);
    ids.push(3);
    let n_prompt = ids.len();
    ids.extend(encode("    let first = 1;"));
    ids.push(0);
    let mut trainer = Trainer::new(model, weights);
    let mut step = StepSettings::default();
    step.adamw.lr = 0.01;
    let factors: Vec<f32> =
        (1..ids.len()).map(|at| if at >= n_prompt { 1.0 } else { 0.0 }).collect();
    let targets = Targets { ids: &ids[1..], weights: &factors, norm: factors.iter().sum() };
    let batch = Batch::from_sequences(&[&ids[..ids.len() - 1]]);
    for _ in 0..80 {
        trainer.step(&batch, &targets, &step).unwrap();
    }
    let after = run(&trainer.model, &trainer.weights);
    assert_eq!((after.docs[0].n_holes, after.docs[0].n_exact), (1, 1));
}

#[test]
fn without_tokens_for_it_every_document_is_skipped_with_the_reason() {
    let text = "fn alpha_beta() {\n    let first = 1;\n}\n";
    let tokenizer = tokenizer(&SPECIALS[..1], &text.repeat(9));
    let device = Device::cpu(1).unwrap();
    let mut config = configs()[0].clone();
    config["vocab_size"] = json!(tokenizer.n_vocab());
    let (model, weights) = build(&device, &config);
    let subject = Subject { model: &model, weights: &weights, tokenizer: &tokenizer };
    let docs = [whole_doc("a.rs", text)];
    let report = fim_exact_match(subject, &docs, &FimSettings::new(2, 64), &mut |_, _| {});
    let report = report.unwrap();
    assert!(report.docs.is_empty());
    assert!(report.skipped[0].1.contains("no tokens for fill in the middle"));
}
