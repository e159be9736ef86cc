//! Tests of `mamba3`: finite differences, a recurrence in f64, steps against whole, causality.

use super::forward::{Path, forward_by};
use super::*;
use crate::ops::check::{Input, as_activation, check_gradients, devices};
use crate::ops::ssd::chunk::CHUNK;
use crate::tape::Gradients;
use std::ops::Range;

/// Neighbours are turned where the rank is 1, else halves.
fn dims(
    [n_head, d_head, n_group]: [usize; 3],
    (d_state, n_angle): (usize, usize),
    rank: usize,
) -> Mamba3Dims {
    Mamba3Dims {
        n_head,
        d_head,
        n_group,
        d_state,
        rank,
        n_angle,
        halves: rank > 1,
        a_floor: 1e-4,
        softplus_a: false,
        eps: 1e-5,
    }
}

/// In the order of the gradients: xbc, raw, delta_bias, b_norm, c_norm, b_bias, c_bias, skip, and
/// mimo_x where the rank is above 1.
fn random(dims: Mamba3Dims, n_tok: usize) -> Vec<Input> {
    let Mamba3Dims { n_head, d_head, d_state, rank, .. } = dims;
    let mut inputs = vec![
        Input::normal(1, &[n_tok, dims.width()], 1.0),
        // Away from zero, where the slope of a changes and finite differences see both sides.
        Input::map(2, &[n_tok, dims.raw_width()], |x| x + 0.15 * x.signum()),
        Input::map(3, &[n_head], |x| 0.3 * x - 1.5),
        Input::map(4, &[d_state], |x| 0.2 * x + 1.0),
        Input::map(5, &[d_state], |x| 0.2 * x + 1.0),
        Input::map(6, &[n_head, rank, d_state], |x| 0.5 * x + 0.5),
        Input::map(7, &[n_head, rank, d_state], |x| 0.5 * x + 0.5),
        Input::normal(8, &[n_head], 1.0),
    ];
    if rank > 1 {
        inputs.push(Input::map(9, &[n_head, rank, d_head], |x| 0.3 * x + 0.5));
    }
    inputs
}

/// The same with xbc and raw in numbers that bf16 has.
fn random_activations(dims: Mamba3Dims, n_tok: usize) -> Vec<Input> {
    let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
    let mut inputs = random(dims, n_tok);
    inputs[0] = Input::map(1, &[n_tok, dims.width()], rounded);
    inputs[1] = Input::map(2, &[n_tok, dims.raw_width()], rounded);
    inputs
}

fn op(v: &[Var], dims: Mamba3Dims) -> Mamba3<'_> {
    Mamba3 {
        xbc: &v[0],
        raw: &v[1],
        delta_bias: &v[2],
        b_norm: &v[3],
        c_norm: &v[4],
        b_bias: &v[5],
        c_bias: &v[6],
        skip: &v[7],
        mimo_x: v.get(8),
        dims,
    }
}

fn shapes(dims: &Mamba3Dims) -> [Vec<usize>; 4] {
    let Mamba3Dims { n_head, d_head, d_state, rank, n_angle, .. } = *dims;
    [
        vec![n_head, n_angle],
        vec![n_head, d_state, d_head],
        vec![rank, n_head, d_state],
        vec![n_head, d_head],
    ]
}

/// Lists of angle, h, k and v, for `n` segments.
fn random_states(dims: &Mamba3Dims, n: usize, device: &Device) -> [Vec<Tensor>; 4] {
    let mut seed = 50;
    shapes(dims).map(|shape| {
        let mut list = Vec::new();
        for _ in 0..n {
            seed += 1;
            list.push(Input::normal(seed, &shape, 1.0).tensor(device));
        }
        list
    })
}

fn run(
    tape: &Tape,
    v: &[Var],
    dims: Mamba3Dims,
    segments: &Segments,
    states: Option<&mut [Vec<Tensor>; 4]>,
) -> Var {
    let mut handles = states.map(|states| states.each_mut().map(|list| handles_of(list)));
    let lists = handles.as_mut().map(|handles| handles.each_mut().map(|list| &mut list[..]));
    mamba3(tape, &op(v, dims), segments, lists)
}

