//! Engines with small models: what must hold whatever the layers are.

use super::*;
use crate::generate::sample::Sampling;
use crate::model::config::Config;
use crate::model::lora::Module;
use crate::tensor::Tensor;
use crate::tensor::rng::Rng;
use crate::text::tokenizer::BpeTrainer;
use crate::text::tokenizer::Special;
use serde_json::{Value, json};

/// Attention, Mamba-1, Mamba-2, and all of them with experts.
const FAMILIES: [&str; 4] = ["attention", "mamba1", "mamba2", "hybrid"];

fn tokenizer() -> Arc<Tokenizer> {
    let text = "the cat sat on the mat; the cat ate the rat. {\"name\": \"a\", \"n\": 12} [1, 2]";
    let specials = vec!["<|endoftext|>".to_string()];
    let trainer = BpeTrainer { n_vocab: 300, min_count: 2, specials };
    let mut tokenizer =
        Tokenizer::train(&trainer, "gpt-2", &mut [text].into_iter(), &mut |_, _| {}).unwrap();
    tokenizer.set_specials(None, Some("<|endoftext|>"));
    Arc::new(tokenizer)
}

fn config(family: &str, n_vocab: usize) -> Config {
    let layers = match family {
        "hybrid" => json!([
            "mamba1",
            {"mixer": "short_conv", "feed_forward": "experts"},
            {"mixer": "mamba2", "feed_forward": "none"},
            "attention"
        ]),
        "wide" => json!(["attention", "attention"]),
        mixer => json!([mixer, mixer]),
    };
    let d_head = if family == "wide" { 16 } else { 6 };
    let config: Value = json!({
        "model_type": "elapid", "vocab_size": n_vocab, "d_model": 16, "layers": layers,
        "tied": true, "eps": 1e-3, "init_std": 0.2, "n_ctx": 64,
        "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2,
                   "delta_min": 0.002, "delta_max": 0.2},
        "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2,
                   "delta_min": 0.002, "delta_max": 0.2},
        "attention": {"n_head": 4, "n_kv_head": 2, "d_head": d_head, "rope_base": 5000.0,
                      "qk_norm": true},
        "dense": {"d_ff": 24, "activation": "gelu"},
        "experts": {"n_expert": 4, "n_used": 2, "d_ff": 8, "d_shared": 12},
    });
    let mut config = Config::from_json("test", &config.to_string()).unwrap();
    config.init_std = 0.3;
    config
}

const SETTINGS: EngineSettings =
    EngineSettings { n_slots: 4, n_waiting_max: 8, context: 1024, snapshot_bytes_max: 1 << 26 };

fn engine_with(family: &str, settings: EngineSettings) -> Engine {
    let (device, tokenizer) = (Device::cpu(2).unwrap(), tokenizer());
    let model = Model::new(config(family, tokenizer.n_vocab()));
    let weights = Weights::init(&device, model.specs(), 7);
    Engine::new(model, weights, tokenizer, settings).unwrap()
}

fn engine(family: &str) -> Engine {
    engine_with(family, SETTINGS)
}

fn tokens(n_tok: usize, seed: u64) -> Vec<u32> {
    let rng = Rng::new(seed, 1);
    (0..n_tok as u64).map(|n| 1 + rng.below(n, 250) as u32).collect()
}

fn request(prompt: &[u32], n_max: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        n_max,
        sampling: Sampling::greedy(),
        logit_bias: vec![],
        stop_tokens: vec![],
        dry_breakers: vec![],
        stop_texts: vec![],
        constraint: None,
        adapters: vec![],
        n_top: 3,
        n_lookup: 0,
        special: Special::Parse,
        scores_prompt: false,
    }
}

/// All that came of one request.
#[derive(Clone, Debug)]
struct Answer {
    tokens: Vec<Token>,
    finish: Finish,
}

impl Answer {
    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    fn text(&self) -> String {
        let texts = self.tokens.iter().map(|token| &token.text[..]);
        texts.chain([&self.finish.text[..]]).collect()
    }

    /// Every number that depends on logits, to the bit.
    fn bits(&self) -> Vec<Vec<(u32, u32)>> {
        let bits = |token: &Token| {
            let all = [(token.id, token.logprob)].into_iter().chain(token.top.iter().copied());
            all.map(|(id, logprob)| (id, logprob.to_bits())).collect()
        };
        self.tokens.iter().map(bits).collect()
    }
}

