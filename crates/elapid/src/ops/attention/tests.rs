//! Tests of `attention`: formulas in f64, finite differences, windows, segments, caches.

use super::*;
use crate::ops::check::{Input, check_gradients, compare_devices, devices};
use crate::ops::rope::{Rope, RopeScaling, rope};
use crate::tape::Gradients;

fn sizes(n_head: usize, n_kv_head: usize, d_head: usize, window: Option<usize>) -> Attention {
    let scale = 1.0 / (d_head as f32).sqrt();
    Attention { n_head, n_kv_head, d_head, scale, window }
}

/// Queries, keys and values.
fn inputs(config: &Attention, n_tok: usize, deviation: f32) -> [Input; 3] {
    [
        Input::normal(1, &[n_tok, config.q_width()], deviation),
        Input::normal(2, &[n_tok, config.kv_width()], deviation),
        Input::normal(3, &[n_tok, config.kv_width()], 1.0),
    ]
}

/// The output, and the gradients that are wanted of queries, keys and values.
fn run_both(
    qkv: &[Tensor; 3],
    config: &Attention,
    segments: &Segments,
    wanted: [bool; 3],
    dy: &Tensor,
) -> (Tensor, [Option<Tensor>; 3]) {
    let tape = Tape::new();
    let [q, k, v] = [0, 1, 2].map(|key| match wanted[key] {
        true => tape.leaf(key, &qkv[key]),
        false => Var::constant(qkv[key].clone()),
    });
    let y = attention(&tape, &q, &k, &v, config, segments, None);
    let y_value = y.value().clone();
    let mut grads = Gradients::default();
    tape.walk(vec![(y, dy.clone())], &mut grads);
    (y_value, [0, 1, 2].map(|key| grads.get(key).cloned()))
}

fn run(qkv: &[Tensor; 3], config: &Attention, segments: &Segments) -> Tensor {
    let [q, k, v] = qkv.clone().map(Var::constant);
    attention(&Tape::off(), &q, &k, &v, config, segments, None).value().clone()
}

fn run_cached(qkv: &[Tensor; 3], config: &Attention, caches: &mut [&mut KvCache]) -> Tensor {
    assert_eq!(caches.len(), 1);
    let segments = Segments::continuing(&[(qkv[0].shape()[0], caches[0].n_tok())]);
    let [q, k, v] = qkv.clone().map(Var::constant);
    attention(&Tape::off(), &q, &k, &v, config, &segments, Some(caches)).value().clone()
}

fn rows(qkv: &[Tensor; 3], range: Range<usize>) -> [Tensor; 3] {
    qkv.clone().map(|x| x.rows(range.clone()))
}

/// The formula in f64, one score at a time.
fn slow(qkv: &[Tensor; 3], config: &Attention, segments: &Segments) -> Vec<f64> {
    let [q, k, v] = qkv.clone().map(|x| x.f32().iter().map(|x| *x as f64).collect::<Vec<_>>());
    let Attention { n_head, d_head, .. } = *config;
    let mut y = vec![0.0; q.len()];
    for segment in segments.iter() {
        for (i, head) in segment.rows().flat_map(|i| (0..n_head).map(move |h| (i, h))) {
            let kv_head = head / (n_head / config.n_kv_head);
            let first = config.window.map_or(0, |window| (i + 1).saturating_sub(window));
            let keys = first.max(segment.start)..i + 1;
            let q = &q[i * config.q_width() + head * d_head..][..d_head];
            let at = |j: usize| j * config.kv_width() + kv_head * d_head;
            let dot = |j: usize| (0..d_head).map(|c| q[c] * k[at(j) + c]).sum::<f64>();
            let scores: Vec<f64> = keys.clone().map(|j| config.scale as f64 * dot(j)).collect();
            let max = scores.iter().fold(f64::MIN, |max, s| max.max(*s));
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (j, score) in keys.zip(scores) {
                for c in 0..d_head {
                    let weight = (score - max).exp() / sum;
                    y[i * config.q_width() + head * d_head + c] += weight * v[at(j) + c];
                }
            }
        }
    }
    y
}

fn expect_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((got as f64 - want).abs() < tolerance, "{what}, element {at}: {got}, not {want}");
    }
}

fn n_bytes(cache: &KvCache) -> usize {
    cache.pages().map(|page| page.1).sum()
}

#[test]
fn gradients() {
    // (config, lengths of the segments)
    let cases = [
        (sizes(1, 1, 1, None), vec![1]),
        (sizes(2, 1, 3, None), vec![7]),
        (sizes(4, 2, 5, None), vec![N_QUERY - 1, 1, N_QUERY + 1]),
        (sizes(6, 2, 19, Some(4)), vec![33, 2, 40]),
        (sizes(2, 2, 16, None), vec![N_KEY + N_QUERY + 3]),
        (sizes(1, 1, 8, Some(N_KEY)), vec![2 * N_KEY + 70]),
        // Past the edges of the tiles of GPUs.
        (sizes(2, 1, 64, None), vec![1, 63, 64, 65, 130]),
        (sizes(3, 1, 80, Some(33)), vec![66, 31]),
        (sizes(2, 2, 128, Some(70)), vec![100, 32]),
    ];
    for (config, lengths) in cases {
        let segments = Segments::from_lengths(&lengths);
        check_gradients(&inputs(&config, segments.n_tok(), 1.0), |tape, vars| {
            vec![attention(tape, &vars[0], &vars[1], &vars[2], &config, &segments, None)]
        });
    }
}