fn handles_of(list: &mut [Tensor]) -> Vec<&mut Tensor> {
    list.iter_mut().collect()
}

/// Cases that cross the edges of chunks, groups, vectors and angles.
fn cases() -> Vec<(Mamba3Dims, Vec<usize>)> {
    vec![
        (Mamba3Dims { softplus_a: true, ..dims([1, 1, 1], (2, 1), 1) }, vec![1, 19]),
        (dims([2, 3, 1], (6, 1), 1), vec![7, 1]),
        (dims([2, 17, 1], (18, 4), 1), vec![20, 1, 9]), // an odd number of pairs, tails of vectors
        (dims([4, 3, 2], (6, 3), 1), vec![CHUNK + 6, 2, 1, CHUNK]), // all turned
        (dims([2, 3, 1], (6, 1), 2), vec![7, CHUNK / 2 + 5, 1]),
        (dims([4, 3, 2], (8, 2), 3), vec![CHUNK + 2]), // rows that do not fill a chunk
    ]
}

#[test]
fn gradients() {
    for (dims, lengths) in cases() {
        eprintln!("{dims:?}, segments of {lengths:?}");
        let segments = Segments::from_lengths(&lengths);
        let inputs = random(dims, segments.n_tok());
        check_gradients(&inputs, |tape, v| vec![run(tape, v, dims, &segments, None)]);
    }
}

#[test]
fn gradients_from_a_state() {
    for rank in [1, 2] {
        let dims = dims([2, 3, 1], (6, 1), rank);
        for lengths in [vec![3, 1], vec![CHUNK + 3]] {
            let segments = Segments::from_lengths(&lengths);
            let inputs = random(dims, segments.n_tok());
            check_gradients(&inputs, |tape, v| {
                let mut states = random_states(&dims, lengths.len(), v[0].value().device());
                vec![run(tape, v, dims, &segments, Some(&mut states))]
            });
        }
    }
}

/// What segments start from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    Zero,
    Given,
}

/// Outputs, states behind the segments and gradients.
fn everything(device: &Device, dims: Mamba3Dims, lengths: &[usize], start: Start) -> Vec<Vec<f32>> {
    let segments = Segments::from_lengths(lengths);
    let inputs = random_activations(dims, segments.n_tok());
    let values: Vec<Tensor> = inputs.iter().map(|input| input.tensor(device)).collect();
    let random = || random_states(&dims, lengths.len(), device);
    let mut states = (start == Start::Given).then(random);
    let tape = Tape::new();
    let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
    // As they come from other ops, which leave them in bf16 where that is the precision.
    let [xbc, raw] = [0, 1].map(|key| as_activation(&tape, &v[key]));
    let inputs: Vec<Var> = [xbc, raw].into_iter().chain(v[2..].iter().cloned()).collect();
    let y = run(&tape, &inputs, dims, &segments, states.as_mut());
    let dy = Input::normal(20, &[segments.n_tok(), dims.y_width()], 1.0).tensor(device);
    let dy = device.gpu().map_or(dy.clone(), |gpu| gpu.cast(&dy, y.value().dtype()));
    let mut all = vec![y.value().to_vec()];
    let ends = states.iter().flatten().flatten();
    all.extend(ends.map(Tensor::to_vec));
    let mut grads = Gradients::default();
    tape.walk(vec![(y, dy)], &mut grads);
    all.extend(grads.iter().map(|(_, grad)| grad.to_vec()));
    all
}

/// The root of the mean square.
fn size(x: &[f32]) -> f64 {
    let sum: f64 = x.iter().map(|&x| x as f64 * x as f64).sum();
    (sum / x.len() as f64).sqrt()
}

/// Of all numbers together, how much the difference is. Numbers are at least `floor`: what is a sum
/// of terms that cancel has the errors of the terms.
fn relative(got: &[f32], want: &[f32], floor: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: Vec<f32> = got.iter().zip(want).map(|(got, want)| got - want).collect();
    size(&off) / size(want).max(floor)
}