/// Answers to all of them, taken at once.
fn ask_all(engine: &mut Engine, requests: &[Request]) -> Vec<Answer> {
    let ids: Vec<RequestId> =
        requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut said: Vec<(Vec<Token>, Option<Finish>)> = vec![(Vec::new(), None); ids.len()];
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            let answer = &mut said[ids.iter().position(|other| *other == id).unwrap()];
            assert!(answer.1.is_none(), "nothing follows the end");
            match event {
                Event::Prompt { n_done, n_cached, .. } => assert!(n_cached <= n_done),
                Event::Token(token) => answer.0.push(token),
                Event::Done(finish) => answer.1 = Some(finish),
            }
        }
    }
    let answers = said.into_iter();
    answers.map(|(tokens, finish)| Answer { tokens, finish: finish.unwrap() }).collect()
}

fn ask(engine: &mut Engine, request: Request) -> Answer {
    ask_all(engine, &[request]).pop().unwrap()
}

fn n_computed(engine: &Engine) -> u64 {
    engine.stats().n_prompt_tok
}

#[test]
fn a_warm_answer_has_the_bits_of_a_cold_one_for_every_family() {
    for family in FAMILIES {
        let (mut warm, prompt) = (engine(family), tokens(700, 1));
        let first = ask(&mut warm, request(&prompt, 4));
        assert_eq!((first.finish.n_cached, n_computed(&warm)), (0, 700));
        // An edit at 300 leaves two pieces; one more token at the end all but the rest.
        let mut edited = prompt.clone();
        edited[300] = 255;
        let longer = [&prompt[..], &[9]].concat();
        for (prompt, n_cached) in [(&edited, 256), (&longer, 640), (&prompt, 640), (&edited, 640)] {
            let before = n_computed(&warm);
            let got = ask(&mut warm, request(prompt, 4));
            assert_eq!(got.finish.n_cached, n_cached, "{family}");
            assert_eq!(n_computed(&warm) - before, (prompt.len() - n_cached) as u64);
            let want = ask(&mut engine(family), request(prompt, 4));
            assert_eq!(got.bits(), want.bits(), "{family}: {n_cached} of {}", prompt.len());
            assert_eq!(got.finish.n_tok, 4);
        }
    }
}

#[test]
fn a_prompt_that_ends_with_a_piece_computes_that_piece_again() {
    let (mut engine, prompt) = (engine("hybrid"), tokens(256, 2));
    let first = ask(&mut engine, request(&prompt, 3));
    let again = ask(&mut engine, request(&prompt, 3));
    assert_eq!((again.finish.n_cached, n_computed(&engine)), (128, 256 + 128));
    assert_eq!(first.bits(), again.bits());
    assert_eq!(engine.stats().n_snapshots, 2);
    let longer = [&prompt[..], &[1]].concat();
    assert_eq!(ask(&mut engine, request(&longer, 1)).finish.n_cached, 256);
}

#[test]
fn a_warm_up_reads_whole_pieces_and_says_nothing() {
    let (mut engine, prompt) = (engine("mamba2"), tokens(300, 3));
    let warm_up = ask(&mut engine, request(&prompt, 0));
    assert_eq!((warm_up.tokens.len(), &warm_up.finish.reason), (0, &Reason::Length));
    assert_eq!((warm_up.finish.n_prompt, n_computed(&engine)), (300, 256));
    assert_eq!(ask(&mut engine, request(&prompt, 0)).finish.n_cached, 256);
    assert_eq!(ask(&mut engine, request(&prompt[..5], 0)).finish.reason, Reason::Length);
    assert_eq!(n_computed(&engine), 256);
    assert_eq!(ask(&mut engine, request(&prompt, 2)).finish.n_cached, 256);
}

#[test]
fn what_was_read_for_one_request_serves_another_on_its_way_and_after_a_cancel() {
    let (mut engine, prompt) = (engine("attention"), tokens(600, 4));
    let answers = ask_all(&mut engine, &[request(&prompt, 2), request(&prompt, 2)]);
    assert_eq!(n_computed(&engine), 600 + 88, "the second found all whole pieces");
    assert_eq!(answers[0].bits(), answers[1].bits());
    let other = tokens(600, 5);
    let id = engine.submit(request(&other, 2)).unwrap();
    engine.step();
    engine.step();
    engine.cancel(id);
    assert!(engine.is_idle() && engine.step().is_empty());
    assert_eq!(ask(&mut engine, request(&other, 1)).finish.n_cached, 256);
}

