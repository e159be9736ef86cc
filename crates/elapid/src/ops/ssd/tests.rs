//! Tests of `ssd`: finite differences, a twin in f64, steps against whole, strong decays.

use super::*;
use crate::ops::check::{Input, as_activation, check_gradients, devices};
use crate::tape::Gradients;

fn dims(n_head: usize, d_head: usize, n_group: usize, d_state: usize) -> SsdDims {
    SsdDims { n_head, d_head, n_group, d_state, delta_min: 0.0, delta_max: f32::INFINITY }
}

/// xbc, delta, delta_bias, a_log, skip.
fn random(dims: SsdDims, n_tok: usize) -> [Input; 5] {
    [
        Input::normal(1, &[n_tok, dims.width()], 1.0),
        Input::normal(2, &[n_tok, dims.n_head], 1.0),
        Input::normal(3, &[dims.n_head], 0.5),
        Input::map(4, &[dims.n_head], |x| 0.5 * x - 1.0),
        Input::normal(5, &[dims.n_head], 1.0),
    ]
}

fn to_inputs(values: [Tensor; 5], dims: SsdDims) -> Inputs {
    let [xbc, delta, delta_bias, a_log, skip] = values;
    Inputs { xbc, delta, delta_bias, a_log, skip, dims }
}

fn run(tape: &Tape, v: &[Var], dims: SsdDims, segments: &Segments) -> Var {
    let [xbc, delta, delta_bias, a_log, skip] = v else { panic!("five inputs") };
    ssd(tape, &Ssd { xbc, delta, delta_bias, a_log, skip, dims }, segments, None)
}

#[test]
fn gradients() {
    let cases: [(SsdDims, &[usize]); 8] = [
        (dims(1, 1, 1, 1), &[1]),
        (dims(2, 3, 1, 5), &[7]), // forward by the recurrence
        (dims(2, 3, 2, 5), &[CHUNK - 1, 1, CHUNK, 2]), // edges of one chunk
        (dims(4, 3, 2, 6), &[CHUNK + 1, 2 * CHUNK + 20]), // a state between chunks
        (dims(6, 17, 2, 19), &[20, 9]), // tails of vectors, tasks by head
        (dims(4, 2, 1, 2), &[9; 20]), // several heads in a task
        (dims(2, 68, 1, 132), &[CHUNK + 3, 5]), // past the tiles of a GPU
        (dims(2, 66, 2, 65), &[CHUNK + 17]), // rows that four numbers do not fill
    ];
    for (dims, lengths) in cases {
        let segments = Segments::from_lengths(lengths);
        eprintln!("{dims:?}, segments of {lengths:?}");
        let inputs = random(dims, segments.n_tok());
        check_gradients(&inputs, |tape, v| vec![run(tape, v, dims, &segments)]);
    }
}

#[test]
fn gradients_of_activations() {
    let cases: [(SsdDims, &[usize]); 4] = [
        (dims(1, 64, 1, 64), &[1]),
        (dims(3, 64, 1, 128), &[2 * CHUNK + 20, 5]), // an odd number of heads, a state between
        (dims(4, 64, 2, 64), &[CHUNK, CHUNK + 1, 17]),
        (dims(2, 64, 2, 128), &[40, CHUNK + 63]),
    ];
    let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
    for (dims, lengths) in cases {
        let segments = Segments::from_lengths(lengths);
        eprintln!("{dims:?}, segments of {lengths:?}");
        let mut inputs = random(dims, segments.n_tok());
        inputs[0] = Input::map(1, &[segments.n_tok(), dims.width()], |x| rounded(0.3 * x));
        check_gradients(&inputs, |tape, v| {
            let xbc = as_activation(tape, &v[0]);
            let [delta, delta_bias, a_log, skip] = &v[1..] else { panic!("five inputs") };
            let all = Ssd { xbc: &xbc, delta, delta_bias, a_log, skip, dims };
            vec![as_activation(tape, &ssd(tape, &all, &segments, None))]
        });
    }
}

