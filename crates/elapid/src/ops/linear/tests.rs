//! Gradients of every form, blocks, groups, dropout and magnitudes.

use super::columns::Put;
use super::*;
use crate::files::TensorFile;
use crate::files::safetensors::SafeTensors;
use crate::ops::activation::{Kind, gated};
use crate::ops::adamw::AdamW;
use crate::ops::adamw::adamw;
use crate::ops::check::{Input, check_gradients, compare_devices, devices, small_bindings};
use crate::ops::norm::rms_norm;
use crate::tape::Gradients;
use crate::tensor::DType;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Gpu, Precision};
use crate::tensor::quant::BlockType;
use crate::tensor::rng::Rng;
use half::{bf16, f16};
use std::sync::Arc;

fn with_adapter(v: &[Var]) -> Linear {
    let (a, b) = (v[3].clone(), v[4].clone());
    let adapter = Adapter { a, b, scale: 1.5, dropout: None, magnitude: None };
    let (bias, adapter) = (Some(v[2].clone()), Some(adapter));
    Linear { bias, adapter, ..Linear::from(v[1].clone()) }
}

fn with_bias(v: &[Var]) -> Linear {
    Linear { bias: Some(v[2].clone()), ..Linear::from(v[1].clone()) }
}

fn operands(n_tok: usize, d_in: usize, d_out: usize) -> Vec<Input> {
    vec![
        Input::normal(1, &[n_tok, d_in], 1.0),
        Input::normal(2, &[d_out, d_in], 0.5),
        Input::normal(3, &[d_out], 0.5),
        Input::normal(4, &[2, d_in], 0.5),
        Input::normal(5, &[d_out, 2], 0.5),
    ]
}

#[test]
fn gradients() {
    // Few tokens and many, on and off the edges of tiles there.
    for (n_tok, d_in, d_out) in [(1, 1, 3), (5, 7, 9), (130, 33, 20), (8, 132, 68), (66, 64, 129)] {
        let inputs = operands(n_tok, d_in, d_out);
        check_gradients(&inputs[..2], |tape, v| vec![linear(tape, &v[0], &v[1].clone().into())]);
        check_gradients(&inputs[..3], |tape, v| vec![linear(tape, &v[0], &with_bias(v))]);
        check_gradients(&inputs, |tape, v| vec![linear(tape, &v[0], &with_adapter(v))]);
        check_gradients(&inputs, |tape, v| {
            linear_split(tape, &v[0], &with_adapter(v), &[d_out - 2, 2])
        });
        // An output that nobody uses.
        check_gradients(&inputs, |tape, v| {
            linear_split(tape, &v[0], &with_adapter(v), &[2, d_out - 2]).split_off(1)
        });
    }
}

#[test]
fn products_of_cuda_add_a_bias_and_sum_its_gradient() {
    let (n_tok, d_in) = (67, 64);
    for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Bf16, 3e-2)] {
        let cpu = Device::cpu(1).unwrap();
        let Ok(gpu) = Gpu::cuda(0, cpu.host().clone(), precision) else { continue };
        // Whole; in pieces, of which the last two are off multiples of 16 bytes.
        for widths in [&[72][..], &[16, 40, 14, 2]] {
            let mut inputs = operands(n_tok, d_in, 72);
            // Biases and their gradients that nothing else hides.
            inputs[2] = Input::map(3, &[72], |x| 50.0 + x);
            let run = |device: &Device| {
                let tape = Tape::new();
                let tensors: Vec<Tensor> = inputs.iter().map(|it| it.tensor(device)).collect();
                let v: Vec<Var> =
                    tensors.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
                let ys = linear_split(&tape, &v[0], &with_bias(&v), widths);
                let mut numbers: Vec<Vec<f32>> = ys.iter().map(|y| y.value().to_vec()).collect();
                let seed = |y: Var| {
                    let ones = vec![1.0; y.value().n_elem()];
                    let ones = Tensor::from_f32(device, y.value().shape(), &ones);
                    let dy = device.gpu().map(|gpu| gpu.cast(&ones, y.value().dtype()));
                    (y, dy.unwrap_or(ones))
                };
                let mut grads = Gradients::default();
                tape.walk(ys.into_iter().map(seed).collect(), &mut grads);
                numbers.push(grads.get(2).unwrap().to_vec());
                numbers
            };
            let want = run(&cpu);
            assert_eq!(want.last().unwrap(), &vec![n_tok as f32; 72]);
            gpu.profile_start();
            let got = run(&Device::Gpu(gpu.clone()));
            let names: Vec<String> = gpu.profile_stop().into_iter().map(|it| it.name).collect();
            gpu.check().unwrap();
            for (want, got) in want.iter().zip(&got) {
                compare_devices(&format!("{precision:?}, {widths:?}"), want, got, tolerance);
            }
            let has = |what: &str| names.iter().any(|name| name.contains(what));
            assert!(has("with bias") && has("with sums") && !has("linear_bias"), "{names:?}");
            assert_eq!(has("linear_sum"), widths.len() > 1, "{names:?}");
        }
    }
}