/// The same numbers as an op leaves them: in bf16 where activations are. Nothing is turned at the
/// first position of a sequence.
fn as_activation(tape: &Tape, x: &Var, d_head: usize) -> Var {
    let table = Rope { base: 1e4, d_rotary: d_head, scaling: RopeScaling::None }.table();
    rope(tape, x, &table, d_head, &Segments::from_lengths(&vec![1; x.value().shape()[0]]))
}

#[test]
fn gradients_of_activations() {
    let cases = [
        (sizes(1, 1, 64, None), vec![1, 63]),
        (sizes(4, 2, 64, None), vec![64, 65, 130, 2]),
        (sizes(3, 1, 64, Some(40)), vec![129]),
        (sizes(2, 1, 128, None), vec![1, 63, 64, 65]),
        (sizes(2, 2, 128, Some(70)), vec![130]),
    ];
    for (config, lengths) in cases {
        let (segments, d_head) = (Segments::from_lengths(&lengths), config.d_head);
        // Numbers that bf16 holds.
        let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
        let inputs = [(1, config.q_width()), (2, config.kv_width()), (3, config.kv_width())]
            .map(|(seed, width)| Input::map(seed, &[segments.n_tok(), width], rounded));
        check_gradients(&inputs, |tape, vars| {
            let [q, k, v] = [0, 1, 2].map(|idx: usize| as_activation(tape, &vars[idx], d_head));
            let y = attention(tape, &q, &k, &v, &config, &segments, None);
            vec![as_activation(tape, &y, d_head)]
        });
    }
}

#[test]
fn forward_agrees_with_the_formula() {
    let device = Device::cpu(2).unwrap();
    let cases = [
        (sizes(1, 1, 1, None), vec![1]),
        (sizes(6, 2, 19, None), vec![33, 1, 64, 5]),
        (sizes(4, 1, 64, Some(7)), vec![3, 100]),
        (sizes(2, 2, 8, None), vec![2 * N_KEY + 1]),
        (sizes(2, 2, 8, Some(N_KEY - 5)), vec![3 * N_KEY]),
    ];
    for (config, lengths) in cases {
        let segments = Segments::from_lengths(&lengths);
        let qkv = inputs(&config, segments.n_tok(), 1.0).map(|x| x.tensor(&device));
        let want = slow(&qkv, &config, &segments);
        expect_close(run(&qkv, &config, &segments).f32(), &want, 3e-6, &format!("{config:?}"));
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 64, None);
    let n_tok = N_KEY + 40;
    // Scores of thousands, of both signs.
    let thirty = |x: f32| 30.0 * x.signum();
    let qkv = [
        Input::map(1, &[n_tok, 128], thirty),
        Input::map(2, &[n_tok, 64], thirty),
        Input::normal(3, &[n_tok, 64], 1.0),
    ]
    .map(|x| x.tensor(&device));
    let want = slow(&qkv, &config, &Segments::from_lengths(&[n_tok]));
    let got = run(&qkv, &config, &Segments::from_lengths(&[n_tok]));
    expect_close(got.f32(), &want, 1e-3, "whole");
    let mut cache = KvCache::new(&device, 1, 64);
    for tok in 0..n_tok {
        let y = run_cached(&rows(&qkv, tok..tok + 1), &config, &mut [&mut cache]);
        expect_close(y.f32(), &want[tok * 128..][..128], 1e-3, "step");
    }
}

#[test]
fn gradients_of_large_scores_are_finite() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(1, 1, 64, None);
    let qkv = inputs(&config, 40, 30.0).map(|x| x.tensor(&device));
    let dy = Input::normal(4, &[40, 64], 1.0).tensor(&device);
    let (_, grads) = run_both(&qkv, &config, &Segments::from_lengths(&[40]), [true; 3], &dy);
    for (idx, grad) in grads.iter().flatten().enumerate() {
        assert!(grad.f32().iter().all(|dx| dx.is_finite()), "input {idx}");
    }
}

#[test]
fn a_gradient_nobody_wants_is_not_computed_and_changes_no_other() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 5, None);
    let segments = Segments::from_lengths(&[40]);
    let qkv = inputs(&config, 40, 1.0).map(|x| x.tensor(&device));
    let dy = Input::normal(4, &[40, 10], 1.0).tensor(&device);
    let numbers = |grad: &Option<Tensor>| grad.as_ref().map(|grad| grad.f32().to_vec());
    let (_, all) = run_both(&qkv, &config, &segments, [true; 3], &dy);
    for idx in 0..3 {
        let mut wanted = [false; 3];
        wanted[idx] = true;
        let (_, one) = run_both(&qkv, &config, &segments, wanted, &dy);
        assert_eq!(numbers(&one[idx]), numbers(&all[idx]), "input {idx}");
        assert_eq!(one.iter().flatten().count(), 1);
    }
}