#[test]
fn gradients_with_a_state_before_and_a_clamp() {
    let dims = SsdDims { delta_min: 0.3, delta_max: 1.5, ..dims(2, 3, 1, 5) };
    let segments = Segments::from_lengths(&[CHUNK + 9, 3]);
    let mut inputs = random(dims, segments.n_tok());
    // Away from the edges of the clamp, which are at -1.05 and 1.25: finite differences would
    // straddle them.
    inputs[1] = Input::map(2, &[segments.n_tok(), 2], |x| {
        let clear = |x: f32, edge: f32| x + (0.1 - (x - edge).abs()).max(0.0).copysign(x - edge);
        clear(clear(2.0 * x, -1.05), 1.25)
    });
    inputs[2] = Input::normal(3, &[2], 0.0);
    let before = Input::normal(6, &[2, 5, 3], 1.0);
    // The bias would move every token over the edges at once.
    let (bias, moved) = (inputs[2].clone(), [0, 1, 3, 4].map(|idx: usize| inputs[idx].clone()));
    check_gradients(&moved, |tape, v| {
        let device = v[0].value().device();
        let mut states = [before.tensor(device), before.tensor(device)];
        let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
        let delta_bias = &Var::constant(bias.tensor(device));
        let [xbc, delta, a_log, skip] = v else { panic!("four inputs") };
        let inputs = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
        vec![ssd(tape, &inputs, &segments, Some(&mut states))]
    });
}

/// Outputs, gradients in the order of the inputs and last states, by the recurrence in f64.
struct Twin {
    y: Vec<f64>,
    grads: [Vec<f64>; 5],
    states: Vec<f64>,
}

fn twin(inputs: &Inputs, segments: &Segments, initial: &[f32], dy: &[f32]) -> Twin {
    let d = inputs.dims;
    let wide = |tensor: &Tensor| -> Vec<f64> { tensor.f32().iter().map(|&x| x as f64).collect() };
    let all = [&inputs.xbc, &inputs.delta, &inputs.delta_bias, &inputs.a_log, &inputs.skip];
    let [xbc, raw, bias, a_log, skip] = all.map(wide);
    let mut twin = Twin {
        y: vec![0.0; segments.n_tok() * d.d_inner()],
        grads: all.map(|tensor| vec![0.0; tensor.n_elem()]),
        states: initial.iter().map(|&h| h as f64).collect(),
    };
    for (segment_idx, segment) in segments.iter().enumerate() {
        for head in 0..d.n_head {
            let (b, c) = d.columns(head / d.heads_per_group());
            let a = -a_log[head].exp();
            let softplus = |tok: usize| (raw[tok * d.n_head + head] + bias[head]).exp().ln_1p();
            let delta = |tok| softplus(tok).clamp(d.delta_min as f64, d.delta_max as f64);
            let at = |tok: usize, column: usize| tok * d.width() + column;
            let x = |tok, p: usize| at(tok, head * d.d_head + p);
            let out = |tok: usize, p: usize| tok * d.d_inner() + head * d.d_head + p;
            for (n, p) in (0..d.d_state).flat_map(|n| (0..d.d_head).map(move |p| (n, p))) {
                let state_idx = ((segment_idx * d.n_head + head) * d.d_state + n) * d.d_head + p;
                let mut h = vec![twin.states[state_idx]];
                for tok in segment.rows() {
                    let input = delta(tok) * xbc[at(tok, b + n)] * xbc[x(tok, p)];
                    let next = (delta(tok) * a).exp() * h[h.len() - 1] + input;
                    twin.y[out(tok, p)] += xbc[at(tok, c + n)] * next;
                    h.push(next);
                }
                twin.states[state_idx] = h[segment.n_tok];
                let mut dh = 0.0;
                let [dxbc, draw, dbias, da_log, _] = &mut twin.grads;
                for tok in segment.rows().rev() {
                    let (before, after) = (h[tok - segment.start], h[tok - segment.start + 1]);
                    let dy = dy[out(tok, p)] as f64;
                    let (delta, decay) = (delta(tok), (delta(tok) * a).exp());
                    dxbc[at(tok, c + n)] += dy * after;
                    dh += dy * xbc[at(tok, c + n)];
                    dxbc[at(tok, b + n)] += dh * delta * xbc[x(tok, p)];
                    dxbc[x(tok, p)] += dh * delta * xbc[at(tok, b + n)];
                    let ddecay = dh * before * decay;
                    let ddelta = dh * xbc[at(tok, b + n)] * xbc[x(tok, p)] + a * ddecay;
                    da_log[head] += ddecay * delta * a;
                    if delta == softplus(tok) {
                        let slope = 1.0 - (-delta).exp();
                        draw[tok * d.n_head + head] += ddelta * slope;
                        dbias[head] += ddelta * slope;
                    }
                    dh *= decay;
                }
            }
            for (tok, p) in segment.rows().flat_map(|tok| (0..d.d_head).map(move |p| (tok, p))) {
                let dy = dy[out(tok, p)] as f64;
                twin.y[out(tok, p)] += skip[head] * xbc[x(tok, p)];
                twin.grads[0][x(tok, p)] += skip[head] * dy;
                twin.grads[4][head] += xbc[x(tok, p)] * dy;
            }
        }
    }
    twin
}