#[test]
fn an_odd_width_between_maps_is_filled_up_and_seen_nowhere_else() {
    let n_tok = 70;
    let inputs = [
        Input::normal(1, &[n_tok, 6], 1.0),
        Input::normal(2, &[67, 6], 0.5),
        Input::normal(3, &[5, 67], 0.5),
    ];
    check_gradients(&inputs, |tape, v| {
        let (mut first, mut last) = ([Linear::from(v[1].clone())], Linear::from(v[2].clone()));
        fill_between(n_tok, &mut first, &mut last);
        let inner = linear(tape, &v[0], &first[0]);
        let has_cores = v[0].value().device().gpu().is_some_and(|gpu| gpu.caps().tensor_cores);
        assert_eq!(inner.value().dims2().1, if has_cores { 72 } else { 67 });
        vec![linear(tape, &inner, &last)]
    });
}

#[test]
fn gradients_of_groups() {
    let mut inputs = operands(9, 5, 4);
    inputs.extend(operands(1, 5, 4).split_off(1));
    inputs.extend(operands(1, 5, 4).split_off(1));
    check_gradients(&inputs, |tape, v| {
        let expert = |at: usize| {
            let mut list = vec![v[0].clone()];
            list.extend_from_slice(&v[at..at + 4]);
            with_adapter(&list)
        };
        let experts = [expert(1), expert(5), expert(9)];
        vec![linear_grouped(tape, &v[0], &[0, 3, 3, 9], &experts)]
    });
}

#[test]
fn a_row_of_a_group_has_the_same_bits_however_many_rows_it_has() {
    let device = Device::cpu(2).unwrap();
    for (d_in, d_out) in [(16, 20), (24, 7), (300, 64), (770, 300)] {
        let inputs = operands(80, d_in, d_out);
        let vars: Vec<Var> =
            inputs.iter().map(|input| Var::constant(input.tensor(&device))).collect();
        let row = |n_tok: usize| {
            let x = Var::constant(vars[0].value().rows(0..n_tok));
            let experts = [with_adapter(&vars)];
            let y = linear_grouped(&Tape::off(), &x, &[0, n_tok], &experts);
            y.value().f32()[..d_out].to_vec()
        };
        let want = row(80);
        for n_tok in [1, 2, 3, 11, 40] {
            assert!(row(n_tok) == want, "{n_tok} rows, {d_in} to {d_out}");
        }
    }
}

#[test]
fn a_row_of_a_group_has_the_same_bits_there_too() {
    // Within one call: on CUDA products of other sizes may be other kernels.
    for (device, _) in devices().iter().filter(|it| it.0.gpu().unwrap().as_cuda().is_none()) {
        for (d_in, d_out) in [(24, 7), (300, 64)] {
            let inputs = operands(80, d_in, d_out);
            let vars: Vec<Var> =
                inputs.iter().map(|input| Var::constant(input.tensor(device))).collect();
            let row = |n_tok: usize| {
                let experts = [with_adapter(&vars), with_adapter(&vars)];
                let y = linear_grouped(&Tape::off(), &vars[0], &[0, n_tok, 80], &experts);
                y.value().to_vec()[..d_out].to_vec()
            };
            let want = row(80);
            for n_tok in [1, 2, 3, 11, 40] {
                assert!(row(n_tok) == want, "{n_tok} rows, {d_in} to {d_out}, {device:?}");
            }
        }
    }
}