#[test]
fn other_adapters_and_other_scales_share_no_snapshots() {
    let prompt = tokens(256, 6);
    let of = |adapters: &[(usize, f32)]| {
        let bits: Vec<(usize, u32)> = adapters.iter().map(|it| (it.0, it.1.to_bits())).collect();
        snapshots::keys(&bits, &prompt)
    };
    let lists =
        [of(&[]), of(&[(0, 1.0)]), of(&[(1, 1.0)]), of(&[(0, 0.5)]), of(&[(0, 1.0), (1, 1.0)])];
    for (idx, keys) in lists.iter().enumerate() {
        assert_eq!(keys.len(), 2);
        for other in &lists[..idx] {
            assert!(keys.iter().all(|key| !other.contains(key)));
        }
    }
}

#[test]
fn snapshots_keep_within_their_bytes_and_the_least_recently_used_go_first() {
    let n_state = {
        let mut engine = engine("mamba1");
        ask(&mut engine, request(&tokens(128, 1), 0));
        engine.stats().snapshot_bytes
    };
    let budget = EngineSettings { snapshot_bytes_max: 5 * n_state + 7, ..SETTINGS };
    let mut engine = engine_with("mamba1", budget);
    let (a, b, c) = (tokens(260, 1), tokens(260, 2), tokens(260, 3));
    let mut warm = |prompt: &[u32]| -> usize {
        let n_cached = ask(&mut engine, request(prompt, 0)).finish.n_cached;
        let stats = engine.stats();
        assert!(stats.snapshot_bytes <= 5 * n_state + 7);
        assert_eq!(stats.snapshot_bytes, stats.n_snapshots * n_state);
        n_cached
    };
    assert_eq!((warm(&a), warm(&b)), (0, 0));
    assert_eq!((warm(&a), warm(&c)), (256, 0), "c pushes one of b out");
    assert_eq!(warm(&a), 256);
    assert_eq!(warm(&c), 256);
    assert_eq!(warm(&b[..128]), 0, "its beginning went");
    assert_eq!(warm(&tokens(900, 4)), 0, "longer than the budget");
    assert_eq!(warm(&tokens(900, 4)), 896, "its end is always there");
    // Thinned towards the beginning, not cut.
    let mut edited = tokens(900, 4);
    edited[500] = 255;
    let n_cached = warm(&edited);
    assert!(n_cached > 0 && n_cached < 500, "{n_cached}");
    let none = EngineSettings { snapshot_bytes_max: 0, ..SETTINGS };
    let mut engine = engine_with("mamba1", none);
    ask(&mut engine, request(&a, 1));
    assert_eq!(ask(&mut engine, request(&a, 1)).finish.n_cached, 0);
}

#[test]
fn what_snapshots_share_is_counted_once_and_freed_with_the_last() {
    let bytes_of = |n_tok: usize| {
        let mut engine = engine("attention");
        ask(&mut engine, request(&tokens(n_tok, 1), 0));
        engine.stats().snapshot_bytes
    };
    let n_page = bytes_of(128);
    assert!(n_page > 0);
    assert_eq!(bytes_of(640), 5 * n_page, "five snapshots of five pages");
    // Nine pages of room hold prompts of five and seven that share three.
    let budget = EngineSettings { snapshot_bytes_max: 9 * n_page, ..SETTINGS };
    let mut engine = engine_with("attention", budget);
    let a = tokens(640, 1);
    let b = [&a[..384], &tokens(600, 2)].concat();
    ask(&mut engine, request(&a, 0));
    ask(&mut engine, request(&b, 0));
    let stats = engine.stats();
    assert_eq!((stats.n_snapshots, stats.snapshot_bytes), (9, 9 * n_page));
    assert_eq!(ask(&mut engine, request(&b, 1)).finish.n_cached, 896);
    for seed in 3..6 {
        assert_eq!(ask(&mut engine, request(&tokens(1000, seed), 0)).finish.n_cached, 0);
        assert!(engine.stats().snapshot_bytes <= 9 * n_page);
        assert_eq!(engine.stats().snapshot_bytes, engine.snapshots.recount());
        assert_eq!(ask(&mut engine, request(&tokens(1000, seed), 0)).finish.n_cached, 896);
    }
    let stats = engine.stats();
    assert!(stats.n_snapshots >= 7 && stats.snapshot_bytes >= 7 * n_page);
}

#[test]
fn caches_of_less_precision_answer_warm_as_cold() {
    let prompt = tokens(300, 1);
    let make = |cache| engine("wide").with_cache(cache).unwrap();
    let exact = ask(&mut make(CacheType::F32), request(&prompt, 4));
    for cache in [CacheType::F16, CacheType::Q8_0] {
        let mut engine = make(cache);
        let (cold, warm) =
            (ask(&mut engine, request(&prompt, 4)), ask(&mut engine, request(&prompt, 4)));
        assert_eq!((warm.finish.n_cached, cold.bits()), (256, warm.bits()));
        assert_ne!(cold.bits(), exact.bits());
        assert!((cold.tokens[0].logprob - exact.tokens[0].logprob).abs() < 0.05);
    }
    assert!(engine("attention").with_cache(CacheType::Q8_0).is_err(), "no whole blocks");
}