#[test]
fn heads_that_fill_tiles_agree_with_the_cpu() {
    let cases = [
        (dims([2, 64, 1], (64, 16), 1), vec![CHUNK + 20, 5]), // tensor cores in bf16
        (dims([2, 64, 1], (128, 32), 1), vec![2 * CHUNK + 1]),
        (dims([2, 64, 2], (64, 16), 4), vec![CHUNK / 2 + 3]),
        (dims([2, 68, 1], (132, 66), 2), vec![CHUNK]), // past a tile, and past 64 pairs
    ];
    for (dims, lengths) in cases {
        for start in [Start::Zero, Start::Given] {
            let want = everything(&Device::cpu(2).unwrap(), dims, &lengths, start);
            for (device, tolerance) in devices() {
                eprintln!("{device:?}: {dims:?}");
                let got = everything(device, dims, &lengths, start);
                // A gradient by a parameter is a sum over tokens of terms as those by their inputs.
                let n_tok: usize = lengths.iter().sum();
                let n_sum = if dims.rank > 1 { 7 } else { 6 };
                let by_token = want.len() - n_sum;
                let of_sum = |idx: usize| size(&want[idx]) * (n_tok as f64).sqrt();
                let floors = [of_sum(by_token - 2), of_sum(by_token - 1)];
                for (idx, (got, want)) in got.iter().zip(&want).enumerate() {
                    let floor = match idx.checked_sub(by_token) {
                        None => 1e-3,
                        Some(0) => floors[1],
                        Some(_) => floors[0],
                    };
                    let off = relative(got, want, floor);
                    let what = format!("{device:?}: {dims:?}: result {idx}");
                    assert!(off < *tolerance as f64, "{what} is off by {off:e}");
                }
            }
        }
    }
}

#[test]
fn segments_in_several_parts_give_the_same_numbers() {
    for rank in [1, 2] {
        let dims = dims([2, 3, 1], (6, 1), rank);
        let lengths = [CHUNK + 9, 7, 12, 1];
        let segments = Segments::from_lengths(&lengths);
        for (device, tolerance) in devices() {
            let gpu = device.gpu().unwrap();
            let v: Vec<Var> = random(dims, segments.n_tok())
                .iter()
                .map(|input| Var::constant(input.tensor(device)))
                .collect();
            let inputs = to_inputs(&v, dims);
            let dy = Input::normal(20, &[segments.n_tok(), dims.y_width()], 1.0).tensor(device);
            let by = |n_bytes_max| {
                let mut states = random_states(&dims, lengths.len(), device);
                let initial =
                    states.each_ref().map(|list| list.iter().map(Tensor::copied).collect());
                let mut handles = states.each_mut().map(|list| handles_of(list));
                let lists = handles.each_mut().map(|list| &mut list[..]);
                let y = gpu::chunked(gpu, &inputs, &segments, Some(lists), n_bytes_max);
                let given = (Some(&initial), &dy);
                let grads = gpu::backward_by(gpu, &inputs, &segments, given, n_bytes_max);
                let all = grads.iter().flatten().chain([&y]).chain(states.iter().flatten());
                all.map(Tensor::to_vec).collect::<Vec<_>>()
            };
            let want = by(1 << 29);
            for n_bytes_max in [1, 1500] {
                for (idx, (got, want)) in by(n_bytes_max).iter().zip(&want).enumerate() {
                    let off = relative(got, want, 1.0);
                    assert!(off < *tolerance as f64, "{device:?}: result {idx} is off by {off:e}");
                }
            }
        }
    }
}

