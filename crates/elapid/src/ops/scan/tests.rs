//! Tests of `scan`: a slow twin in f64, finite differences, extreme steps, states, segments.

use super::*;
use crate::ops::check::{Input, check_gradients};
use crate::tape::Gradients;

#[derive(Clone, Copy, PartialEq)]
enum Parts {
    All,
    NoGate,
    NoBias,
}

/// x, delta, a_log, b, c, skip, delta_bias, gate; real models' sizes of delta and a.
fn inputs(n_tok: usize, d_inner: usize, d_state: usize) -> Vec<Input> {
    vec![
        Input::normal(1, &[n_tok, d_inner], 1.0),
        Input::map(2, &[n_tok, d_inner], |x| x - 1.0),
        Input::map(3, &[d_inner, d_state], |x| 0.7 * x),
        Input::normal(4, &[n_tok, d_state], 1.0),
        Input::normal(5, &[n_tok, d_state], 1.0),
        Input::normal(6, &[d_inner], 1.0),
        Input::normal(7, &[d_inner], 0.5),
        Input::normal(8, &[n_tok, d_inner], 1.0),
    ]
}

fn tensors(device: &Device, inputs: &[Input]) -> Vec<Tensor> {
    inputs.iter().map(|x| x.tensor(device)).collect()
}

fn op(
    tape: &Tape,
    v: &[Var],
    parts: Parts,
    segments: &Segments,
    states: Option<&mut [&mut Tensor]>,
) -> Var {
    let scan = Scan {
        x: &v[0],
        delta: &v[1],
        a_log: &v[2],
        b: &v[3],
        c: &v[4],
        skip: &v[5],
        delta_bias: (parts != Parts::NoBias).then_some(&v[6]),
        gate: (parts != Parts::NoGate).then_some(&v[7]),
    };
    selective_scan(tape, &scan, segments, states)
}

/// The rows of some tokens, and the parameters.
fn rows(inputs: &[Tensor], toks: Range<usize>) -> Vec<Tensor> {
    let cut = |(idx, x): (usize, &Tensor)| match idx {
        0 | 1 | 3 | 4 | 7 => x.rows(toks.clone()),
        _ => x.clone(),
    };
    inputs.iter().enumerate().map(cut).collect()
}

/// Runs one segment on constants; `state` is updated.
fn run(inputs: &[Tensor], state: Option<&mut Tensor>) -> Tensor {
    let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
    let segments = Segments::from_lengths(&[inputs[0].dims2().0]);
    let y = match state {
        Some(state) => op(&Tape::off(), &v, Parts::All, &segments, Some(&mut [state])),
        None => op(&Tape::off(), &v, Parts::All, &segments, None),
    };
    y.value().clone()
}

/// Output and gradients of one segment from the formulas above, number by number in f64.
struct Slow {
    y: Vec<f64>,
    /// In the order of the inputs.
    grads: Vec<Vec<f64>>,
    /// (d_state, d_inner)
    state: Vec<f64>,
}