#[test]
fn answers_do_not_depend_on_what_runs_beside_them() {
    for family in FAMILIES {
        let requests: Vec<Request> = (0..7)
            .map(|n| Request {
                sampling: Sampling { top_k: Some(40), ..Sampling::plain(n) },
                n_lookup: (n % 3) as usize * 4,
                stop_tokens: vec![30],
                ..request(&tokens(100 + 90 * n as usize, n), 24)
            })
            .collect();
        let together = ask_all(&mut engine(family), &requests);
        for (request, got) in requests.iter().zip(&together) {
            let alone = ask(&mut engine(family), request.clone());
            assert_eq!((got.ids(), got.text()), (alone.ids(), alone.text()), "{family}");
            assert_eq!(got.finish.reason, alone.finish.reason);
        }
    }
}

#[test]
fn guesses_change_the_number_of_passes_and_not_the_answer() {
    for family in FAMILIES {
        // A prompt that repeats, and penalties that would notice tokens that were taken back.
        let prompt = [tokens(20, 8), tokens(20, 8), tokens(20, 8)].concat();
        for sampling in [
            Sampling::greedy(),
            Sampling { temperature: 0.3, frequency_penalty: 0.1, ..Sampling::plain(3) },
            Sampling { top_k: Some(2), ..Sampling::plain(4) },
        ] {
            let plain = Request { sampling, ..request(&prompt, 60) };
            let want = ask(&mut engine(family), plain.clone());
            let mut engine = engine(family);
            let got = ask(&mut engine, Request { n_lookup: 6, ..plain });
            assert_eq!(got.ids(), want.ids(), "{family} {sampling:?}");
            let Finish { n_guessed, n_accepted, n_tok, .. } = got.finish;
            assert!(n_accepted <= n_guessed && n_tok == 60);
            assert!(n_guessed > 0, "{family} {sampling:?}");
            assert_eq!(want.finish.n_guessed, 0);
        }
    }
}

#[test]
fn guesses_that_are_right_save_passes() {
    let mut engine = engine("mamba1");
    // One token for ever: every guess is right.
    let forced =
        |n_lookup| Request { logit_bias: vec![(5, 1e4)], n_lookup, ..request(&[5, 5, 5, 5], 64) };
    let mut n_steps = |n_lookup| {
        engine.submit(forced(n_lookup)).unwrap();
        let steps = (0..).map(|_| engine.step()).take_while(|events| !events.is_empty());
        steps.count()
    };
    assert_eq!(n_steps(0), 64);
    assert_eq!(n_steps(8), 1 + 63usize.div_ceil(9));
}

#[test]
fn answers_flow_while_prompts_are_read_and_the_short_prompt_comes_first() {
    let mut engine = engine("attention");
    let a = engine.submit(request(&tokens(10, 1), 500)).unwrap();
    engine.step();
    let long = engine.submit(request(&tokens(1000, 2), 2)).unwrap();
    let short = engine.submit(request(&tokens(200, 3), 2)).unwrap();
    let (mut order, mut n_between) = (Vec::new(), 0);
    while !order.contains(&long) {
        let events = engine.step();
        let told: Vec<RequestId> = events.iter().map(|event| event.0).collect();
        n_between = if told.contains(&a) { 0 } else { n_between + 1 };
        assert!(n_between <= 1, "an answer waits for one piece at most");
        let first = events.iter().filter(|event| matches!(event.1, Event::Token(_)));
        order.extend(first.map(|event| event.0).filter(|id| *id != a));
    }
    assert_eq!(order[0], short);
}

#[test]
fn past_the_slots_requests_wait_and_past_the_bound_they_are_refused() {
    let settings = EngineSettings { n_slots: 2, n_waiting_max: 3, ..SETTINGS };
    let mut engine = engine_with("mamba1", settings);
    let ids: Vec<RequestId> =
        (0..5).map(|n| engine.submit(request(&tokens(5, n), 3)).unwrap()).collect();
    assert!(matches!(engine.submit(request(&[1], 3)), Err(Refusal::Full)));
    engine.step();
    let stats = engine.stats();
    assert_eq!((stats.running.len(), stats.n_waiting), (2, 3));
    assert!(matches!(engine.submit(request(&[1], 3)), Err(Refusal::Full)));
    engine.cancel(ids[3]);
    let last = engine.submit(request(&[1], 3)).unwrap();
    let mut done = Vec::new();
    while !engine.is_idle() {
        let over = |event: &(RequestId, Event)| matches!(event.1, Event::Done(_));
        done.extend(engine.step().into_iter().filter(over).map(|event| event.0));
    }
    done.sort();
    assert_eq!(done, [ids[0], ids[1], ids[2], ids[4], last]);
    assert_eq!(engine.stats().n_answer_tok, 15);
    assert_eq!(engine.stats().state_bytes, 0);
}