/// The recurrence of the header in f64: y, then the states angle, h, k and v of all segments.
fn twin(
    inputs: &[Tensor],
    dims: Mamba3Dims,
    segments: &Segments,
    initial: &[Vec<Tensor>; 4],
) -> [Vec<f64>; 5] {
    let d = dims;
    let wide = |x: &Tensor| x.to_vec().iter().map(|&x| x as f64).collect::<Vec<f64>>();
    let all: Vec<Vec<f64>> = inputs.iter().map(wide).collect();
    let soft = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let f = |x: f64| match (d.softplus_a, x < 0.0) {
        (true, _) => soft(x),
        (_, true) => 1.0 / (1.0 - x),
        _ => 1.0 + x,
    };
    let mut y = vec![0.0; segments.n_tok() * d.y_width()];
    let mut ends: [Vec<f64>; 4] = Default::default();
    for (idx, segment) in segments.iter().enumerate() {
        let [mut angle, mut h, mut k_last, mut v_last] =
            initial.each_ref().map(|list| wide(&list[idx]));
        for tok in segment.rows() {
            let (xbc, raw) = (&all[0][tok * d.width()..], &all[1][tok * d.raw_width()..]);
            for head in 0..d.n_head {
                let group = head / d.heads_per_group();
                let delta = soft(raw[head] + all[2][head]);
                let a = -f(raw[d.n_head + head]).max(d.a_floor as f64);
                let lam = 1.0 / (1.0 + (-raw[2 * d.n_head + head]).exp());
                let angle = &mut angle[head * d.n_angle..][..d.n_angle];
                for (s, angle) in angle.iter_mut().enumerate() {
                    *angle += std::f64::consts::PI * raw[3 * d.n_head + s].tanh() * delta;
                }
                let turned = |r: usize, side: usize| -> Vec<f64> {
                    let first = d.d_inner() + side * d.d_bc() + (r * d.n_group + group) * d.d_state;
                    let x = &xbc[first..][..d.d_state];
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / d.d_state as f64;
                    let bias = &all[5 + side][(head * d.rank + r) * d.d_state..];
                    let mut x: Vec<f64> = (0..d.d_state)
                        .map(|n| x[n] / (mean + d.eps as f64).sqrt() * all[3 + side][n] + bias[n])
                        .collect();
                    for (s, angle) in angle.iter().enumerate() {
                        let (i, j) =
                            if d.halves { (s, s + d.d_state / 2) } else { (2 * s, 2 * s + 1) };
                        let (a, b) = (x[i], x[j]);
                        x[i] = a * angle.cos() - b * angle.sin();
                        x[j] = a * angle.sin() + b * angle.cos();
                    }
                    x
                };
                let factor = |r: usize, p: usize| {
                    all.get(8).map_or(1.0, |m| m[(head * d.rank + r) * d.d_head + p])
                };
                let ks: Vec<Vec<f64>> = (0..d.rank).map(|r| turned(r, 0)).collect();
                let decay = (a * delta).exp();
                for n in 0..d.d_state {
                    for p in 0..d.d_head {
                        let (mut before, mut now) = (0.0, 0.0);
                        for r in 0..d.rank {
                            let k = k_last[(r * d.n_head + head) * d.d_state + n];
                            before += k * v_last[head * d.d_head + p] * factor(r, p);
                            now += ks[r][n] * xbc[head * d.d_head + p] * factor(r, p);
                        }
                        let h = &mut h[(head * d.d_state + n) * d.d_head + p];
                        *h = decay * (*h + (1.0 - lam) * delta * before) + lam * delta * now;
                    }
                }
                for r in 0..d.rank {
                    let q = turned(r, 1);
                    for p in 0..d.d_head {
                        let v = xbc[head * d.d_head + p] * factor(r, p);
                        let read = (0..d.d_state)
                            .map(|n| q[n] * h[(head * d.d_state + n) * d.d_head + p])
                            .sum::<f64>();
                        y[tok * d.y_width() + (head * d.rank + r) * d.d_head + p] =
                            read + all[7][head] * v;
                    }
                    k_last[(r * d.n_head + head) * d.d_state..][..d.d_state]
                        .copy_from_slice(&ks[r]);
                }
                let x = head * d.d_head..(head + 1) * d.d_head;
                v_last[x.clone()].copy_from_slice(&xbc[x]);
            }
        }
        for (end, state) in ends.iter_mut().zip([angle, h, k_last, v_last]) {
            end.extend(state);
        }
    }
    let [angle, h, k, v] = ends;
    [y, angle, h, k, v]
}