#[test]
fn numbers_of_any_size_come_out_as_on_the_cpu() {
    let cpu = Device::cpu(2).unwrap();
    // From 1e-6 to 1e6, each row of its own size.
    let (n_tok, d_in, d_out) = (65, 70, 67);
    let sizes = |n: usize| 10f32.powi(n as i32 % 13 - 6);
    let run = |device: &Device| {
        let mut x = operands(n_tok, d_in, d_out)[0].tensor(&cpu);
        x.f32_mut().iter_mut().enumerate().for_each(|(at, x)| *x *= sizes(at / d_in));
        let w = operands(n_tok, d_in, d_out)[1].tensor(device);
        let y = linear(&Tape::off(), &Var::constant(x.to(device)), &Var::constant(w).into());
        y.value().to_vec()
    };
    let want = run(&cpu);
    for (device, tolerance) in devices() {
        let got = run(device);
        for (row, (want, got)) in want.chunks(d_out).zip(got.chunks(d_out)).enumerate() {
            compare_devices(&format!("{device:?}, row {row}"), want, got, *tolerance);
        }
    }
}

#[test]
fn a_frozen_weight_gets_no_gradient_and_passes_one_on() {
    let device = Device::cpu(2).unwrap();
    let inputs = operands(3, 4, 5);
    let [x, w] = [&inputs[0], &inputs[1]].map(|input| input.tensor(&device));
    let dy = Input::normal(9, &[3, 5], 1.0).tensor(&device);
    let tape = Tape::new();
    let y = linear(&tape, &tape.leaf(0, &x), &Var::constant(w.clone()).into());
    let mut grads = Gradients::default();
    tape.walk(vec![(y, dy.clone())], &mut grads);
    assert_eq!(grads.iter().map(|(key, _)| key).collect::<Vec<_>>(), [0]);
    let (w, dy) = (w.f32(), dy.f32());
    let product = |tok: usize, idx: usize| -> f32 {
        (0..5).map(|out| dy[tok * 5 + out] * w[out * 4 + idx]).sum()
    };
    let want: Vec<f32> = (0..12).map(|at| product(at / 4, at % 4)).collect();
    assert!(largest_difference(grads.get(0).unwrap().f32(), &want) < 1e-5);
}

/// Where one is not a number they are infinitely far apart.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