fn slow(inputs: &[Tensor], entry: &[f32], dy: &[f32]) -> Slow {
    let (n_tok, d_inner) = inputs[0].dims2();
    let d_state = inputs[2].dims2().1;
    let v: Vec<Vec<f64>> =
        inputs.iter().map(|x| x.f32().iter().map(|&x| x as f64).collect()).collect();
    let [x, raw, a_log, b, c, skip, bias, gate] = &v[..] else { panic!("eight inputs") };
    let mut grads: Vec<Vec<f64>> = v.iter().map(|x| vec![0.0; x.len()]).collect();
    let mut y = vec![0.0; x.len()];
    let mut state = vec![0.0; d_state * d_inner];
    let softplus = |z: f64| z.max(0.0) + (-z.abs()).exp().ln_1p();
    let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
    for ch in 0..d_inner {
        let at = |tok: usize| tok * d_inner + ch;
        let a: Vec<f64> = (0..d_state).map(|n| -a_log[ch * d_state + n].exp()).collect();
        let delta: Vec<f64> = (0..n_tok).map(|tok| softplus(raw[at(tok)] + bias[ch])).collect();
        let mut h = vec![vec![0.0; d_state]; n_tok + 1];
        let mut out = vec![0.0; n_tok];
        h[0] = (0..d_state).map(|n| entry[n * d_inner + ch] as f64).collect();
        for tok in 0..n_tok {
            out[tok] = skip[ch] * x[at(tok)];
            for n in 0..d_state {
                h[tok + 1][n] = (delta[tok] * a[n]).exp() * h[tok][n]
                    + delta[tok] * b[tok * d_state + n] * x[at(tok)];
                out[tok] += c[tok * d_state + n] * h[tok + 1][n];
            }
            y[at(tok)] = out[tok] * gate[at(tok)] * sigmoid(gate[at(tok)]);
        }
        (0..d_state).for_each(|n| state[n * d_inner + ch] = h[n_tok][n]);
        let mut g = vec![0.0; d_state];
        for tok in (0..n_tok).rev() {
            let (i, s) = (at(tok), sigmoid(gate[at(tok)]));
            let dout = dy[i] as f64 * gate[i] * s;
            grads[7][i] = dy[i] as f64 * out[tok] * s * (1.0 + gate[i] * (1.0 - s));
            grads[5][ch] += dout * x[i];
            grads[0][i] = dout * skip[ch];
            let mut ddelta = 0.0;
            for n in 0..d_state {
                let row = tok * d_state + n;
                g[n] += dout * c[row];
                grads[4][row] += dout * h[tok + 1][n];
                grads[3][row] += g[n] * delta[tok] * x[i];
                grads[0][i] += g[n] * delta[tok] * b[row];
                g[n] *= (delta[tok] * a[n]).exp();
                let before = g[n] * h[tok][n];
                ddelta += g[n] * h[tok][n] * a[n];
                grads[2][ch * d_state + n] += before * delta[tok] * a[n];
            }
            // g was multiplied by the decay above: the input's share is what it was before.
            let input: f64 = grads[0][i] - dout * skip[ch];
            ddelta += input / delta[tok] * x[i];
            grads[1][i] = ddelta * sigmoid(raw[i] + bias[ch]);
            grads[6][ch] += grads[1][i];
        }
    }
    Slow { y, grads, state }
}

/// Largest difference, in units of the root mean square of `want`.
fn distance(got: impl Iterator<Item = f64>, want: &[f64]) -> f64 {
    let scale = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    got.zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max) / scale.max(1e-30)
}

fn wide(x: &Tensor) -> impl Iterator<Item = f64> {
    x.f32().iter().map(|&x| x as f64)
}

#[test]
fn gradients() {
    let check = |lengths: &[usize], d_inner: usize, d_state: usize, parts: Parts| {
        let segments = Segments::from_lengths(lengths);
        let inputs = inputs(segments.n_tok(), d_inner, d_state);
        check_gradients(&inputs, |tape, v| vec![op(tape, v, parts, &segments, None)]);
    };
    check(&[1], 1, 1, Parts::All); // no recurrence
    check(&[7], 1, 1, Parts::All); // recurrence only
    check(&[5, 1, 3], 3, 4, Parts::NoGate); // every stride distinct
    check(&[1, CHUNK, 2], 17, 16, Parts::NoBias); // a vector and one channel
    check(&[CHUNK + 1, 1], GROUP + 3, 8, Parts::All); // two groups
    check(&[2 * CHUNK + 5, CHUNK - 1], 2, 11, Parts::All); // three tiles, three chunks
}

#[test]
fn gradients_with_states_take_them_as_constants() {
    let segments = Segments::from_lengths(&[3, CHUNK + 2, 1]);
    check_gradients(&inputs(segments.n_tok(), 5, 3), |tape, v| {
        let device = v[0].value().device();
        let state = |seed: u64| Input::normal(50 + seed, &[3, 5], 1.0).tensor(device);
        let mut states = [state(0), state(1), state(2)];
        let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
        vec![op(tape, v, Parts::All, &segments, Some(&mut states))]
    });
}