#[test]
fn what_can_never_be_answered_is_refused_with_its_numbers() {
    let mut engine = engine("mamba1");
    let n_vocab = engine.model().config().n_vocab as u32;
    let bad = |prompt: &[u32]| request(prompt, 4);
    let cases = [
        (bad(&[]), "no tokens"),
        (bad(&tokens(1024, 1)), "1024 tokens, the context holds 1024"),
        (bad(&[n_vocab]), "outside the vocabulary"),
        (Request { logit_bias: vec![(n_vocab, 1.0)], ..bad(&[1]) }, "outside the vocabulary"),
        (Request { logit_bias: vec![(1, f32::NAN)], ..bad(&[1]) }, "bias of token 1 is NaN"),
        (Request { adapters: vec![(0, 1.0)], ..bad(&[1]) }, "no adapter 0"),
        (
            Request { sampling: Sampling { top_p: 2.0, ..Sampling::plain(0) }, ..bad(&[1]) },
            "top-p is 2",
        ),
        (
            Request {
                sampling: Sampling { repeat_penalty: 0.0, ..Sampling::plain(0) },
                ..bad(&[1])
            },
            "repeat penalty is 0",
        ),
    ];
    for (request, want) in cases {
        match engine.submit(request) {
            Err(Refusal::Bad(error)) => assert!(error.report().contains(want), "{error}"),
            other => panic!("{want}: {other:?}"),
        }
    }
    // A full context ends an answer.
    let full = ask(&mut engine, request(&tokens(1020, 1), 50));
    assert_eq!((full.finish.n_tok, full.finish.reason), (4, Reason::Length));
    assert!(engine.submit(request(&tokens(1024, 1), 0)).is_ok());
}

#[test]
fn a_request_that_fails_leaves_the_others_alone() {
    for family in ["attention", "mamba2"] {
        let (device, tokenizer) = (Device::cpu(1).unwrap(), tokenizer());
        let mut config = config(family, tokenizer.n_vocab());
        config.tied = false;
        let make = |first: f32| {
            let model = Model::new(config.clone());
            let mut weights = Weights::init(&device, model.specs(), 7);
            let embed = weights.find(&config.embed_name).unwrap();
            weights.tensor_mut(embed).f32_mut()[250 * config.d_model] = first;
            Engine::new(model, weights, tokenizer.clone(), SETTINGS).unwrap()
        };
        // Whoever reads token 250 is lost. One reads it at once, one forces itself to say it.
        let says = Request { logit_bias: vec![(250, 1e3)], ..request(&[5, 6], 4) };
        let forbids =
            Request { logit_bias: vec![(250, f32::NEG_INFINITY)], ..request(&[5, 6, 7], 9) };
        let requests = [forbids.clone(), request(&[250, 6], 4), says, forbids];
        let answers = ask_all(&mut make(f32::NAN), &requests);
        for (answer, n_tok) in answers[1..3].iter().zip([0, 1]) {
            assert_eq!(answer.tokens.len(), n_tok);
            let Reason::Failed(error) = &answer.finish.reason else { panic!("{answer:?}") };
            assert!(error.report().contains("logit of token 0 is NaN"), "{error}");
        }
        for idx in [0, 3] {
            assert_eq!(answers[idx].finish.reason, Reason::Length);
            assert_eq!(answers[idx].ids(), ask(&mut make(0.1), requests[idx].clone()).ids());
        }
    }
}