/// Bytes of this format: of `values` where we can encode it, else arbitrary ones under scales
/// that make numbers of about the same size.
fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    // (first byte of each f16, its size)
    let (scales, size): (&[usize], f32) = match dtype {
        DType::F16 => {
            return values.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect();
        }
        DType::BF16 => {
            return values.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect();
        }
        DType::Block(BlockType::Q8_0) => {
            let mut bytes = vec![0; dtype.n_bytes(values.len()).unwrap()];
            BlockType::Q8_0.encode(values, &mut bytes);
            return bytes;
        }
        DType::Block(BlockType::Q4_0) => (&[0], 0.05),
        DType::Block(BlockType::Q4K) => (&[0, 2], 1e-3),
        DType::Block(BlockType::Q6K) => (&[208], 2e-4),
        _ => panic!("{dtype:?} is not met here"),
    };
    let rng = Rng::new(3, 0);
    let n_bytes = dtype.n_bytes(values.len()).unwrap() as u64;
    let mut bytes: Vec<u8> = (0..n_bytes).map(|n| rng.below(n, 256) as u8).collect();
    for (idx, block) in bytes.chunks_exact_mut(dtype.block().1).enumerate() {
        for &at in scales {
            let scale = f16::from_f32(size * (1.0 + (idx % 5) as f32 / 4.0));
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

/// What the bytes mean, not by way of `Tensor`.
fn decoded(dtype: DType, bytes: &[u8], n_elem: usize) -> Vec<f32> {
    let pairs = bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F16 => pairs.map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        DType::BF16 => pairs.map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        DType::Block(block) => {
            let mut values = vec![0.0; n_elem];
            block.decode(bytes, &mut values);
            values
        }
        DType::F32 | DType::U32 => panic!("nothing to decode"),
    }
}

#[test]
fn a_weight_in_any_format_gives_what_its_decoded_values_give() {
    let device = Device::cpu(2).unwrap();
    // Two panels, the second of which does not fill its last piece.
    let (n_tok, d_in, d_out) = (12, 256, 700);
    let inputs = operands(n_tok, d_in, d_out);
    let (x, exact) = (inputs[0].tensor(&device), inputs[1].tensor(&device));
    let dy = Input::normal(9, &[n_tok, d_out], 1.0).tensor(&device);
    let run = |weight: Tensor, n_tok: usize| {
        let device = weight.device().clone();
        let (x, dy) = (x.rows(0..n_tok).to(&device), dy.rows(0..n_tok).to(&device));
        let tape = Tape::new();
        let y = linear(&tape, &tape.leaf(0, &x), &Var::constant(weight).into());
        let mut out = y.value().to_vec();
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy)], &mut grads);
        out.extend(grads.get(0).unwrap().to_vec());
        device.check().unwrap();
        out
    };
    let blocks = [BlockType::Q8_0, BlockType::Q4_0, BlockType::Q4K, BlockType::Q6K];
    for dtype in [DType::F16, DType::BF16].into_iter().chain(blocks.map(DType::Block)) {
        let bytes = encoded(dtype, exact.f32());
        let values = decoded(dtype, &bytes, d_out * d_in);
        let bytes = Arc::new(bytes);
        let stored =
            |device: &Device| Tensor::from_shared(device, &[d_out, d_in], dtype, bytes.clone(), 0);
        for n_tok in [3, 12] {
            let want = run(Tensor::from_f32(&device, &[d_out, d_in], &values), n_tok);
            let size = want.iter().fold(0.0, |size: f32, y| size.max(y.abs()));
            assert!(size > 10.0, "{dtype:?}: {size} is too small to tell");
            let worst = largest_difference(&run(stored(&device), n_tok), &want);
            assert!(worst < 3e-6 * size, "{dtype:?}: {worst} of {size}");
            // There, also a panel at a time.
            for (device, tolerance) in devices().iter().map(|it| (&it.0, it.1)).chain(small()) {
                let got = run(stored(device), n_tok);
                let what = format!("{dtype:?}, {n_tok} tokens, {device:?}");
                compare_devices(&what, &want, &got, tolerance);
            }
        }
    }
}

/// A device whose bindings are small, if there is one.
fn small() -> Option<(&'static Device, f32)> {
    small_bindings().map(|device| (device, 1e-4))
}

#[test]
fn operands_larger_than_a_binding_go_in_parts() {
    let Some((small, tolerance)) = small() else { return };
    // Everything but the adapter and the bias has more than 64 KiB.
    let (n_tok, d_in, d_out) = (160, 120, 140);
    let inputs = operands(n_tok, d_in, d_out);
    let run = |device: &Device, dropout: Option<Dropout>, has_magnitude: bool| {
        let tape = Tape::new();
        let tensors: Vec<Tensor> = inputs.iter().map(|input| input.tensor(device)).collect();
        let mut v: Vec<Var> =
            tensors.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
        v.push(tape.leaf(5, &Input::map(6, &[d_out], |x| 1.0 + 0.2 * x).tensor(device)));
        let norms = has_magnitude.then(|| Norms::Followed(row_squares(&tensors[1])));
        let y = linear_split(&tape, &v[0], &adapted(&v, dropout, norms.as_ref()), &[d_out - 9, 9]);
        let mut list: Vec<Vec<f32>> = y.iter().map(|y| y.value().to_vec()).collect();
        let seeds = y.into_iter().map(|y| {
            let shape = y.value().shape().to_vec();
            (y, Input::normal(9, &shape, 1.0).tensor(device))
        });
        let mut grads = Gradients::default();
        tape.walk(seeds.collect(), &mut grads);
        list.extend(grads.iter().map(|(_, grad)| grad.to_vec()));
        device.check().unwrap();
        list
    };
    let cpu = Device::cpu(2).unwrap();
    for (dropout, has_magnitude) in [(None, false), (Some(DROPOUT), false), (Some(DROPOUT), true)] {
        let want = run(&cpu, dropout, has_magnitude);
        let got = run(small, dropout, has_magnitude);
        assert_eq!(want.len(), got.len());
        for (idx, (want, got)) in want.iter().zip(&got).enumerate() {
            let what = format!("{idx}, {dropout:?}, magnitudes {has_magnitude}");
            compare_devices(&what, want, got, tolerance);
        }
    }
}