#[test]
fn agrees_with_the_slow_twin_also_for_extreme_steps() {
    let device = Device::cpu(2).unwrap();
    let (n_tok, d_inner, d_state) = (2 * CHUNK + 3, 21, 16);
    let mut extreme = inputs(n_tok, d_inner, d_state);
    // Step sizes from 1e-11 to 12, decays per step from 1 to exp(-3800).
    extreme[1] = Input::map(2, &[n_tok, d_inner], |x| (12.0 * x - 6.0).clamp(-25.0, 12.0));
    extreme[2] = Input::map(3, &[d_inner, d_state], |x| (2.0 * x + 1.0).min(16f32.ln() + 3.0));
    extreme[6] = Input::normal(7, &[d_inner], 0.0);
    for inputs in [inputs(n_tok, d_inner, d_state), extreme] {
        let inputs = tensors(&device, &inputs);
        let mut state = Input::normal(60, &[d_state, d_inner], 1.0).tensor(&device);
        let entry = state.f32().to_vec();
        let tape = Tape::new();
        let v: Vec<Var> = inputs.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
        let segments = Segments::from_lengths(&[n_tok]);
        let y = op(&tape, &v, Parts::All, &segments, Some(&mut [&mut state]));
        let dy = Input::normal(61, &[n_tok, d_inner], 1.0).tensor(&device);
        let want = slow(&inputs, &entry, dy.f32());
        assert!(distance(wide(y.value()), &want.y) < 2e-5);
        assert!(distance(wide(&state), &want.state) < 2e-5);
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy)], &mut grads);
        for (key, want) in want.grads.iter().enumerate() {
            let got = grads.get(key).unwrap();
            let off = distance(wide(got), want);
            assert!(off < 2e-5, "input {key}: off by {off:e}");
        }
        // The slope of softplus hides small steps: without it they must be right as well.
        let slope = |i: usize| {
            let z = inputs[1].f32()[i] as f64 + inputs[6].f32()[i % d_inner] as f64;
            1.0 / (1.0 + (-z).exp())
        };
        let bare: Vec<f64> =
            want.grads[1].iter().enumerate().map(|(i, want)| want / slope(i)).collect();
        let got = wide(grads.get(1).unwrap()).enumerate().map(|(i, got)| got / slope(i));
        let off = distance(got, &bare);
        assert!(off < 2e-5, "ddelta without its slope: off by {off:e}");
    }
}

#[test]
fn steps_with_a_state_equal_the_whole_from_any_split() {
    let device = Device::cpu(1).unwrap();
    let (n_tok, d_inner, d_state) = (2 * CHUNK + 7, 19, 5);
    let inputs = tensors(&device, &inputs(n_tok, d_inner, d_state));
    let zeros = || Tensor::zeros(&device, &[d_state, d_inner]);
    let mut last = zeros();
    let whole = run(&inputs, Some(&mut last));
    assert_eq!(whole.f32(), run(&inputs, None).f32());
    for split in [1, 2, CHUNK, CHUNK + 1, n_tok - 1] {
        let mut state = zeros();
        let mut y = run(&rows(&inputs, 0..split), Some(&mut state)).f32().to_vec();
        for tok in split..n_tok {
            let one = run(&rows(&inputs, tok..tok + 1), Some(&mut state));
            y.extend_from_slice(one.f32());
        }
        assert_eq!(y, whole.f32(), "split at {split}");
        assert_eq!(state.f32(), last.f32(), "split at {split}");
    }
}

#[test]
fn segments_do_not_see_each_other() {
    let device = Device::cpu(1).unwrap();
    let lengths = [3, 1, CHUNK + 1, 2];
    let segments = Segments::from_lengths(&lengths);
    let inputs = tensors(&device, &inputs(segments.n_tok(), GROUP + 1, 4));
    let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
    let together = op(&Tape::off(), &v, Parts::All, &segments, None);
    for segment in segments.iter() {
        let alone = run(&rows(&inputs, segment.rows()), None);
        assert_eq!(alone.f32(), together.value().rows(segment.rows()).f32());
    }
}