/// The gradients in f64 for one head and one sequence, one score at a time.
fn slow_backward(qkv: &[Tensor; 3], config: &Attention, dy: &Tensor) -> [Vec<f64>; 3] {
    let f64s = |x: &Tensor| x.f32().iter().map(|x| *x as f64).collect::<Vec<_>>();
    let [q, k, v] = qkv.clone().map(|x| f64s(&x));
    let (dy, d, scale) = (f64s(dy), config.d_head, config.scale as f64);
    let dot = |a: &[f64], i: usize, b: &[f64], j: usize| {
        (0..d).map(|c| a[i * d + c] * b[j * d + c]).sum::<f64>()
    };
    let mut grads = [vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; q.len()]];
    for i in 0..q.len() / d {
        let first = config.window.map_or(0, |window| (i + 1).saturating_sub(window));
        let mut p: Vec<f64> = (first..=i).map(|j| (scale * dot(&q, i, &k, j)).exp()).collect();
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
        let dp: Vec<f64> = (first..=i).map(|j| dot(&dy, i, &v, j)).collect();
        let e: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for (j, (p, dp)) in (first..=i).zip(p.iter().zip(dp)) {
            for c in 0..d {
                grads[0][i * d + c] += scale * p * (dp - e) * k[j * d + c];
                grads[1][j * d + c] += scale * p * (dp - e) * q[i * d + c];
                grads[2][j * d + c] += p * dy[i * d + c];
            }
        }
    }
    grads
}

#[test]
fn gradients_of_a_long_sequence_agree_with_the_formula() {
    let device = Device::cpu(2).unwrap();
    // Chunks of several blocks of keys, the last one cut short.
    let n_tok = N_CHUNK_MAX * N_KEY + 3 * N_QUERY + 1;
    for window in [None, Some(N_CHUNK_MAX * N_KEY + 1), Some(3)] {
        let config = sizes(1, 1, 2, window);
        let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
        let dy = Input::normal(4, &[n_tok, 2], 1.0).tensor(&device);
        let segments = Segments::from_lengths(&[n_tok]);
        let (_, got) = run_both(&qkv, &config, &segments, [true; 3], &dy);
        let want = slow_backward(&qkv, &config, &dy);
        for (idx, (got, want)) in got.iter().flatten().zip(want).enumerate() {
            expect_close(got.f32(), &want, 2e-5, &format!("window {window:?}, input {idx}"));
        }
    }
}

#[test]
fn a_token_changes_nothing_before_it() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 4, None);
    let n_tok = N_KEY + 50;
    let segments = Segments::from_lengths(&[n_tok]);
    let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
    let before = run(&qkv, &config, &segments);
    for tok in [1, N_QUERY - 1, N_QUERY, N_KEY - 1, N_KEY, n_tok - 1] {
        let changed = qkv.clone().map(|x| {
            let mut x = x.to_f32();
            let width = x.shape()[1];
            x.f32_mut()[tok * width..][..width].fill(3.0);
            x
        });
        let after = run(&changed, &config, &segments);
        let n = tok * config.q_width();
        assert!(before.f32()[..n] == after.f32()[..n], "token {tok} reached back");
        assert!(before.f32()[n..] != after.f32()[n..], "token {tok} changed nothing");
    }
}

#[test]
fn a_window_of_w_sees_exactly_w_keys() {
    let device = Device::cpu(1).unwrap();
    for window in [1, 5, N_QUERY, N_KEY, N_KEY + 3] {
        let n_tok = 2 * N_KEY + 20;
        let config = sizes(1, 1, 4, Some(window));
        // Equal scores: the output is the mean of the values seen.
        let ones = Tensor::from_f32(&device, &[n_tok, 4], &vec![1.0; n_tok * 4]);
        let ramp: Vec<f32> = (0..n_tok * 4).map(|at| (at / 4) as f32).collect();
        let v = Tensor::from_f32(&device, &[n_tok, 4], &ramp);
        let qkv = [ones.clone(), ones, v];
        let y = run(&qkv, &config, &Segments::from_lengths(&[n_tok]));
        let mut cache = KvCache::new(&device, 1, 4);
        for tok in 0..n_tok {
            let first = (tok + 1).saturating_sub(window);
            let mean = (first + tok) as f32 / 2.0;
            let step = run_cached(&rows(&qkv, tok..tok + 1), &config, &mut [&mut cache]);
            for got in [y.f32()[tok * 4], step.f32()[0]] {
                assert!((got - mean).abs() < 1e-3, "window {window}: {got}, not {mean}");
            }
        }
    }
}