#[test]
fn the_mask_there_is_the_mask_here() {
    for (n_tok, d, first_row) in [(3, 5, 0), (40, 133, 17), (9, 256, 1 << 20)] {
        let x = Input::normal(1, &[n_tok, d], 1.0);
        let run = |device: &Device| {
            let mut y = Tensor::uninit(device, &[n_tok, d]);
            DROPOUT.run(first_row, &x.tensor(device), (&mut y).into(), Put::Set);
            y.to_vec()
        };
        let want = run(&Device::cpu(1).unwrap());
        for (device, _) in devices() {
            assert!(run(device) == want, "{n_tok} by {d} from {first_row}, {device:?}");
        }
    }
}

const DROPOUT: Dropout = Dropout { rate: 0.3, seed: 1, stream: 2, counter: 3 };

/// Operands as of `operands`, under dropout, magnitudes or both.
fn adapted(v: &[Var], dropout: Option<Dropout>, norms: Option<&Norms>) -> Linear {
    let mut linear = with_adapter(v);
    let adapter = linear.adapter.as_mut().unwrap();
    adapter.dropout = dropout;
    adapter.magnitude = norms.map(|norms| Magnitude { m: v[5].clone(), norms: norms.clone() });
    if norms.is_some() {
        linear.weight = Var::constant(v[1].value().clone());
    }
    linear
}

#[test]
fn gradients_under_dropout() {
    for (n_tok, d_in, d_out) in [(1, 1, 3), (5, 7, 9), (40, 133, 20)] {
        let inputs = operands(n_tok, d_in, d_out);
        check_gradients(&inputs, |tape, v| {
            vec![linear(tape, &v[0], &adapted(v, Some(DROPOUT), None))]
        });
        check_gradients(&inputs, |tape, v| {
            linear_split(tape, &v[0], &adapted(v, Some(DROPOUT), None), &[d_out - 2, 2])
        });
    }
}

/// Operands, the weight apart: under magnitudes it is frozen, so no difference may move it.
fn without_weight(n_tok: usize, d_in: usize, d_out: usize) -> (Tensor, Norms, Vec<Input>) {
    let mut inputs = operands(n_tok, d_in, d_out);
    let device = Device::cpu(1).unwrap();
    let weight = inputs.remove(1).tensor(&device);
    inputs.push(Input::map(6, &[d_out], |x| 1.0 + 0.2 * x));
    let norms = Input::map(7, &[d_out], |x| 1.5 + 0.2 * x).tensor(&device);
    (weight, Norms::Fixed(norms), inputs)
}

/// The operands with the weight among them, and the norms, where the others are.
fn with_weight(weight: &Tensor, norms: &Norms, v: &[Var]) -> (Vec<Var>, Norms) {
    let device = v[0].value().device();
    let mut list = v.to_vec();
    list.insert(1, Var::constant(weight.to(device)));
    let norms = match norms {
        Norms::Fixed(norms) => Norms::Fixed(norms.to(device)),
        Norms::Followed(squares) => Norms::Followed(squares.to(device)),
    };
    (list, norms)
}