#[test]
fn another_handle_of_a_state_keeps_its_numbers() {
    let device = Device::cpu(1).unwrap();
    let inputs = tensors(&device, &inputs(4, 3, 2));
    let mut state = Input::normal(9, &[2, 3], 1.0).tensor(&device);
    let (snapshot, before) = (state.clone(), state.f32().to_vec());
    run(&inputs, Some(&mut state));
    assert_eq!(snapshot.f32(), before);
    assert_ne!(state.f32(), before);
}

#[test]
fn a_token_changes_nothing_before_it() {
    let device = Device::cpu(1).unwrap();
    let n_tok = CHUNK + 6;
    let inputs = tensors(&device, &inputs(n_tok, 5, 3));
    let before = run(&inputs, None);
    for tok in [0, 3, CHUNK, n_tok - 1] {
        for idx in [0, 1, 3, 4, 7] {
            let mut changed = inputs.clone();
            let mut x = inputs[idx].to_f32();
            let width = x.dims2().1;
            x.f32_mut()[tok * width..][..width].fill(1.5);
            changed[idx] = x;
            let after = run(&changed, None);
            assert_eq!(before.rows(0..tok).f32(), after.rows(0..tok).f32());
            assert_ne!(before.rows(tok..n_tok).f32(), after.rows(tok..n_tok).f32());
        }
    }
}

#[test]
fn steps_of_many_sequences_have_the_bits_of_each_alone_on_any_number_of_threads() {
    // Enough for several tasks, whose edges fall between and beside vectors; with and without
    // what is optional.
    let (n_seq, d_inner, d_state) = (9, 2 * TILE * GROUP + 19, 9);
    for parts in [Parts::All, Parts::NoGate, Parts::NoBias] {
        let steps = |n_threads: usize, lengths: &[usize]| {
            let device = Device::cpu(n_threads).unwrap();
            let segments = Segments::from_lengths(lengths);
            let v = tensors(&device, &inputs(segments.n_tok(), d_inner, d_state));
            let state = |seed| Input::normal(seed, &[d_state, d_inner], 1.0).tensor(&device);
            let start: Vec<Tensor> = (0..n_seq).map(|seq| state(20 + seq as u64)).collect();
            let run = |v: &[Tensor], segments: &Segments, states: &mut [Tensor]| {
                let v: Vec<Var> = v.iter().cloned().map(Var::constant).collect();
                let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
                let y = op(&Tape::off(), &v, parts, segments, Some(&mut states));
                y.value().f32().to_vec()
            };
            let mut states: Vec<Tensor> = start.iter().map(Tensor::to_f32).collect();
            let y = run(&v, &segments, &mut states);
            let mut alone = (Vec::new(), start);
            for (segment, state) in segments.iter().zip(&mut alone.1) {
                let own = Segments::from_lengths(&[segment.n_tok]);
                let state = std::slice::from_mut(state);
                alone.0.extend(run(&rows(&v, segment.rows()), &own, state));
            }
            let numbers = |states: &[Tensor]| -> Vec<f32> {
                states.iter().flat_map(|state| state.f32().to_vec()).collect()
            };
            assert!(y == alone.0 && numbers(&states) == numbers(&alone.1));
            (y, numbers(&states))
        };
        for lengths in [[1; 9], [1, 2, 8, 1, 3, 1, 1, 4, 1]] {
            let one = steps(1, &lengths);
            assert!(one == steps(2, &lengths) && one == steps(3, &lengths));
        }
    }
}

#[test]
fn a_step_writes_a_state_that_is_nobody_elses_where_it_is_and_sees_new_weights() {
    let device = Device::cpu(1).unwrap();
    let mut inputs = tensors(&device, &inputs(12, 21, 5));
    let mut state = Input::normal(9, &[5, 21], 1.0).tensor(&device);
    for round in 0..2 {
        let (place, entry) = (state.bytes().as_ptr(), state.to_f32());
        let y = run(&rows(&inputs, 0..3), Some(&mut state));
        assert_eq!(state.bytes().as_ptr(), place);
        // More tokens go the other way.
        let mut other = entry;
        let whole = run(&inputs, Some(&mut other));
        assert_eq!(y.f32(), whole.rows(0..3).f32(), "round {round}");
        inputs[2].f32_mut()[7] += 1.0;
    }
}