/// Largest difference, by the largest number.
fn difference(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f64, |largest, x| largest.max(x.abs()));
    let differences = got.iter().zip(want).map(|(got, want)| (*got as f64 - want).abs());
    // Not `max`, which would drop a NaN.
    differences.fold(0.0f64, |worst, x| if x <= worst { worst } else { x }) / largest
}

/// Compares outputs, gradients and states with the twin, on the CPU and on GPUs.
fn compare(dims: SsdDims, lengths: &[usize], inputs: [Input; 5], tolerance: f64) {
    compare_on(&Device::cpu(2).unwrap(), dims, lengths, inputs.clone(), tolerance);
    for (device, tolerance) in devices() {
        compare_on(device, dims, lengths, inputs.clone(), *tolerance as f64);
    }
}

fn compare_on(
    device: &Device,
    dims: SsdDims,
    lengths: &[usize],
    inputs: [Input; 5],
    tolerance: f64,
) {
    let host = Device::cpu(2).unwrap();
    let segments = Segments::from_lengths(lengths);
    let state_shape = [dims.n_head, dims.d_state, dims.d_head];
    let mut states: Vec<Tensor> = (0..lengths.len() as u64)
        .map(|idx| Input::normal(10 + idx, &state_shape, 1.0).tensor(device))
        .collect();
    let initial: Vec<f32> = states.iter().flat_map(|state| state.to_vec()).collect();
    let dy = Input::normal(20, &[segments.n_tok(), dims.d_inner()], 1.0).tensor(device);
    let values = inputs.each_ref().map(|input| input.tensor(device));
    let there = inputs.map(|input| input.tensor(&host));
    let want = twin(&to_inputs(there, dims), &segments, &initial, &dy.to_vec());

    let tape = Tape::new();
    let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
    // Heads of 64 as they come from other ops: there is a faster way for them in bf16.
    let passed = |x: &Var| if dims.d_head == 64 { as_activation(&tape, x) } else { x.clone() };
    let (xbc, delta, delta_bias, a_log, skip) = (&passed(&v[0]), &v[1], &v[2], &v[3], &v[4]);
    let mut states: Vec<&mut Tensor> = states.iter_mut().collect();
    let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
    let y = passed(&ssd(&tape, &all, &segments, Some(&mut states)));
    let off = difference(&y.value().to_vec(), &want.y);
    assert!(off < tolerance, "{device:?}: y is off by {off:e}");
    let last: Vec<f32> = states.iter().flat_map(|state| state.to_vec()).collect();
    let off = difference(&last, &want.states);
    assert!(off < tolerance, "{device:?}: states are off by {off:e}");
    let mut grads = Gradients::default();
    tape.walk(vec![(y, dy)], &mut grads);
    for (key, want) in want.grads.iter().enumerate() {
        let off = difference(&grads.get(key).unwrap().to_vec(), want);
        assert!(off < tolerance, "{device:?}: gradient {key} is off by {off:e}");
    }
}

#[test]
fn agrees_with_the_recurrence_in_f64_forward_and_backward() {
    let cases: [(SsdDims, &[usize]); 7] = [
        (dims(2, 64, 1, 128), &[2 * CHUNK + 9]),
        (dims(4, 64, 2, 64), &[3, CHUNK + 1]),
        (dims(1, 1, 1, 1), &[1]),
        (dims(2, 3, 2, 5), &[1, 7, 3]),
        (dims(4, 5, 2, 3), &[CHUNK, 2 * CHUNK + 1, 1, CHUNK - 1, 300]),
        (dims(3, 20, 1, 18), &[150]),
        (dims(4, 4, 1, 4), &[5; 40]),
    ];
    for (dims, lengths) in cases {
        let inputs = random(dims, lengths.iter().sum());
        compare(dims, lengths, inputs, 4e-6);
    }
}