#[test]
fn packed_segments_give_the_same_bits_as_each_alone() {
    let device = Device::cpu(2).unwrap();
    let config = sizes(4, 2, 8, None);
    let lengths = [70, 1, N_KEY + 45];
    let segments = Segments::from_lengths(&lengths);
    let packed = inputs(&config, segments.n_tok(), 1.0).map(|x| x.tensor(&device));
    // The queries serve as the gradient of the output: any numbers will do.
    let both = |qkv: &[Tensor; 3], segments: &Segments| {
        let (y, grads) = run_both(qkv, &config, segments, [true; 3], &qkv[0]);
        [vec![y], grads.into_iter().flatten().collect()].concat()
    };
    let together = both(&packed, &segments);
    for segment in segments.iter() {
        let alone = Segments::from_lengths(&[segment.n_tok]);
        let alone = both(&rows(&packed, segment.rows()), &alone);
        for (alone, together) in alone.iter().zip(&together) {
            assert!(alone.f32() == together.rows(segment.rows()).f32(), "{segment:?}");
        }
    }
}

#[test]
fn with_a_cache_any_pieces_equal_the_whole_sequence() {
    let device = Device::cpu(2).unwrap();
    for (n_head, n_kv_head, d_head, window) in
        [(4, 2, 64, None), (3, 1, 19, None), (2, 2, 80, Some(40)), (1, 1, 4, Some(PAGE + 9))]
    {
        let config = sizes(n_head, n_kv_head, d_head, window);
        let n_tok = 2 * PAGE + 30;
        let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
        let want: Vec<f64> = run(&qkv, &config, &Segments::from_lengths(&[n_tok]))
            .f32()
            .iter()
            .map(|y| *y as f64)
            .collect();
        for lengths in [vec![1], vec![n_tok], vec![300, 1, 2, 5, N_STEP_MAX, 90]] {
            let mut cache = KvCache::new(&device, n_kv_head, d_head);
            let mut got: Vec<f32> = Vec::new();
            for length in lengths.iter().cycle() {
                let next = cache.n_tok()..n_tok.min(cache.n_tok() + length);
                if next.is_empty() {
                    break;
                }
                let y = run_cached(&rows(&qkv, next), &config, &mut [&mut cache]);
                got.extend(y.f32());
            }
            expect_close(&got, &want, 3e-6, &format!("{config:?} by {lengths:?}"));
        }
    }
}

#[test]
fn a_batch_of_steps_and_prompts_gives_the_same_bits_as_each_alone() {
    let device = Device::cpu(2).unwrap();
    let config = sizes(4, 2, 16, None);
    let qkv = inputs(&config, 1500, 1.0).map(|x| x.tensor(&device));
    // (tokens in the cache, new tokens)
    let cases = [(700, 1), (0, 1), (10, 40), (3, 2)];
    let cache_of = |n_past: usize| {
        let mut cache = KvCache::new(&device, 2, 16);
        cache.append(&qkv[1].f32()[..n_past * 32], &qkv[2].f32()[..n_past * 32]);
        cache
    };
    let mut caches: Vec<KvCache> = cases.iter().map(|case| cache_of(case.0)).collect();
    let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
    let parts: Vec<_> = cases.iter().map(|&(n_past, n_new)| (n_new, n_past)).collect();
    let segments = Segments::continuing(&parts);
    let new = rows(&qkv, 1000..1000 + segments.n_tok());
    let [q, k, v] = new.clone().map(Var::constant);
    let y = attention(&Tape::off(), &q, &k, &v, &config, &segments, Some(&mut caches));
    for (segment, (n_past, _)) in segments.iter().zip(cases) {
        let mut cache = cache_of(n_past);
        let alone = run_cached(&rows(&new, segment.rows()), &config, &mut [&mut cache]);
        assert!(alone.f32() == y.value().rows(segment.rows()).f32(), "{segment:?}");
    }
}

#[test]
fn steps_have_the_same_bits_on_any_number_of_threads() {
    let config = sizes(4, 2, 64, None);
    let step = |n_threads: usize| {
        let device = Device::cpu(n_threads).unwrap();
        let qkv = inputs(&config, 3 * PAGE, 1.0).map(|x| x.tensor(&device));
        let mut cache = KvCache::new(&device, 2, 64);
        run_cached(&rows(&qkv, 0..3 * PAGE - 1), &config, &mut [&mut cache]);
        let last = rows(&qkv, 3 * PAGE - 1..3 * PAGE);
        run_cached(&last, &config, &mut [&mut cache]).f32().to_vec()
    };
    let one = step(1);
    assert!(one == step(2) && one == step(3));
}