/// Outputs, states and gradients, on a device.
fn everything(
    device: &Device,
    inputs: &[Input],
    parts: Parts,
    lengths: &[usize],
    has_states: bool,
) -> Vec<Vec<f32>> {
    let inputs = tensors(device, inputs);
    let (d_inner, d_state) = inputs[2].dims2();
    let segments = Segments::from_lengths(lengths);
    let state = |seed| Input::normal(seed, &[d_state, d_inner], 1.0).tensor(device);
    let n_states = if has_states { lengths.len() as u64 } else { 0 };
    let mut states: Vec<Tensor> = (0..n_states).map(|seq| state(30 + seq)).collect();
    let mut handles: Vec<&mut Tensor> = states.iter_mut().collect();
    let handles = has_states.then_some(handles.as_mut_slice());
    let tape = Tape::new();
    let v: Vec<Var> = inputs.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
    let y = op(&tape, &v, parts, &segments, handles);
    let mut all = vec![y.value().to_vec()];
    all.extend(states.iter().map(Tensor::to_vec));
    let dy = Input::normal(61, &[segments.n_tok(), d_inner], 1.0).tensor(device);
    let mut grads = Gradients::default();
    tape.walk(vec![(y, dy)], &mut grads);
    all.extend((0..8).filter_map(|key| grads.get(key).map(Tensor::to_vec)));
    all
}

fn check_devices(inputs: &[Input], parts: Parts, lengths: &[usize], has_states: bool) {
    let cpu = Device::cpu(2).unwrap();
    let want = everything(&cpu, inputs, parts, lengths, has_states);
    for (device, tolerance) in crate::ops::check::devices() {
        let got = everything(device, inputs, parts, lengths, has_states);
        let again = everything(device, inputs, parts, lengths, has_states);
        for (idx, (got, again)) in got.iter().zip(&again).enumerate() {
            let differ = got.iter().zip(again).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(
                differ,
                0,
                "{device:?}: {lengths:?}, result {idx} of {}: other bits",
                got.len()
            );
        }
        device.check().unwrap();
        assert_eq!(want.len(), got.len());
        for (idx, (want, got)) in want.iter().zip(&got).enumerate() {
            let what = format!("{device:?}: {lengths:?}, result {idx}");
            crate::ops::check::compare_devices(&what, want, got, *tolerance);
        }
    }
}

#[test]
fn devices_agree_at_the_edges_of_pieces_groups_and_states() {
    let check = |lengths: &[usize], d_inner: usize, d_state: usize, parts: Parts| {
        let n_tok = lengths.iter().sum();
        check_devices(&inputs(n_tok, d_inner, d_state), parts, lengths, d_inner % 2 == 1);
    };
    let edges = [1, 2, 7, 8, 9, 15, 17, 63, 64, 65, 127, 128, 129, 300];
    for n_tok in edges {
        check(&[n_tok], 5, 16, Parts::All);
    }
    check(&edges, 2, 3, Parts::NoGate);
    check(&[64, 1, 129, 65, 2], 65, 4, Parts::All);
    check(&[3, 200], 64, 1, Parts::NoBias);
    check(&[70, 1], 63, 64, Parts::All);
    check(&[33, 9], 66, 20, Parts::All);
    check(&[1; 9], 5, 16, Parts::All); // too many states to keep
    check(&[19, 1], 3, 65, Parts::All);
    check(&[5, 70], 4, 256, Parts::NoBias);
    check(&[17; 9], 130, 16, Parts::NoGate);
    // Longer pieces: there are channels enough.
    check(&[1025, 600], 701, 2, Parts::All);
}