#[test]
fn stop_texts_and_stop_tokens_end_an_answer_and_never_show() {
    let mut engine = engine("hybrid");
    let free = ask(&mut engine, Request { sampling: Sampling::plain(2), ..request(&[9, 8], 40) });
    let text = free.text();
    // A stop from the middle of the text, across tokens.
    let at: Vec<usize> = text.char_indices().map(|it| it.0).collect();
    let stop = text[at[at.len() / 2]..at[at.len() / 2 + 3]].to_string();
    let with = |stop_texts: Vec<String>, stop_tokens: Vec<u32>| Request {
        sampling: Sampling::plain(2),
        stop_texts,
        stop_tokens,
        ..request(&[9, 8], 40)
    };
    let got = ask(&mut engine, with(vec!["never there".into(), stop.clone()], vec![]));
    assert_eq!(got.finish.reason, Reason::StopText(stop.clone()));
    assert_eq!(got.text(), text[..text.find(&stop).unwrap()]);
    assert!(got.tokens.len() < 40);
    let got = ask(&mut engine, with(vec![text.clone() + "!"], vec![]));
    assert_eq!((got.text(), got.finish.reason), (text, Reason::Length), "held back to the end");
    let end = free.ids()[7];
    let n_before = free.ids().iter().position(|id| *id == end).unwrap();
    let got = ask(&mut engine, with(vec![], vec![end]));
    assert_eq!((got.ids(), got.finish.reason), (free.ids()[..n_before].to_vec(), Reason::End));
}

#[test]
fn log_probabilities_are_those_of_the_model_whatever_chooses() {
    let mut engine = engine("attention");
    let plain = ask(&mut engine, request(&[9, 8, 7], 1));
    let biased = Request {
        logit_bias: vec![(42, 50.0)],
        sampling: Sampling { temperature: 5.0, ..Sampling::plain(1) },
        n_top: 5,
        ..request(&[9, 8, 7], 1)
    };
    let biased = ask(&mut engine, biased);
    let (plain, biased) = (&plain.tokens[0], &biased.tokens[0]);
    assert_eq!(biased.id, 42);
    assert_eq!((plain.id, plain.logprob), plain.top[0], "greedy takes the likeliest");
    assert_eq!((biased.top.len(), &biased.top[..3]), (5, &plain.top[..]));
    assert!(biased.logprob < plain.logprob && plain.logprob < 0.0);
}

fn random(device: &Device, seed: u64, shape: &[usize]) -> Tensor {
    let rng = Rng::new(seed, 9);
    let numbers = (0..shape.iter().product::<usize>() as u64).map(|n| rng.normal(n) as f32 * 0.5);
    Tensor::from_f32(device, shape, &numbers.collect::<Vec<f32>>())
}

/// An adapter on every matrix but the head.
fn lora(engine: &Engine, seed: u64, rank: usize) -> Lora {
    let weights = engine.adapters.base();
    let is_matrix = |id: &crate::model::weights::ParamId| {
        weights.role(*id) == crate::model::weights::Role::Matrix
            && weights.name(*id).ends_with(".weight")
    };
    let module = |id: crate::model::weights::ParamId| {
        let (d_out, d_in) = weights.tensor(id).dims2();
        let (device, seed) = (engine.device(), seed * 1000 + id.0 as u64);
        Module {
            param: weights.name(id).to_string(),
            a: random(device, seed, &[rank, d_in]),
            b: random(device, seed + 500, &[d_out, rank]),
            magnitude: None,
            alpha: rank as f64,
        }
    };
    let modules = weights.ids().filter(is_matrix).map(module).collect();
    Lora { modules, rslora: false, base: None }
}

#[test]
fn adapters_are_chosen_and_scaled_per_request_and_share_the_base() {
    let mut engine = engine("attention");
    let prompt = tokens(140, 1);
    let with =
        |adapters: &[(usize, f32)]| Request { adapters: adapters.to_vec(), ..request(&prompt, 6) };
    let (one, two) = (lora(&engine, 1, 2), lora(&engine, 2, 3));
    assert_eq!(engine.add_adapter("one", one).unwrap(), 0);
    assert_eq!(engine.add_adapter("two", two).unwrap(), 1);
    assert_eq!(engine.adapters(), [(0, "one"), (1, "two")]);
    let lists: [&[(usize, f32)]; 6] =
        [&[], &[(0, 1.0)], &[(1, 1.0)], &[(0, 0.5)], &[(1, -1.0), (0, 1.0)], &[(0, 0.0)]];
    let requests: Vec<Request> = lists.iter().map(|list| with(list)).collect();
    let answers = ask_all(&mut engine, &requests);
    assert_eq!(answers[0].bits(), answers[5].bits(), "a scale of zero is none");
    for (idx, answer) in answers[..5].iter().enumerate() {
        for other in &answers[..idx] {
            assert_ne!(answer.bits(), other.bits());
        }
        assert_eq!(ask(&mut engine, requests[idx].clone()).bits(), answer.bits());
    }
    // What is merged into the base says the same, but for rounding.
    for (list, got) in lists.iter().zip(&answers) {
        let mut merged = engine_of(engine.adapters.base().share());
        for (idx, scale) in *list {
            let mut lora = lora(&merged, *idx as u64 + 1, *idx + 2);
            lora.modules.iter_mut().for_each(|module| module.alpha *= f64::from(*scale));
            let mut weights = merged.adapters.base().share();
            lora.merge_into(&mut weights).unwrap();
            merged = engine_of(weights);
        }
        let want = ask(&mut merged, with(&[]));
        let (got, want) = (&got.tokens[0], &want.tokens[0]);
        assert_eq!(got.id, want.id, "{list:?}");
        assert!((got.logprob - want.logprob).abs() < 1e-3, "{list:?}");
    }
    let (_, weights) = engine.adapters.weights(&[(0, 1.0), (1, 1.0)]).unwrap();
    for id in engine.adapters.base().ids() {
        let [a, b] = [engine.adapters.base(), &weights].map(|weights| weights.tensor(id).bytes());
        assert_eq!(a.as_ptr(), b.as_ptr(), "no copy of the base");
    }
    let none = engine.submit(with(&[(2, 1.0)])).unwrap_err();
    assert!(matches!(none, Refusal::Bad(error) if error.report().contains("0 one, 1 two")));
}