#[test]
fn gradients_under_magnitudes() {
    for (n_tok, d_in, d_out) in [(1, 1, 3), (5, 7, 9), (130, 33, 20)] {
        let (weight, norms, inputs) = without_weight(n_tok, d_in, d_out);
        for dropout in [None, Some(DROPOUT)] {
            check_gradients(&inputs, |tape, v| {
                let (v, norms) = with_weight(&weight, &norms, v);
                vec![linear(tape, &v[0], &adapted(&v, dropout, Some(&norms)))]
            });
            check_gradients(&inputs, |tape, v| {
                let (v, norms) = with_weight(&weight, &norms, v);
                let widths = [d_out - 2, 2];
                linear_split(tape, &v[0], &adapted(&v, dropout, Some(&norms)), &widths)
            });
        }
    }
}

#[test]
fn gradients_of_groups_under_dropout_and_magnitudes() {
    let (weight, norms, inputs) = without_weight(9, 5, 4);
    check_gradients(&inputs, |tape, v| {
        let (v, norms) = with_weight(&weight, &norms, v);
        let expert = adapted(&v, Some(DROPOUT), Some(&norms));
        let experts = [expert.clone(), with_adapter(&v), expert];
        vec![linear_grouped(tape, &v[0], &[0, 3, 3, 9], &experts)]
    });
}

#[test]
fn dropout_leaves_out_the_share_it_should_and_another_one_at_each_step() {
    let device = Device::cpu(2).unwrap();
    let (n_tok, d) = (300, 200);
    let mask = |dropout: Dropout, rows: Range<usize>| {
        let full = |x| Tensor::from_f32(&device, &[rows.len(), d], &vec![x; rows.len() * d]);
        let (ones, mut y) = (full(1.0), full(f32::NAN));
        dropout.run(rows.start, &ones, (&mut y).into(), Put::Set);
        y.to_vec()
    };
    let want = mask(DROPOUT, 0..n_tok);
    let n_left = want.iter().filter(|&&x| x != 0.0).count();
    let share = 1.0 - n_left as f64 / want.len() as f64;
    assert!((share - 0.3).abs() < 0.01, "{share}");
    assert!(want.iter().all(|&x| x == 0.0 || (x - 1.0 / 0.7).abs() < 1e-4));
    // A column, a row: no pattern of one kind only.
    for at in 0..d {
        let n = (0..n_tok).filter(|row| want[row * d + at] == 0.0).count();
        assert!((40..140).contains(&n), "column {at}: {n}");
    }
    // By row, not by place in the call.
    assert_eq!(mask(DROPOUT, 17..40), want[17 * d..40 * d]);
    let others = [
        Dropout { seed: 2, ..DROPOUT },
        Dropout { stream: 3, ..DROPOUT },
        Dropout { counter: 4, ..DROPOUT },
    ];
    for other in others {
        let other = mask(other, 0..n_tok);
        let same = other.iter().zip(&want).filter(|(a, b)| a == b).count() as f64;
        // 0.7^2 + 0.3^2 by chance.
        assert!((same / want.len() as f64 - 0.58).abs() < 0.02);
    }
}

#[test]
fn norms_are_those_of_the_adapted_weight_in_any_format() {
    let device = Device::cpu(2).unwrap();
    let (d_in, d_out) = (256, 700);
    let v: Vec<Var> =
        operands(3, d_in, d_out).iter().map(|input| Var::constant(input.tensor(&device))).collect();
    let m = Var::constant(Input::map(6, &[d_out], |x| 2.0 + x).tensor(&device));
    let mut list = v.clone();
    list.push(m.clone());
    let exact = v[1].value();
    let mut bytes = vec![0; DType::Block(BlockType::Q8_0).n_bytes(d_out * d_in).unwrap()];
    BlockType::Q8_0.encode(exact.f32(), &mut bytes);
    let dtype = DType::Block(BlockType::Q8_0);
    let blocks = Tensor::from_shared(&device, &[d_out, d_in], dtype, Arc::new(bytes), 0);
    for weight in [exact.clone(), blocks] {
        list[1] = Var::constant(weight.clone());
        let norms = Norms::Followed(row_squares(&weight));
        let got = linear(&Tape::off(), &list[0], &adapted(&list, None, Some(&norms)));
        let (a, b) = (v[3].value(), v[4].value());
        let merged = merge(&weight, a, b, 1.5, Some(m.value()));
        let squares = row_squares(&merged);
        for (square, m) in squares.f32().iter().zip(m.value().f32()) {
            assert!((square.sqrt() - m.abs()).abs() < 1e-5 * m.abs(), "{square} {m}");
        }
        let bias = Some(v[2].clone());
        let plain = Linear { bias, ..Linear::from(Var::constant(merged)) };
        let want = linear(&Tape::off(), &list[0], &plain);
        let worst = largest_difference(got.value().f32(), want.value().f32());
        assert!(worst < 1e-4, "{:?}: {worst}", weight.dtype());
    }
}