#[test]
fn forked_caches_do_not_influence_each_other() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 8, None);
    let qkv = inputs(&config, 60, 1.0).map(|x| x.tensor(&device));
    let mut trunk = KvCache::new(&device, 1, 8);
    run_cached(&rows(&qkv, 0..20), &config, &mut [&mut trunk]);
    let snapshot = trunk.clone();
    let mut fork = trunk.clone();
    let by_fork = run_cached(&rows(&qkv, 20..25), &config, &mut [&mut fork]);
    let by_trunk = run_cached(&rows(&qkv, 40..60), &config, &mut [&mut trunk]);
    assert_eq!((snapshot.n_tok(), fork.n_tok(), trunk.n_tok()), (20, 25, 40));
    for (range, want) in [(20..25, by_fork), (40..60, by_trunk)] {
        let mut cache = KvCache::new(&device, 1, 8);
        run_cached(&rows(&qkv, 0..20), &config, &mut [&mut cache]);
        let y = run_cached(&rows(&qkv, range), &config, &mut [&mut cache]);
        assert_eq!(y.f32(), want.f32());
    }
    assert_eq!(snapshot.read(Side::Keys, 0..20), &qkv[1].f32()[..20 * 8]);
    assert_eq!(snapshot.read(Side::Values, 0..20), &qkv[2].f32()[..20 * 8]);
}

#[test]
fn a_truncated_cache_continues_as_if_the_rest_had_never_been() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 8, None);
    let qkv = inputs(&config, 60, 1.0).map(|x| x.tensor(&device));
    let mut cache = KvCache::new(&device, 1, 8);
    assert_eq!(n_bytes(&cache), 0);
    run_cached(&rows(&qkv, 0..20), &config, &mut [&mut cache]);
    let want = run_cached(&rows(&qkv, 20..60), &config, &mut [&mut cache.clone()]);
    run_cached(&rows(&qkv, 30..60), &config, &mut [&mut cache]);
    cache.truncate(20);
    let again = run_cached(&rows(&qkv, 20..60), &config, &mut [&mut cache]);
    assert_eq!(again.f32(), want.f32());
    assert!(n_bytes(&cache) >= 2 * 60 * 8 * 4 && n_bytes(&cache) <= 4 * 60 * 8 * 4);
}

#[test]
#[should_panic(expected = "attention: gradients with a cache")]
fn a_cache_and_a_gradient_exclude_each_other() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(1, 1, 2, None);
    let tape = Tape::new();
    let x = tape.leaf(0, &Tensor::zeros(&device, &[1, 2]));
    let mut cache = KvCache::new(&device, 1, 2);
    let segments = Segments::from_lengths(&[1]);
    attention(&tape, &x, &x, &x, &config, &segments, Some(&mut [&mut cache]));
}

/// What a cache of this type makes of keys or values: encoded and decoded, row by row, in f64.
fn stored_as(kind: CacheType, x: &Tensor) -> Vec<f64> {
    let block_of = |x: &[f32]| -> Vec<f64> {
        match kind {
            CacheType::F32 => x.iter().map(|x| *x as f64).collect(),
            CacheType::F16 => x.iter().map(|x| half::f16::from_f32(*x).to_f64()).collect(),
            CacheType::Q8_0 => {
                let scale = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                let scale = half::f16::from_f32(scale).to_f64();
                x.iter().map(|x| (x * inverse).round() as f64 * scale).collect()
            }
        }
    };
    x.f32().chunks(32).flat_map(block_of).collect()
}

#[test]
fn a_cache_of_each_type_gives_what_the_formula_gives_of_the_numbers_it_holds() {
    let device = Device::cpu(2).unwrap();
    // Heads on and off the blocks of Q8_0, a window, rows past several pages.
    let cases = [(6, 2, 64, None), (8, 2, 16, None), (4, 4, 24, Some(150)), (7, 1, 32, Some(PAGE))];
    for (n_head, n_kv_head, d_head, window) in cases {
        let config = sizes(n_head, n_kv_head, d_head, window);
        let n_tok = 2 * PAGE + 45;
        let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
        let exact = slow(&qkv, &config, &Segments::from_lengths(&[n_tok]));
        for (kind, loss) in
            [(CacheType::F32, 3e-6), (CacheType::F16, 1e-3), (CacheType::Q8_0, 2e-2)]
        {
            let held = [1, 2].map(|side: usize| {
                let numbers: Vec<f32> =
                    stored_as(kind, &qkv[side]).iter().map(|x| *x as f32).collect();
                Tensor::from_f32(&device, qkv[side].shape(), &numbers)
            });
            let [k, v] = held;
            let twin = [qkv[0].clone(), k.clone(), v.clone()];
            let want = slow(&twin, &config, &Segments::from_lengths(&[n_tok]));
            for lengths in [vec![n_tok], vec![PAGE], vec![1], vec![90, 1, 3, 2]] {
                let what = format!("{config:?}, {} by {lengths:?}", kind.name());
                let mut cache = KvCache::with_type(&device, n_kv_head, d_head, kind).unwrap();
                let mut got: Vec<f32> = Vec::new();
                for length in lengths.iter().cycle() {
                    let next = cache.n_tok()..n_tok.min(cache.n_tok() + length);
                    if next.is_empty() {
                        break;
                    }
                    got.extend(run_cached(&rows(&qkv, next), &config, &mut [&mut cache]).f32());
                }
                expect_close(&got, &want, 3e-6, &what);
                let size = exact.iter().map(|y| y * y).sum::<f64>().sqrt();
                let off = got.iter().zip(&exact).map(|(y, z)| (*y as f64 - z).powi(2));
                let off = off.sum::<f64>().sqrt() / size;
                assert!(off < loss, "{what}: off by {off}");
                assert_eq!(cache.read(Side::Keys, 0..n_tok), k.f32(), "{what}");
                assert_eq!(cache.read(Side::Values, 0..n_tok), v.f32(), "{what}");
            }
        }
    }
}