#[test]
fn strong_decay_is_finite_and_right_forward_and_backward() {
    strong_decay(dims(3, 4, 1, 6));
    strong_decay(dims(3, 64, 1, 64));
}

fn strong_decay(dims: SsdDims) {
    let mut inputs = random(dims, 200);
    // Steps between 1e-5 and 12 side by side, decays up to exp(3): the sum over a chunk passes
    // -5000, where a plain f32 keeps four digits of a small step.
    inputs[1] = Input::map(2, &[200, 3], |x| (8.0 * x).clamp(-12.0, 12.0));
    inputs[2] = Input::normal(3, &[3], 0.0);
    inputs[3] = Input::map(4, &[3], |x| if x > 0.0 { 3.0 } else { 2.5 });
    compare(dims, &[70, 130], inputs.clone(), 4e-6);
    // Everything underflows.
    inputs[1] = Input::map(2, &[200, 3], |x| 12.0 - x.abs().min(1.0));
    compare(dims, &[70, 130], inputs, 4e-6);
}

#[test]
fn the_clamp_limits_steps_and_stops_their_gradient() {
    let dims = SsdDims { delta_min: 0.2, delta_max: 0.9, ..dims(2, 3, 1, 4) };
    let mut inputs = random(dims, 90);
    inputs[1] = Input::normal(2, &[90, 2], 2.0);
    compare(dims, &[90], inputs.clone(), 4e-6);

    let device = Device::cpu(1).unwrap();
    let tape = Tape::new();
    let v: Vec<Var> =
        inputs.iter().enumerate().map(|(key, x)| tape.leaf(key, &x.tensor(&device))).collect();
    let y = run(&tape, &v, dims, &Segments::from_lengths(&[90]));
    let ones = Tensor::from_f32(&device, &[90, 6], &[1.0; 540]);
    let mut grads = Gradients::default();
    tape.walk(vec![(y, ones)], &mut grads);
    let mut n_stopped = 0;
    for (idx, grad) in grads.get(1).unwrap().f32().iter().enumerate() {
        let soft = (v[1].value().f32()[idx] + v[2].value().f32()[idx % 2]).exp().ln_1p();
        let stopped = !(0.2..=0.9).contains(&soft);
        n_stopped += stopped as usize;
        assert_eq!(*grad == 0.0, stopped, "step {soft}, gradient {grad}");
    }
    assert!((40..160).contains(&n_stopped), "{n_stopped} of 180 stopped");
}

#[test]
fn steps_of_zero_leave_the_state_alone() {
    let dims = dims(2, 3, 1, 4);
    for n_tok in [3, 80] {
        let mut inputs = random(dims, n_tok);
        inputs[1] = Input::map(2, &[n_tok, 2], |_| -200.0);
        compare(dims, &[n_tok], inputs, 4e-6);
    }
}

#[test]
fn chunks_agree_with_the_recurrence() {
    let device = Device::cpu(2).unwrap();
    let dims = dims(6, 24, 2, 20);
    let segments = Segments::from_lengths(&[1, CHUNK, 2 * CHUNK + 5, 7]);
    let values = random(dims, segments.n_tok()).map(|input| input.tensor(&device));
    let inputs = to_inputs(values, dims);
    let by = |path, n_heads| {
        let mut states: Vec<Tensor> =
            (0..4).map(|idx| Input::normal(idx, &[6, 20, 24], 1.0).tensor(&device)).collect();
        let mut handles: Vec<&mut Tensor> = states.iter_mut().collect();
        let y = forward_by(path, &inputs, &segments, Some(&mut handles), n_heads);
        let states: Vec<f32> = states.iter().flat_map(|state| state.f32().to_vec()).collect();
        (y.f32().to_vec(), states)
    };
    let wide = |x: &[f32]| x.iter().map(|&x| x as f64).collect::<Vec<f64>>();
    let (y, states) = by(Path::Recurrent, 6);
    for n_heads in [1, 3] {
        let (y_chunked, states_chunked) = by(Path::Chunked, n_heads);
        assert!(difference(&y_chunked, &wide(&y)) < 2e-6);
        assert!(difference(&states_chunked, &wide(&states)) < 2e-6);
    }
}