/// Rows in another order, and the order told, give the same bits as rows in their places.
#[test]
fn rows_in_another_order_give_the_same_bits() {
    let device = Device::cpu(2).unwrap();
    let (d_in, d_out) = (64, 40);
    let order: Vec<usize> = (0..d_out).map(|row| row * 7 % d_out).collect();
    let mut back = vec![0; d_out];
    order.iter().enumerate().for_each(|(row, &at)| back[at] = row);
    let float = Input::normal(2, &[d_out, d_in], 0.5).tensor(&device);
    let mut bytes = vec![0; d_out * d_in / 32 * 34];
    BlockType::Q8_0.encode(float.f32(), &mut bytes);
    let dtype = DType::Block(BlockType::Q8_0);
    let blocks = Tensor::from_shared(&device, &[d_out, d_in], dtype, Arc::new(bytes), 0);
    for (weight, n_tok) in [(float.clone(), 1), (float, 20), (blocks.clone(), 3), (blocks, 20)] {
        for arithmetic in [Arithmetic::Exact, Arithmetic::Quick] {
            let map = |weight: Tensor, order: Option<&[usize]>| {
                let bias = Input::normal(3, &[d_out], 0.5).tensor(&device);
                let (bias, order) = (Some(Var::constant(bias)), order.map(Arc::from));
                Linear { order, bias, arithmetic, ..Linear::from(Var::constant(weight)) }
            };
            let x = Var::constant(Input::normal(1, &[n_tok, d_in], 1.0).tensor(&device));
            let want = linear(&Tape::off(), &x, &map(weight.clone(), None));
            let moved = map(weight.gather(&back), Some(&order));
            let got = linear(&Tape::off(), &x, &moved);
            assert!(got.value().f32() == want.value().f32(), "{n_tok} {arithmetic:?}");
            let pieces = linear_split(&Tape::off(), &x, &moved, &[d_out - 9, 9]);
            let exact = map(weight.clone(), None);
            let exact =
                linear(&Tape::off(), &x, &Linear { arithmetic: Arithmetic::Exact, ..exact });
            // A product of other sizes may add in another order.
            let (got, want) = (pieces[1].value().f32()[0], exact.value().f32()[d_out - 9]);
            assert!((got - want).abs() < 1e-5, "{n_tok} {arithmetic:?}: {got}, not {want}");
        }
    }
}

struct Golden(SafeTensors, Device);

impl Golden {
    fn open() -> Golden {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/dora.safetensors");
        let file = SafeTensors::parse("dora", Arc::new(std::fs::read(path).unwrap())).unwrap();
        Golden(file, Device::cpu(2).unwrap())
    }

    fn get(&self, case: usize, name: &str) -> Option<Tensor> {
        let tensor = self.0.tensor(&self.1, &format!("{case}.{name}")).unwrap();
        tensor.map(|tensor| tensor.to_f32())
    }
}