/// Largest difference, by the largest number; angles modulo 2 pi.
fn difference(which: usize, got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f64, |largest, x| largest.max(x.abs()));
    let off = |got: f32, want: f64| match which {
        1 => ((got as f64 - want) / std::f64::consts::TAU).fract().abs(),
        _ => (got as f64 - want).abs() / largest,
    };
    let off = |got, want| match (which, off(got, want)) {
        (1, off) => off.min(1.0 - off),
        (_, off) => off,
    };
    // Not `max`, which would drop a NaN.
    let offs = got.iter().zip(want).map(|(got, want)| off(*got, *want));
    offs.fold(0.0f64, |worst, x| if x <= worst { worst } else { x })
}

fn compare_on(
    device: &Device,
    dims: Mamba3Dims,
    lengths: &[usize],
    inputs: &[Input],
    tolerance: f64,
) {
    let segments = Segments::from_lengths(lengths);
    let values: Vec<Tensor> = inputs.iter().map(|input| input.tensor(device)).collect();
    let mut states = random_states(&dims, lengths.len(), device);
    let want = twin(&values, dims, &segments, &states);
    let v: Vec<Var> = values.into_iter().map(Var::constant).collect();
    let y = run(&Tape::off(), &v, dims, &segments, Some(&mut states));
    let ends = states.each_ref().map(|list| list.iter().flat_map(Tensor::to_vec).collect());
    let [angle, h, k, v] = ends;
    for (which, (got, want)) in [y.value().to_vec(), angle, h, k, v].iter().zip(&want).enumerate() {
        let off = difference(which, got, want);
        assert!(off < tolerance, "{device:?}: {dims:?}: result {which} is off by {off:e}");
    }
}

#[test]
fn agrees_with_the_recurrence_in_f64() {
    for (dims, lengths) in cases() {
        let inputs = random(dims, lengths.iter().sum());
        compare_on(&Device::cpu(2).unwrap(), dims, &lengths, &inputs, 4e-6);
        for (device, tolerance) in devices() {
            compare_on(device, dims, &lengths, &inputs, *tolerance as f64);
        }
    }
}

#[test]
fn strong_decay_and_large_steps_are_finite_and_right() {
    let dims = dims([4, 3, 2], (6, 3), 1);
    let mut inputs = random(dims, 200);
    // Steps between 1e-5 and 12 side by side, and many turns in all.
    inputs[1] = Input::map(2, &[200, dims.raw_width()], |x| (6.0 * x).clamp(-12.0, 12.0));
    compare_on(&Device::cpu(2).unwrap(), dims, &[70, 130], &inputs, 4e-5);
    for (device, tolerance) in devices() {
        compare_on(device, dims, &[70, 130], &inputs, (*tolerance as f64).max(4e-5));
    }
}

#[test]
fn the_floor_limits_decay_and_stops_its_gradient() {
    let dims = Mamba3Dims { a_floor: 0.6, ..dims([2, 3, 1], (8, 2), 1) };
    let inputs = random_activations(dims, 90);
    let host = Device::cpu(1).unwrap();
    compare_on(&host, dims, &[90], &inputs, 4e-6);
    let want = everything(&host, dims, &[90], Start::Zero);
    for (device, tolerance) in devices() {
        let got = everything(device, dims, &[90], Start::Zero);
        assert!(relative(&got[2], &want[2], 1e-3) < *tolerance as f64, "{device:?}");
    }
    let raw = inputs[1].tensor(&host);
    let rows = raw.f32().chunks(dims.raw_width()).zip(want[2].chunks(dims.raw_width()));
    let mut n_stopped = 0;
    // Nothing decays before the second token.
    for (raw, draw) in rows.skip(1) {
        for head in 2..4 {
            let stopped = raw[head] < 0.0 && 1.0 / (1.0 - raw[head]) < 0.6;
            n_stopped += usize::from(stopped);
            assert_eq!(draw[head] == 0.0, stopped, "{} {}", raw[head], draw[head]);
        }
    }
    assert!((20..160).contains(&n_stopped), "{n_stopped} of 178 stopped");
}