/// An engine of the attention model with other weights.
fn engine_of(weights: Weights) -> Engine {
    let tokenizer = tokenizer();
    let model = Model::new(config("attention", tokenizer.n_vocab()));
    Engine::new(model, weights, tokenizer, SETTINGS).unwrap()
}

#[test]
fn adapters_that_do_not_fit_or_do_not_add_up_are_refused() {
    let mut engine = engine("attention");
    let mut wrong = lora(&engine, 1, 2);
    wrong.modules[0].param = "no.such.weight".into();
    assert!(engine.add_adapter("wrong", wrong).is_err());
    let mut dora = lora(&engine, 1, 2);
    let d_out = dora.modules[0].b.shape()[0];
    dora.modules[0].magnitude = Some(random(engine.device(), 5, &[d_out]));
    engine.add_adapter("dora", dora).unwrap();
    let plain = lora(&engine, 2, 2);
    engine.add_adapter("plain", plain).unwrap();
    let with = |adapters: &[(usize, f32)]| Request {
        adapters: adapters.to_vec(),
        ..request(&[1, 2, 3], 3)
    };
    assert_eq!(ask(&mut engine, with(&[(0, 1.0)])).tokens.len(), 3);
    for (list, words) in [
        (&[(0, 1.0), (1, 1.0)][..], "DoRA"),
        (&[(1, 1.0), (1, 0.5)], "twice"),
        (&[(1, f32::NAN)], "scale NaN"),
    ] {
        match engine.submit(with(list)) {
            Err(Refusal::Bad(error)) => assert!(error.report().contains(words), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_embedding_is_the_mean_of_hidden_rows_brought_to_length_one() {
    for family in FAMILIES {
        let mut engine = engine(family);
        let ids = tokens(300, 1);
        assert!(engine.embed(&[]).is_err());
        assert!(engine.embed(&[1 << 20]).is_err());
        assert!(engine.embed(&tokens(1025, 1)).is_err());
        let got = engine.embed(&ids).unwrap();
        let length: f32 = got.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
        let tape = Tape::off();
        let batch = Batch::from_sequences(&[&ids]);
        let weights = engine.adapters.base();
        let out = engine.model.forward(&tape, weights, &batch, None, Default::default()).unwrap();
        let mut want = vec![0.0f32; got.len()];
        for row in out.hidden.value().f32().chunks(got.len()) {
            want.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        let length = want.iter().map(|x| x * x).sum::<f32>().sqrt();
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want / length).abs() < 1e-4, "{family}: {got} {}", want / length);
        }
    }
}

fn constrained(constraint: Constraint, seed: u64, n_max: usize) -> Request {
    Request {
        sampling: Sampling { temperature: 1.5, ..Sampling::plain(seed) },
        constraint: Some(constraint),
        stop_tokens: vec![],
        special: Special::Plain,
        ..request(&[9, 8, 7], n_max)
    }
}

#[test]
fn a_random_model_answers_with_json_that_the_schema_allows() {
    let mut engine = engine("mamba2");
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["kind", "n", "list"],
        "properties": {
            "kind": {"enum": ["cat", "rat", "bat"]},
            "n": {"type": "integer", "minimum": 3, "maximum": 12},
            "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            "note": {"type": "string", "maxLength": 6},
        },
    });
    for seed in 0..20 {
        let n_lookup = (seed % 2) as usize * 4;
        let request = constrained(Constraint::JsonSchema(schema.clone()), seed, 400);
        let answer = ask(&mut engine, Request { n_lookup, ..request });
        assert_eq!(answer.finish.reason, Reason::End, "{:?}", answer.text());
        let value: Value = serde_json::from_str(&answer.text()).unwrap();
        let map = value.as_object().unwrap();
        assert!(map.keys().all(|key| ["kind", "n", "list", "note"].contains(&key.as_str())));
        assert!(["cat", "rat", "bat"].contains(&map["kind"].as_str().unwrap()));
        assert!((3..=12).contains(&map["n"].as_i64().unwrap()));
        let list = map["list"].as_array().unwrap();
        assert!((1..=3).contains(&list.len()) && list.iter().all(Value::is_boolean));
        let note = map.get("note").map_or("", |note| note.as_str().unwrap());
        assert!(note.chars().count() <= 6);
    }
}