#[test]
fn a_sequence_in_parts_with_its_state_equals_the_whole() {
    parts_equal_the_whole(&Device::cpu(2).unwrap(), 2e-6);
    for (device, tolerance) in devices() {
        parts_equal_the_whole(device, *tolerance as f64);
    }
}

fn parts_equal_the_whole(device: &Device, tolerance: f64) {
    let dims = dims(2, 5, 1, 6);
    let n_tok = CHUNK + 40;
    let values = random(dims, n_tok).map(|input| input.tensor(device));
    let part = |rows: Range<usize>, state: &mut Tensor| {
        let v = values.each_ref().map(|x| {
            let part = if x.shape().len() == 2 { x.rows(rows.clone()) } else { x.clone() };
            Var::constant(part)
        });
        let [xbc, delta, delta_bias, a_log, skip] = &v;
        let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
        let segments = Segments::continuing(&[(rows.len(), rows.start)]);
        let y = ssd(&Tape::off(), &all, &segments, Some(&mut [state]));
        y.value().to_vec().iter().map(|&y| y as f64).collect::<Vec<f64>>()
    };
    let zero = || Tensor::zeros(device, &[2, 6, 5]);
    let mut last = zero();
    let whole = part(0..n_tok, &mut last);
    let last: Vec<f64> = last.to_vec().iter().map(|&h| h as f64).collect();
    let steps: Vec<usize> = (1..n_tok).collect();
    for cuts in [&[1][..], &[RECURRENT - 1], &[50], &[CHUNK], &[30, 31, n_tok - 1], &steps] {
        let mut state = zero();
        let mut y = Vec::new();
        let (mut start, mut ends) = (0, cuts.to_vec());
        ends.push(n_tok);
        for end in ends {
            y.extend(part(start..end, &mut state).iter().map(|&y| y as f32));
            start = end;
        }
        assert!(difference(&y, &whole) < tolerance, "{device:?}: cut at {cuts:?}");
        assert!(difference(&state.to_vec(), &last) < tolerance, "{device:?}: cut at {cuts:?}");
    }
}

#[test]
fn no_token_sees_a_later_one_or_another_segment() {
    let device = Device::cpu(2).unwrap();
    let dims = dims(2, 3, 1, 5);
    let segments = Segments::from_lengths(&[30, CHUNK + 30]);
    let inputs = random(dims, segments.n_tok());
    let plain = |inputs: &[Tensor; 5]| {
        let inputs = to_inputs(inputs.clone(), dims);
        forward(&inputs, &segments, None).f32().to_vec()
    };
    let values = inputs.each_ref().map(|input| input.tensor(&device));
    let y = plain(&values);
    for tok in [0, 17, 29, 30, 31, 30 + CHUNK - 1, 30 + CHUNK, segments.n_tok() - 1] {
        let mut changed = inputs.each_ref().map(|input| input.tensor(&device));
        for (x, width) in [(0, dims.width()), (1, 2)] {
            changed[x].f32_mut()[tok * width..][..width].fill(3.0);
        }
        let y_changed = plain(&changed);
        let segment = segments.iter().find(|segment| segment.rows().contains(&tok)).unwrap();
        let end = segment.rows().end;
        assert_eq!(y[..tok * 6], y_changed[..tok * 6]);
        assert_ne!(y[tok * 6..end * 6], y_changed[tok * 6..end * 6]);
        assert_eq!(y[end * 6..], y_changed[end * 6..]);
    }
}