#[test]
fn chunks_agree_with_the_recurrence() {
    let device = Device::cpu(2).unwrap();
    for (dims, lengths) in cases() {
        let segments = Segments::from_lengths(&lengths);
        let values: Vec<Tensor> =
            random(dims, segments.n_tok()).iter().map(|input| input.tensor(&device)).collect();
        let by = |path| {
            let v: Vec<Var> = values.iter().cloned().map(Var::constant).collect();
            let inputs = to_inputs(&v, dims);
            let mut states = random_states(&dims, lengths.len(), &device);
            let mut handles = states.each_mut().map(|list| handles_of(list));
            let lists = handles.each_mut().map(|list| &mut list[..]);
            let y = forward_by(path, &inputs, &segments, Some(lists)).to_vec();
            let [angle, h, k, v] =
                states.each_ref().map(|list| list.iter().flat_map(Tensor::to_vec).collect());
            [y, angle, h, k, v]
        };
        let (steps, chunks) = (by(Path::Recurrent), by(Path::Chunked));
        for (which, (got, want)) in chunks.iter().zip(&steps).enumerate() {
            let want: Vec<f64> = want.iter().map(|&x| x as f64).collect();
            let off = difference(which, got, &want);
            assert!(off < 3e-6, "{dims:?}: result {which} is off by {off:e}");
        }
    }
}

fn to_inputs(v: &[Var], dims: Mamba3Dims) -> Inputs {
    let value = |idx: usize| v[idx].value().clone();
    Inputs {
        xbc: value(0),
        raw: value(1),
        delta_bias: value(2),
        b_norm: value(3),
        c_norm: value(4),
        b_bias: value(5),
        c_bias: value(6),
        skip: value(7),
        mimo_x: v.get(8).map(|var| var.value().clone()),
        dims,
    }
}

#[test]
fn a_sequence_in_parts_with_its_state_equals_the_whole() {
    let n_tok = CHUNK + 20;
    let steps: Vec<usize> = (1..n_tok).collect();
    let cuts = [&[1][..], &[RECURRENT - 1], &[50], &[CHUNK], &[30, 31, n_tok - 1], &steps];
    for rank in [1, 2] {
        let dims = dims([2, 3, 1], (6, 1), rank);
        parts_equal_the_whole(&Device::cpu(2).unwrap(), dims, n_tok, &cuts, 3e-6);
        for (device, tolerance) in devices() {
            parts_equal_the_whole(device, dims, n_tok, &cuts, *tolerance as f64);
        }
    }
}

#[test]
fn a_state_that_no_group_can_share_is_stepped_too() {
    for (device, tolerance) in devices() {
        let dims = dims([1, 2, 1], (3000, 3), 2);
        parts_equal_the_whole(device, dims, 3, &[&[1, 2]], *tolerance as f64);
    }
}

fn parts_equal_the_whole(
    device: &Device,
    dims: Mamba3Dims,
    n_tok: usize,
    all_cuts: &[&[usize]],
    tolerance: f64,
) {
    let values: Vec<Tensor> =
        random(dims, n_tok).iter().map(|input| input.tensor(device)).collect();
    let part = |rows: Range<usize>, states: &mut [Vec<Tensor>; 4]| {
        let of_rows = |(idx, x): (usize, &Tensor)| {
            Var::constant(if idx < 2 { x.rows(rows.clone()) } else { x.clone() })
        };
        let v: Vec<Var> = values.iter().enumerate().map(of_rows).collect();
        let segments = Segments::continuing(&[(rows.len(), rows.start)]);
        run(&Tape::off(), &v, dims, &segments, Some(states)).value().to_vec()
    };
    let zero = || shapes(&dims).map(|shape| vec![Tensor::zeros(device, &shape)]);
    let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<f64>>();
    let mut last = zero();
    let whole = wide(&part(0..n_tok, &mut last));
    for cuts in all_cuts {
        let mut states = zero();
        let mut y = Vec::new();
        let (mut start, mut ends) = (0, cuts.to_vec());
        ends.push(n_tok);
        for end in ends {
            y.extend(part(start..end, &mut states));
            start = end;
        }
        let off = difference(0, &y, &whole);
        assert!(off < tolerance, "{device:?}: cut at {cuts:?}: {off:e}");
        for (idx, (got, want)) in states.iter().zip(&last).enumerate() {
            let off = difference(idx + 1, &got[0].to_vec(), &wide(&want[0].to_vec()));
            assert!(off < tolerance, "{device:?}: state {idx}, cut at {cuts:?}: {off:e}");
        }
    }
}