#[test]
fn expressions_and_grammars_hold_and_an_end_comes_only_where_one_may() {
    let mut engine = engine("attention");
    let eog = engine.tokenizer().eog().to_vec();
    // The end of the text is what the model wants most, and gets only where it may.
    let wanting = |constraint: Constraint| Request {
        logit_bias: eog.iter().map(|id| (*id, 100.0)).collect(),
        stop_tokens: eog.clone(),
        ..constrained(constraint, 1, 50)
    };
    let answer = ask(&mut engine, wanting(Constraint::Regex("[ab]{4}c*".into())));
    assert_eq!((answer.text().len(), &answer.finish.reason), (4, &Reason::End));
    assert!(answer.text().bytes().all(|byte| byte == b'a' || byte == b'b'));
    let lark = "start: word (\" \" word)*\nword: /cat|rat/";
    let answer = ask(&mut engine, wanting(Constraint::Lark(lark.into())));
    assert!(["cat", "rat"].contains(&&answer.text()[..]), "{:?}", answer.text());
    // Without the wish it continues to the limit.
    let answer = ask(&mut engine, constrained(Constraint::Regex("a+".into()), 1, 9));
    let is_all_a = answer.text().bytes().all(|byte| byte == b'a');
    assert!(is_all_a && answer.finish.n_tok <= 9);
}

#[test]
fn hostile_constraints_are_errors_in_words() {
    let mut engine = engine("mamba1");
    let nested = |n: usize| (0..n).fold(json!({}), |inner, _| json!({"items": inner}));
    let any_of = |n: usize| json!((0..n).map(|n| json!({"const": n})).collect::<Vec<Value>>());
    let schema = |schema: Value| Constraint::JsonSchema(schema);
    let wrong = [
        schema(json!({"type": "no such type"})),
        schema(json!({"$ref": "http://example.com/schema.json"})),
        schema(json!(12)),
        schema(nested(100)),
        schema(json!({"type": "string", "pattern": "("})),
        schema(json!({"enum": vec!["x".repeat(1000); 300]})),
        Constraint::Regex("(".into()),
        Constraint::Regex("(".repeat(5000)),
        Constraint::Lark("start: undefined_rule".into()),
        Constraint::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        Constraint::Lark("start: ".to_string() + &"(".repeat(900)),
        Constraint::Lark(String::new()),
    ];
    for constraint in wrong {
        let shown: String = format!("{constraint:?}").chars().take(80).collect();
        match engine.submit(constrained(constraint, 0, 4)) {
            Err(Refusal::Bad(error)) => {
                let words = error.report();
                assert!(words.len() < 1000 && !words.contains("backtrace"), "{words}");
            }
            other => panic!("{shown}: {other:?}"),
        }
    }
    // Large but harmless, or harmful only if it were expanded: it may be refused, and must be fast.
    let large = [
        schema(json!({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"})),
        Constraint::Regex("(?:a{1,900}){1,900}b{1,900}".repeat(10)),
        schema(json!({"type": "array", "minItems": 1_000_000_000u64, "items": {"type": "null"}})),
        schema(json!({"type": "array", "maxItems": 1_000_000_000u64, "items": {"type": "null"}})),
        schema(json!({"type": "string", "minLength": 1_000_000_000u64})),
        schema(json!({"allOf": vec![json!({"anyOf": any_of(20)}); 8]})),
        schema(json!({"anyOf": any_of(5000)})),
        schema(json!({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
                      "$ref": "#/$defs/a"})),
        Constraint::Lark(format!("start: {}\"a\"{}", "(".repeat(900), ")".repeat(900))),
        Constraint::Lark("start: start start | \"a\" | \"\"".into()),
        Constraint::Regex("(a|a|aa)*".repeat(30)),
    ];
    for constraint in large {
        if engine.submit(constrained(constraint, 0, 4)).is_ok() {
            while !engine.is_idle() {
                engine.step();
            }
        }
    }
}
