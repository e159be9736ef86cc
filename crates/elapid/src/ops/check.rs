//! The one shared check of every op: its gradients against finite differences, the same bits on any
//! number of threads, and the same numbers on every GPU that is found.
//!
//! The loss is the sum of all outputs under fixed random weights. Differences are taken with the
//! four-point stencil `(8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h`, whose error falls with h^4, so
//! that h can be large enough for f32 noise to stay near 1e-5 of the loss.

use crate::ops::rope::{Rope, RopeScaling, rope};
use crate::tape::{Gradients, Tape, Var};
use crate::tensor::device::Device;
use crate::tensor::gpu::later::block_on;
use crate::tensor::gpu::{Gpu, Precision};
use crate::tensor::rng::Rng;
use crate::tensor::segment::Segments;
use crate::tensor::{DType, Tensor};
use std::sync::OnceLock;

/// An input of a checked op.
#[derive(Clone)]
pub struct Input {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Input {
    /// Normal numbers with this deviation; the seed tells inputs of one check apart.
    pub fn normal(seed: u64, shape: &[usize], deviation: f32) -> Input {
        Input::map(seed, shape, |x| x * deviation)
    }

    /// `f` of standard normal numbers.
    pub fn map(seed: u64, shape: &[usize], f: impl Fn(f32) -> f32) -> Input {
        let rng = Rng::new(seed, 0xC4EC);
        let n_elem = shape.iter().product::<usize>() as u64;
        let data = (0..n_elem).map(|n| f(rng.normal(n) as f32)).collect();
        Input { shape: shape.to_vec(), data }
    }

    /// As a tensor on a device.
    pub fn tensor(&self, device: &Device) -> Tensor {
        Tensor::from_f32(device, &self.shape, &self.data)
    }
}

/// At most this many elements of an input are moved, spread over it.
const N_MOVED_MAX: usize = 48;
const STEP: f32 = 0.02;
const TOLERANCE: f64 = 1e-3;

/// Checks the gradients of `op` by every input.
pub fn check_gradients(inputs: &[Input], op: impl Fn(&Tape, &[Var]) -> Vec<Var>) {
    let device = Device::cpu(1).expect("one thread");
    let (outputs, grads) = run(&device, inputs, &op);
    for n_threads in [2, 3] {
        let device = Device::cpu(n_threads).expect("threads");
        let (outputs_again, grads_again) = run(&device, inputs, &op);
        assert!(outputs == outputs_again, "outputs differ in bits on {n_threads} threads");
        assert!(grads == grads_again, "gradients differ in bits on {n_threads} threads");
    }
    for idx in 0..inputs.len() {
        compare(idx, &grads[idx], inputs, &|inputs| weighted_sum(&device, inputs, &op));
    }
    for (device, tolerance) in devices() {
        let (outputs_there, grads_there) = run(device, inputs, &op);
        let again = run(device, inputs, &op);
        device.check().expect("no failure of the device");
        assert!(again == (outputs_there.clone(), grads_there.clone()), "{device:?}: other bits");
        for (what, want, got) in
            [("output", &outputs, &outputs_there), ("gradient of input", &grads, &grads_there)]
        {
            for (idx, (want, got)) in want.iter().zip(got).enumerate() {
                let what = format!("{device:?}: {what} {idx}");
                match device.activation_dtype() {
                    DType::F32 => compare_above(&what, want, got, *tolerance, 1e-2),
                    _ => compare_bf16(&what, want, got, *tolerance),
                }
            }
        }
    }
}

/// GPUs to check ops on, each with what its numbers may differ from ours by.
///
/// `ELAPID_REQUIRE` (see tests/it/devices.rs) makes a missing one a failure.
pub fn devices() -> &'static [(Device, f32)] {
    static DEVICES: OnceLock<Vec<(Device, f32)>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let host = || Device::cpu(1).expect("one thread").host().clone();
        let mut list = Vec::new();
        if let Some(Ok(gpu)) = block_on(Gpu::wgpu(0, host())) {
            list.push((Device::Gpu(gpu), 1e-4));
        }
        for (precision, tolerance) in [(Precision::F32, 1e-4), (Precision::Bf16, 3e-2)] {
            if let Ok(gpu) = Gpu::cuda(0, host(), precision) {
                list.push((Device::Gpu(gpu), tolerance));
            }
        }
        list
    })
}

/// The same numbers as an op leaves them: in bf16 where activations are. Nothing is turned at the
/// first position of a sequence.
pub fn as_activation(tape: &Tape, x: &Var) -> Var {
    let table = Rope { base: 1e4, d_rotary: 2, scaling: RopeScaling::None }.table();
    rope(tape, x, &table, 2, &Segments::from_lengths(&vec![1; x.value().shape()[0]]))
}

/// wgpu, if it is there, with what every adapter has and at most 64 KiB in a binding: for ops on
/// what is larger than one, and for kernels that have a twin.
pub fn small_bindings() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let open = || {
        let host = Device::cpu(1).expect("one thread").host().clone();
        Gpu::wgpu_plain(0, host, 1 << 16, &[]).ok().map(Device::Gpu)
    };
    DEVICE.get_or_init(open).as_ref()
}

/// Panics where a number differs by more than this share of itself and of the typical one.
pub fn compare_devices(what: &str, want: &[f32], got: &[f32], tolerance: f32) {
    compare_above(what, want, got, tolerance, 1e-30);
}