#[test]
fn steps_and_prompts_from_pages_have_the_same_bits_on_any_number_of_threads() {
    let config = sizes(4, 2, 32, None);
    for kind in CacheType::ALL {
        let both = |n_threads: usize| {
            let device = Device::cpu(n_threads).unwrap();
            let qkv = inputs(&config, 4 * PAGE, 1.0).map(|x| x.tensor(&device));
            let mut cache = KvCache::with_type(&device, 2, 32, kind).unwrap();
            let mut y = Vec::new();
            for range in [0..PAGE, PAGE..3 * PAGE + 70, 3 * PAGE + 70..3 * PAGE + 71] {
                y.extend(run_cached(&rows(&qkv, range), &config, &mut [&mut cache]).f32().to_vec());
            }
            y
        };
        let one = both(1);
        assert!(one == both(2) && one == both(3), "{}", kind.name());
    }
}

#[test]
fn clones_share_full_pages_and_copy_only_the_last() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(1, 1, 32, None);
    let qkv = inputs(&config, 3 * PAGE, 1.0).map(|x| x.tensor(&device));
    for kind in CacheType::ALL {
        let mut trunk = KvCache::with_type(&device, 1, 32, kind).unwrap();
        run_cached(&rows(&qkv, 0..2 * PAGE + 20), &config, &mut [&mut trunk]);
        let pages = |cache: &KvCache| cache.pages().collect::<Vec<_>>();
        assert_eq!(pages(&trunk).len(), 3);
        let mut fork = trunk.clone();
        assert_eq!(pages(&fork), pages(&trunk), "nothing is copied before somebody writes");
        let live = device.memory().live;
        run_cached(&rows(&qkv, 0..1), &config, &mut [&mut fork]);
        assert_eq!(pages(&fork)[..2], pages(&trunk)[..2]);
        assert_ne!(pages(&fork)[2].0, pages(&trunk)[2].0);
        // The copied page, rounded up to the classes of the pool.
        let last = pages(&fork)[2].1;
        assert!(device.memory().live - live <= last + last / 8 + 128, "{}", kind.name());
        // Who is alone again writes where it is.
        let alone = pages(&fork);
        drop(trunk);
        run_cached(&rows(&qkv, 1..2), &config, &mut [&mut fork]);
        assert_eq!(pages(&fork), alone);
    }
}

#[test]
fn a_truncated_clone_leaves_the_pages_of_the_other_alone() {
    let device = Device::cpu(1).unwrap();
    let config = sizes(1, 1, 32, None);
    let qkv = inputs(&config, 3 * PAGE, 1.0).map(|x| x.tensor(&device));
    for n_kept in [0, 5, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE] {
        let mut trunk = KvCache::new(&device, 1, 32);
        run_cached(&rows(&qkv, 0..2 * PAGE), &config, &mut [&mut trunk]);
        let before = trunk.read(Side::Keys, 0..2 * PAGE);
        let mut fork = trunk.clone();
        fork.truncate(n_kept);
        let end = 3 * PAGE;
        run_cached(&rows(&qkv, 2 * PAGE..end), &config, &mut [&mut fork]);
        assert_eq!(trunk.read(Side::Keys, 0..2 * PAGE), before, "{n_kept} kept");
        assert_eq!(fork.read(Side::Keys, 0..n_kept), before[..n_kept * 32]);
        assert_eq!(fork.read(Side::Keys, n_kept..fork.n_tok()), qkv[1].f32()[2 * PAGE * 32..]);
    }
}

#[test]
fn a_short_sequence_takes_little() {
    let device = Device::cpu(1).unwrap();
    let mut cache = KvCache::with_type(&device, 1, 64, CacheType::Q8_0).unwrap();
    let row = [0.5; 64];
    let row_bytes = 2 * 2 * 34;
    for (n_tok, n_row) in [(1, 16), (16, 16), (17, 32), (33, 64), (65, 128), (129, 128 + 16)] {
        while cache.n_tok() < n_tok {
            cache.append(&row, &row);
        }
        assert_eq!(n_bytes(&cache), n_row * row_bytes, "{n_tok} tokens");
    }
}