#[test]
fn a_second_run_takes_no_memory_and_gives_the_same_bits() {
    let device = Device::cpu(1).unwrap();
    let dims = dims(4, 8, 2, 8);
    let segments = Segments::from_lengths(&[100, 40, 60]);
    let values = random(dims, segments.n_tok()).map(|input| input.tensor(&device));
    let dy = Input::normal(20, &[segments.n_tok(), 32], 1.0).tensor(&device);
    let step = || {
        let tape = Tape::new();
        let v: Vec<Var> = values.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
        let y = run(&tape, &v, dims, &segments);
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
fn another_handle_of_a_state_keeps_its_numbers_and_an_only_one_is_written_where_it_is() {
    let device = Device::cpu(2).unwrap();
    let dims = dims(4, 8, 2, 6);
    for n_tok in [1, CHUNK + 3] {
        let v = random(dims, n_tok).map(|x| Var::constant(x.tensor(&device)));
        let [xbc, delta, delta_bias, a_log, skip] = &v;
        let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
        let segments = Segments::from_lengths(&[n_tok]);
        let mut state = Input::normal(9, &[4, 6, 8], 1.0).tensor(&device);
        let (snapshot, before) = (state.clone(), state.f32().to_vec());
        let shared = ssd(&Tape::off(), &all, &segments, Some(&mut [&mut state]));
        assert_eq!(snapshot.f32(), before);
        let after = state.f32().to_vec();
        let mut alone = snapshot;
        let address = alone.bytes().as_ptr();
        let again = ssd(&Tape::off(), &all, &segments, Some(&mut [&mut alone]));
        assert_eq!(alone.bytes().as_ptr(), address);
        assert_eq!((again.value().f32(), alone.f32()), (shared.value().f32(), &after[..]));
        assert_ne!(alone.f32(), before);
    }
}

#[test]
fn another_handle_of_a_state_keeps_its_numbers_on_every_device() {
    let dims = dims(4, 18, 2, 6);
    for (device, _) in devices() {
        for n_tok in [1, CHUNK + 3] {
            let v = random(dims, n_tok).map(|x| Var::constant(x.tensor(device)));
            let [xbc, delta, delta_bias, a_log, skip] = &v;
            let all = Ssd { xbc, delta, delta_bias, a_log, skip, dims };
            let segments = Segments::from_lengths(&[n_tok]);
            let mut state = Input::normal(9, &[4, 6, 18], 1.0).tensor(device);
            let (mut snapshot, before) = (state.clone(), state.to_vec());
            let y = ssd(&Tape::off(), &all, &segments, Some(&mut [&mut state]));
            assert_eq!(snapshot.to_vec(), before);
            let again = ssd(&Tape::off(), &all, &segments, Some(&mut [&mut snapshot]));
            assert_eq!(y.value().to_vec(), again.value().to_vec());
            assert_eq!(state.to_vec(), snapshot.to_vec());
            assert_ne!(state.to_vec(), before);
        }
    }
}

#[test]
fn stretches_of_any_length_give_the_same_numbers() {
    let dims = dims(2, 5, 1, 6);
    let segments = Segments::from_lengths(&[2 * CHUNK + 9, 7, 3 * CHUNK, 1]);
    for (device, tolerance) in devices() {
        let gpu = device.gpu().unwrap();
        let inputs = to_inputs(random(dims, segments.n_tok()).map(|x| x.tensor(device)), dims);
        let dy = Input::normal(20, &[segments.n_tok(), 10], 1.0).tensor(device);
        let state = |idx: u64| Input::normal(10 + idx, &[2, 6, 5], 1.0).tensor(device);
        for has_states in [false, true] {
            let run = |n_chunk_max| {
                let mut states: Vec<Tensor> = (0..4).map(state).collect();
                let initial: Vec<Tensor> = states.iter().map(Tensor::copied).collect();
                let mut handles: Vec<&mut Tensor> = states.iter_mut().collect();
                let handles = has_states.then_some(&mut handles[..]);
                let y = gpu::chunked(gpu, &inputs, &segments, handles, n_chunk_max);
                let initial = has_states.then_some(&initial[..]);
                let grads = gpu::backward_by(gpu, &inputs, &segments, (initial, &dy), n_chunk_max);
                let all = grads.iter().flatten().chain([&y]).chain(&states);
                all.map(Tensor::to_vec).collect::<Vec<_>>()
            };
            let want = run(100);
            for n_chunk_max in [1, 2, 4] {
                for (want, got) in want.iter().zip(run(n_chunk_max)) {
                    let want: Vec<f64> = want.iter().map(|&x| x as f64).collect();
                    let off = difference(&got, &want);
                    assert!(off < *tolerance as f64, "{device:?}: {n_chunk_max}: {off:e}");
                }
            }
        }
    }
}