#[test]
fn magnitudes_give_the_values_gradients_steps_and_merged_weights_of_peft() {
    let golden = Golden::open();
    for case in 0..3 {
        let get = |name: &str| golden.get(case, name).unwrap();
        let (scale, weight, dy) = (get("scale").f32()[0], get("w"), get("dy"));
        let dropout = Dropout { rate: 0.25, seed: 5, stream: 3, counter: 7 };
        let squares = row_squares(&weight);
        let mut trained = [get("x"), get("a"), get("b"), get("m")];
        let run = |trained: &[Tensor; 4]| {
            let tape = Tape::new();
            let v: Vec<Var> =
                trained.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
            let norms = Norms::Followed(squares.clone());
            let adapter = Adapter {
                a: v[1].clone(),
                b: v[2].clone(),
                scale,
                dropout: (case == 1).then_some(dropout),
                magnitude: Some(Magnitude { m: v[3].clone(), norms }),
            };
            let weight = Var::constant(weight.clone());
            let bias = golden.get(case, "bias").map(Var::constant);
            let map = Linear { bias, adapter: Some(adapter), ..Linear::from(weight) };
            let y = linear(&tape, &v[0], &map);
            let value = y.value().clone();
            let mut grads = Gradients::default();
            tape.walk(vec![(y, dy.clone())], &mut grads);
            (value, grads)
        };
        let close = |what: &str, got: &[f32], want: &Tensor, tolerance: f32| {
            let worst = largest_difference(got, want.f32());
            assert!(worst < tolerance, "case {case}, {what}: {worst}");
        };
        let (y, grads) = run(&trained);
        close("y", y.f32(), &get("y"), 2e-6);
        for (key, name) in ["dx", "da", "db", "dm"].into_iter().enumerate() {
            close(name, grads.get(key).unwrap().f32(), &get(name), 1e-5);
        }
        let [_, a, b, m] = &trained;
        let merged = merge(&weight, a, b, scale, Some(m));
        close("merged", merged.f32(), &get("merged"), 1e-6);
        let hyper = golden.0.doubles("hyper").unwrap().unwrap();
        let config = AdamW {
            lr: hyper[0],
            beta1: hyper[1],
            beta2: hyper[2],
            eps: hyper[3],
            weight_decay: hyper[4],
            ..AdamW::default()
        };
        let zeros = |x: &Tensor| Tensor::zeros(x.device(), x.shape());
        let mut moments = trained.each_ref().map(|x| [zeros(x), zeros(x)]);
        for t in 1..4 {
            let (_, grads) = run(&trained);
            for key in 1..4 {
                let [m, v] = &mut moments[key];
                adamw(&mut trained[key], grads.get(key).unwrap(), m, v, t, &config);
            }
        }
        for (key, name) in [(1, "a_after"), (2, "b_after"), (3, "m_after")] {
            close(name, trained[key].f32(), &get(name), 1e-5);
        }
    }
}

#[test]
fn maps_of_one_input_add_up_its_gradient_and_what_is_made_again_is_the_same() {
    let shapes: [&[usize]; 7] =
        [&[40, 16], &[16], &[24, 16], &[24, 16], &[5, 16], &[7, 24], &[11, 16]];
    let inputs: Vec<Input> =
        shapes.iter().zip(3..).map(|(shape, seed)| Input::normal(seed, shape, 0.6)).collect();
    check_gradients(&inputs, |tape, vars| {
        let x = rms_norm(tape, &vars[0], Some(&vars[1]), 16, 1e-5);
        let maps = [2, 3, 4].map(|idx| Linear::from(vars[idx].clone()));
        let [gate, up, other] = linear_each(tape, &x, &maps).try_into().ok().unwrap();
        let inner = gated(tape, Kind::Silu, &gate, &up);
        let mut list = vec![linear(tape, &inner, &Linear::from(vars[5].clone())), other];
        // The second of three outputs goes nowhere.
        let narrow = linear_split(tape, &x, &Linear::from(vars[6].clone()), &[6, 1, 4]);
        list.extend([&narrow[0], &narrow[2]].map(Var::clone));
        list
    });
}

#[test]
fn a_wide_map_that_two_others_read_is_made_again() {
    for n_tok in [5, 20, 70] {
        let inputs = vec![
            Input::normal(1, &[n_tok, 4], 1.0),
            Input::normal(2, &[64, 4], 0.5),
            Input::normal(3, &[64], 1.0),
            Input::normal(4, &[12, 64], 0.2),
            Input::normal(5, &[8, 64], 0.2),
        ];
        check_gradients(&inputs, |tape, v| {
            let y = linear(tape, &v[0], &with_bias(v));
            let mut all = linear_split(tape, &y, &v[3].clone().into(), &[4, 4, 4]);
            all.push(linear(tape, &y, &v[4].clone().into()));
            all
        });
    }
}