#[test]
fn numbers_that_f16_cannot_hold_become_the_largest_and_what_is_no_number_stays_none() {
    let device = Device::cpu(1).unwrap();
    let mut cache = KvCache::with_type(&device, 1, 8, CacheType::F16).unwrap();
    let tiny = half::f16::from_bits(3).to_f32();
    let row = [1e30, -1e30, f32::INFINITY, f32::NAN, tiny, -tiny, 0.0, -0.1];
    cache.append(&row, &row);
    let got = cache.read(Side::Values, 0..1);
    assert_eq!(got[..3], [65504.0, -65504.0, 65504.0]);
    assert!(got[3].is_nan());
    assert_eq!(got[4..7], [tiny, -tiny, 0.0]);
    assert_eq!(got[7], half::f16::from_f32(-0.1).to_f32());
}

#[test]
fn a_row_that_does_not_fill_blocks_is_refused_as_q8_0() {
    let device = Device::cpu(1).unwrap();
    let error = KvCache::with_type(&device, 3, 24, CacheType::Q8_0).err().unwrap().report();
    assert!(error.contains("3 heads of 24 make 72") && error.contains("f16"), "{error}");
    assert!(KvCache::with_type(&device, 3, 24, CacheType::F16).is_ok());
    for kind in CacheType::ALL {
        assert_eq!(kind.name().parse::<CacheType>().unwrap(), kind);
    }
    assert!("q4_0".parse::<CacheType>().is_err());
}

/// Runs of rows of `qkv` through a cache, one after the other.
fn run_pieces(qkv: &[Tensor; 3], config: &Attention, lengths: &[usize]) -> Vec<f32> {
    let n_tok = qkv[0].shape()[0];
    let mut cache = KvCache::new(qkv[0].device(), config.n_kv_head, config.d_head);
    let mut got = Vec::new();
    for length in lengths.iter().cycle() {
        let next = cache.n_tok()..n_tok.min(cache.n_tok() + length);
        if next.is_empty() {
            break;
        }
        got.extend(run_cached(&rows(qkv, next), config, &mut [&mut cache]).to_vec());
    }
    got
}

#[test]
fn with_a_cache_any_pieces_equal_the_whole_sequence_on_every_device() {
    let host = Device::cpu(1).unwrap();
    let cases = [
        (4, 2, 64, None, 135),
        (6, 1, 19, None, 70),
        (2, 2, 80, Some(40), 131),
        (2, 1, 128, None, 68),
        (1, 1, 8, Some(PAGE + 9), 2200),
    ];
    for (n_head, n_kv_head, d_head, window, n_tok) in cases {
        let config = sizes(n_head, n_kv_head, d_head, window);
        let inputs = inputs(&config, n_tok, 1.0);
        let segments = Segments::from_lengths(&[n_tok]);
        let want = run(&inputs.clone().map(|x| x.tensor(&host)), &config, &segments);
        for (device, tolerance) in devices() {
            let qkv = inputs.clone().map(|x| {
                let x = Var::constant(x.tensor(device));
                match d_head.is_multiple_of(2) {
                    true => as_activation(&Tape::off(), &x, d_head).value().clone(),
                    false => x.value().clone(),
                }
            });
            let whole = run(&qkv, &config, &segments).to_vec();
            compare_devices(&format!("{device:?}: whole"), want.f32(), &whole, *tolerance);
            for lengths in [vec![if n_tok > 1000 { 300 } else { 1 }], vec![66, 1, 3, 64, 2]] {
                let what = format!("{device:?}: {config:?} by {lengths:?}");
                let got = run_pieces(&qkv, &config, &lengths);
                let again = lengths.len() == 1 || got == run_pieces(&qkv, &config, &lengths);
                assert!(again, "{what}: other bits");
                compare_devices(&what, want.f32(), &got, *tolerance);
                device.check().unwrap();
            }
        }
    }
}