#[test]
fn devices_agree_for_extreme_steps() {
    let (n_tok, d_inner, d_state) = (130, 21, 16);
    let mut extreme = inputs(n_tok, d_inner, d_state);
    extreme[1] = Input::map(2, &[n_tok, d_inner], |x| (12.0 * x - 6.0).clamp(-25.0, 12.0));
    extreme[2] = Input::map(3, &[d_inner, d_state], |x| (2.0 * x + 1.0).min(16f32.ln() + 3.0));
    extreme[6] = Input::normal(7, &[d_inner], 0.0);
    check_devices(&extreme, Parts::All, &[n_tok], true);
    // Numbers from 1e-6 to 1e6, gates far open and closed.
    for size in [1e-6, 1e6] {
        let mut sized = inputs(n_tok, d_inner, d_state);
        sized[0] = Input::normal(1, &[n_tok, d_inner], size);
        sized[7] = Input::normal(8, &[n_tok, d_inner], 100.0);
        check_devices(&sized, Parts::All, &[n_tok], true);
    }
}

#[test]
fn devices_go_on_from_a_state_in_pieces_and_tokens() {
    let (n_tok, d_inner, d_state) = (150, 67, 16);
    let inputs = inputs(n_tok, d_inner, d_state);
    let cpu = Device::cpu(1).unwrap();
    let run_pieces = |device: &Device, ends: &[usize]| {
        let inputs = tensors(device, &inputs);
        let mut state = Input::normal(9, &[d_state, d_inner], 1.0).tensor(device);
        let (mut y, mut first) = (Vec::new(), 0);
        for &end in ends {
            let snapshot = (end % 3 == 0).then(|| (state.clone(), state.to_vec()));
            y.extend(run(&rows(&inputs, first..end), Some(&mut state)).to_vec());
            if let Some((kept, numbers)) = snapshot {
                assert_eq!(kept.to_vec(), numbers, "another handle changed");
            }
            first = end;
        }
        (y, state.to_vec())
    };
    let (want_y, want_state) = run_pieces(&cpu, &[n_tok]);
    for (device, tolerance) in crate::ops::check::devices() {
        let ones: Vec<usize> = (1..=n_tok).collect();
        let mixed = [1, 2, 10, 18, 27, 91, 92, 142, n_tok];
        for ends in [&[n_tok][..], &mixed, &ones] {
            let (y, state) = run_pieces(device, ends);
            crate::ops::check::compare_devices("y", &want_y, &y, *tolerance);
            crate::ops::check::compare_devices("state", &want_state, &state, *tolerance);
        }
    }
}

#[test]
fn devices_step_many_sequences_as_each_alone() {
    let (lengths, d_inner, d_state) = ([1, 3, 1, 8, 2], 130, 16);
    let segments = Segments::from_lengths(&lengths);
    for (device, _) in crate::ops::check::devices() {
        let inputs = tensors(device, &inputs(segments.n_tok(), d_inner, d_state));
        let state = |seed| Input::normal(seed, &[d_state, d_inner], 1.0).tensor(device);
        let mut together: Vec<Tensor> = (0..5).map(|seq| state(20 + seq)).collect();
        let v: Vec<Var> = inputs.iter().cloned().map(Var::constant).collect();
        let mut handles: Vec<&mut Tensor> = together.iter_mut().collect();
        let y = op(&Tape::off(), &v, Parts::All, &segments, Some(&mut handles)).value().to_vec();
        let mut alone = Vec::new();
        for (idx, segment) in segments.iter().enumerate() {
            let mut state = state(20 + idx as u64);
            alone.extend(run(&rows(&inputs, segment.rows()), Some(&mut state)).to_vec());
            assert_eq!(state.to_vec(), together[idx].to_vec());
        }
        assert_eq!(alone, y);
    }
}

#[test]
fn no_tokens_give_no_gradient_and_no_failure() {
    let there = crate::ops::check::devices().iter().map(|it| it.0.clone());
    for device in std::iter::once(Device::cpu(1).unwrap()).chain(there) {
        let tape = Tape::new();
        let tensors = tensors(&device, &inputs(0, 66, 5));
        let vars: Vec<Var> = tensors.iter().enumerate().map(|(k, x)| tape.leaf(k, x)).collect();
        let y = op(&tape, &vars, Parts::All, &Segments::from_lengths(&[]), None);
        let dy = Tensor::uninit_as(y.value(), y.value().shape());
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy)], &mut grads);
        assert!(grads.get(2).unwrap().to_vec().iter().all(|x| *x == 0.0), "{device:?}");
        device.check().unwrap();
    }
}