/// The same, but the typical number is at least `floor`: what is to be zero is a sum of terms of
/// about one that cancel, each of them rounded.
fn compare_above(what: &str, want: &[f32], got: &[f32], tolerance: f32, floor: f32) {
    assert_eq!(want.len(), got.len(), "{what}: length");
    let typical = root_mean_square(want.iter().copied()).max(floor);
    for (at, (&want, &got)) in want.iter().zip(got).enumerate() {
        // A NaN is never within bounds.
        let is_near = (got - want).abs() <= tolerance * (want.abs() + typical) || got == want;
        assert!(is_near, "{what}, element {at}: {got} there, {want} on the CPU");
    }
}

/// Of inputs in bf16 the largest of many errors says little: single numbers must be near, the size
/// of all differences together within this share of the size of all numbers.
fn compare_bf16(what: &str, want: &[f32], got: &[f32], tolerance: f32) {
    compare_above(what, want, got, 5.0 * tolerance, 1.0);
    let size = root_mean_square(want.iter().copied()).max(0.5);
    let off = root_mean_square(want.iter().zip(got).map(|(want, got)| want - got));
    assert!(off <= tolerance * size, "{what}: off by {off}, with numbers of {size}");
}

fn root_mean_square(x: impl ExactSizeIterator<Item = f32>) -> f32 {
    let n = x.len().max(1) as f64;
    (x.map(|x| x as f64 * x as f64).sum::<f64>() / n).sqrt() as f32
}

fn compare(idx: usize, grad: &[f32], inputs: &[Input], loss: &dyn Fn(&[Input]) -> f64) {
    let input = &inputs[idx];
    assert_eq!(grad.len(), input.data.len(), "input {idx}: length of the gradient");
    let mean_square = grad.iter().map(|g| (*g as f64).powi(2)).sum::<f64>() / grad.len() as f64;
    let stride = input.data.len().div_ceil(N_MOVED_MAX).max(1);
    // An odd stride meets every residue of the usual power-of-two axes.
    let stride = if stride == 1 { 1 } else { stride | 1 };
    for element in (0..input.data.len()).step_by(stride) {
        let at = |steps: f32| {
            let mut moved = inputs.to_vec();
            moved[idx].data[element] += steps * STEP;
            loss(&moved)
        };
        let slope = 8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0));
        let want = slope / (12.0 * STEP as f64);
        let got = grad[element] as f64;
        let scale = want.abs().max(mean_square.sqrt()).max(1e-2);
        assert!(
            (got - want).abs() <= TOLERANCE * scale,
            "input {idx}, element {element} of {:?}: backward says {got:.6}, \
             finite difference says {want:.6}",
            input.shape
        );
    }
}

type Outputs = Vec<Vec<f32>>;

/// Outputs and gradients by every input.
fn run(
    device: &Device,
    inputs: &[Input],
    op: &impl Fn(&Tape, &[Var]) -> Vec<Var>,
) -> (Outputs, Outputs) {
    let tape = Tape::new();
    let tensors: Vec<Tensor> = inputs.iter().map(|input| input.tensor(device)).collect();
    let vars: Vec<Var> = tensors.iter().enumerate().map(|(key, x)| tape.leaf(key, x)).collect();
    let outputs = op(&tape, &vars);
    let values = outputs.iter().map(|output| output.value().to_vec()).collect();
    let seeds = outputs.into_iter().enumerate().map(|(idx, output)| {
        let shape = output.value().shape().to_vec();
        let weights = Input::normal(1000 + idx as u64, &shape, 1.0).tensor(device);
        // In the dtype of the output, as the ops behind it would give it.
        let weights = match device {
            Device::Cpu(_) => weights,
            Device::Gpu(gpu) => gpu.cast(&weights, output.value().dtype()),
        };
        (output, weights)
    });
    let mut grads = Gradients::default();
    tape.walk(seeds.collect(), &mut grads);
    let grad = |key: usize| match grads.get(key) {
        Some(grad) => grad.to_vec(),
        None => vec![0.0; inputs[key].data.len()],
    };
    (values, (0..inputs.len()).map(grad).collect())
}

fn weighted_sum(device: &Device, inputs: &[Input], op: &impl Fn(&Tape, &[Var]) -> Vec<Var>) -> f64 {
    let vars: Vec<Var> = inputs.iter().map(|input| Var::constant(input.tensor(device))).collect();
    let outputs = op(&Tape::off(), &vars);
    let mut sum = 0.0;
    for (idx, output) in outputs.iter().enumerate() {
        let rng = Rng::new(1000 + idx as u64, 0xC4EC);
        for (n, &y) in output.value().f32().iter().enumerate() {
            sum += y as f64 * rng.normal(n as u64) as f32 as f64;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "input 0, element 0 of [3]: backward says")]
    fn a_wrong_gradient_is_caught() {
        check_gradients(&[Input::normal(1, &[3], 1.0)], |tape, vars| {
            let x = vars[0].value().clone();
            let mut y = x.to_f32();
            y.f32_mut().iter_mut().for_each(|y| *y *= *y);
            // The true gradient is 2 x dy.
            vec![tape.record("square", &[&vars[0]], y, move |dy| {
                let mut dx = dy.to_f32();
                for (dx, x) in dx.f32_mut().iter_mut().zip(x.f32()) {
                    *dx *= 2.01 * x;
                }
                vec![Some(dx)]
            })]
        });
    }
}