#[test]
fn no_token_sees_a_later_one_or_another_segment() {
    for rank in [1, 2] {
        causal(&Device::cpu(2).unwrap(), rank);
        devices().iter().for_each(|(device, _)| causal(device, rank));
    }
}

fn causal(device: &Device, rank: usize) {
    let dims = dims([2, 3, 1], (6, 1), rank);
    let segments = Segments::from_lengths(&[30, CHUNK + 30]);
    let inputs = random(dims, segments.n_tok());
    let tensors = || inputs.iter().map(|input| input.tensor(device)).collect::<Vec<Tensor>>();
    let plain = |values: Vec<Tensor>| {
        let v: Vec<Var> = values.into_iter().map(Var::constant).collect();
        run(&Tape::off(), &v, dims, &segments, None).value().to_vec()
    };
    let y = plain(tensors());
    let width = dims.y_width();
    for tok in [0, 17, 29, 30, 31, 30 + CHUNK / 2, 30 + CHUNK - 1, 30 + CHUNK, 92] {
        let mut changed = tensors();
        for x in &mut changed[..2] {
            let n = x.shape()[1];
            let mut numbers = x.to_vec();
            numbers[tok * n..][..n].fill(1.7);
            *x = Tensor::from_f32(device, &[segments.n_tok(), n], &numbers);
        }
        let y_changed = plain(changed);
        let segment = segments.iter().find(|segment| segment.rows().contains(&tok)).unwrap();
        let end = segment.rows().end;
        assert!(y[..tok * width] == y_changed[..tok * width], "{device:?}: before token {tok}");
        assert_ne!(y[tok * width..end * width], y_changed[tok * width..end * width]);
        assert!(y[end * width..] == y_changed[end * width..], "{device:?}: behind token {tok}");
    }
}

#[test]
fn a_second_run_takes_no_memory_and_gives_the_same_bits() {
    let device = Device::cpu(1).unwrap();
    let dims = dims([4, 8, 2], (8, 2), 2);
    let segments = Segments::from_lengths(&[100, 40, 60]);
    let values: Vec<Tensor> =
        random(dims, segments.n_tok()).iter().map(|input| input.tensor(&device)).collect();
    let dy = Input::normal(20, &[segments.n_tok(), dims.y_width()], 1.0).tensor(&device);
    let step = || {
        let tape = Tape::new();
        let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
        let y = run(&tape, &v, dims, &segments, None);
        let mut bits = y.value().f32().to_vec();
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy.clone())], &mut grads);
        grads.iter().for_each(|(_, grad)| bits.extend(grad.f32()));
        (bits, device.memory().n_alloc)
    };
    // The second finds in its buffers what the first left there.
    assert!(step() == step());
}

#[test]
fn another_handle_of_a_state_keeps_its_numbers() {
    let host = Device::cpu(2).unwrap();
    let dims = dims([2, 3, 1], (6, 1), 1);
    for device in devices().iter().map(|(device, _)| device).chain([&host]) {
        for n_tok in [1, CHUNK + 3] {
            let v: Vec<Var> =
                random(dims, n_tok).iter().map(|x| Var::constant(x.tensor(device))).collect();
            let segments = Segments::from_lengths(&[n_tok]);
            let mut states = random_states(&dims, 1, device);
            let mut snapshot = states.clone();
            let before = states.each_ref().map(|list| list[0].to_vec());
            let y = run(&Tape::off(), &v, dims, &segments, Some(&mut states)).value().to_vec();
            assert_eq!(snapshot.each_ref().map(|list| list[0].to_vec()), before);
            let again = run(&Tape::off(), &v, dims, &segments, Some(&mut snapshot));
            assert_eq!(y, again.value().to_vec());
            for ((state, snapshot), before) in states.iter().zip(&snapshot).zip(&before) {
                assert_eq!(state[0].to_vec(), snapshot[0].to_vec());
                assert_ne!(state[0].to_vec(), *before);
            }
        }
    }
}