/// Heads so wide that differences drown in the noise of a sum of so many numbers.
#[test]
fn wide_heads_have_the_gradients_that_the_cpu_gives() {
    let host = Device::cpu(1).unwrap();
    for (config, n_tok) in [(sizes(2, 1, 256, None), 70), (sizes(1, 1, 300, Some(9)), 20)] {
        let inputs = inputs(&config, n_tok, 1.0);
        let dy = Input::normal(4, &[n_tok, config.q_width()], 1.0);
        let on = |device: &Device| {
            let qkv = inputs.clone().map(|x| x.tensor(device));
            let segments = Segments::from_lengths(&[n_tok]);
            let (y, grads) = run_both(&qkv, &config, &segments, [true; 3], &dy.tensor(device));
            let grads = grads.iter().flatten().map(Tensor::to_vec);
            [y.to_vec()].into_iter().chain(grads).collect::<Vec<_>>()
        };
        let want = on(&host);
        for (device, tolerance) in devices() {
            for (idx, (want, got)) in want.iter().zip(on(device)).enumerate() {
                compare_devices(&format!("{device:?}: {idx}"), want, &got, *tolerance);
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow_on_any_device() {
    let host = Device::cpu(1).unwrap();
    let config = sizes(2, 1, 64, None);
    let thirty = |x: f32| 30.0 * x.signum();
    let inputs = [
        Input::map(1, &[100, 128], thirty),
        Input::map(2, &[100, 64], thirty),
        Input::normal(3, &[100, 64], 1.0),
    ];
    let want =
        run(&inputs.clone().map(|x| x.tensor(&host)), &config, &Segments::from_lengths(&[100]));
    for (device, tolerance) in devices() {
        let qkv = inputs.clone().map(|x| x.tensor(device));
        let got = run(&qkv, &config, &Segments::from_lengths(&[100])).to_vec();
        compare_devices("whole", want.f32(), &got, 10.0 * tolerance);
        compare_devices("steps", want.f32(), &run_pieces(&qkv, &config, &[1]), 10.0 * tolerance);
    }
}

#[test]
fn sequences_give_the_same_bits_whatever_is_beside_them_on_every_device() {
    for (device, _) in devices() {
        let config = sizes(4, 2, 64, Some(50));
        let segments = Segments::from_lengths(&[70, 1, 129]);
        let packed = inputs(&config, segments.n_tok(), 1.0).map(|x| x.tensor(device));
        let both = |qkv: &[Tensor; 3], segments: &Segments| {
            let (y, grads) = run_both(qkv, &config, segments, [true; 3], &qkv[0]);
            [vec![y], grads.into_iter().flatten().collect()].concat()
        };
        let together = both(&packed, &segments);
        let caches_of = |n_past: &[usize]| -> Vec<KvCache> {
            let cache = |&n: &usize| {
                let mut cache = KvCache::new(device, 2, 64);
                run_cached(&rows(&packed, 0..n), &config, &mut [&mut cache]);
                cache
            };
            n_past.iter().map(cache).collect()
        };
        let n_past = [10, 100, 7];
        let mut caches = caches_of(&n_past);
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
        let after = Segments::continuing(&[(70, 10), (1, 100), (129, 7)]);
        let [q, k, v] = packed.clone().map(Var::constant);
        let y = attention(&Tape::off(), &q, &k, &v, &config, &after, Some(&mut caches));
        for (segment, n_past) in segments.iter().zip(n_past) {
            let own = rows(&packed, segment.rows());
            let alone = both(&own, &Segments::from_lengths(&[segment.n_tok]));
            for (alone, together) in alone.iter().zip(&together) {
                assert!(alone.to_vec() == together.rows(segment.rows()).to_vec(), "{segment:?}");
            }
            let mut cache = caches_of(&[n_past]).remove(0);
            let alone = run_cached(&own, &config, &mut [&mut cache]).to_vec();
            assert!(alone == y.value().rows(segment.rows()).to_vec(), "cached: {segment:?}");
        }
        device.check().unwrap();
    }
}

#[test]
fn clones_on_a_gpu_share_until_one_writes_over_the_other() {
    for (device, _) in devices() {
        let config = sizes(2, 1, 8, None);
        let qkv = inputs(&config, 300, 1.0).map(|x| x.tensor(device));
        let mut trunk = KvCache::new(device, 1, 8);
        assert_eq!(n_bytes(&trunk), 0);
        run_cached(&rows(&qkv, 0..20), &config, &mut [&mut trunk]);
        let snapshot = trunk.clone();
        let keys_of = |cache: &KvCache| cache.read(Side::Keys, 0..cache.n_tok());
        let kept = keys_of(&snapshot);
        // The trunk has all rows and grows where they are; the fork would write over them.
        run_cached(&rows(&qkv, 20..30), &config, &mut [&mut trunk]);
        assert!(trunk.pages().eq(snapshot.pages()));
        let mut fork = snapshot.clone();
        let by_fork = run_cached(&rows(&qkv, 40..45), &config, &mut [&mut fork]).to_vec();
        assert!(!fork.pages().eq(snapshot.pages()));
        let of_trunk = keys_of(&trunk);
        run_cached(&rows(&qkv, 30..300), &config, &mut [&mut trunk]);
        assert!(!trunk.pages().eq(snapshot.pages()), "past the room there was");
        assert_eq!(keys_of(&trunk)[..30 * 8], of_trunk[..]);
        assert_eq!(keys_of(&snapshot), kept);
        assert_eq!((snapshot.n_tok(), fork.n_tok(), trunk.n_tok()), (20, 25, 300));
        // Who is alone again writes where it is, also after it was cut.
        let place: Vec<_> = fork.pages().collect();
        fork.truncate(20);
        let again = run_cached(&rows(&qkv, 40..45), &config, &mut [&mut fork]).to_vec();
        assert!(again == by_fork && fork.pages().eq(place));
        trunk.truncate(20);
        let again = run_cached(&rows(&qkv, 40..45), &config, &mut [&mut trunk]).to_vec();
        assert!(again == by_fork);
        trunk.truncate(0);
        assert_eq!(n_bytes(&trunk), 0);
        device.check().unwrap();
    }
}
