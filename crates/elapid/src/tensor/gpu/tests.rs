//! Memory, launches, products and graphs on every device that is found.

use super::graph::Graph;
use super::later::block_on;
use super::product::{Block, Rows, Side};
use super::vector::N_FEW;
use super::{Arg, Gpu, Kernel, N_ROUNDS_MAX, Precision, Work};
use crate::error::Result;
use crate::ops::check::{compare_devices, devices};
use crate::tensor::cpu::Cpu;
use crate::tensor::device::Device;
use crate::tensor::devices::DeviceInfo;
use crate::tensor::rng::Rng;
use crate::tensor::{DType, Derivation, Tensor};
use half::f16;
use std::sync::Arc;

static SCALE: Kernel = Kernel {
    entry: "scale_columns",
    wgsl: include_str!("../../ops/scale.wgsl"),
    cuda: include_str!("../../ops/scale.cu"),
};

fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let rng = Rng::new(seed, 77);
    (0..n as u64).map(|idx| rng.normal(idx) as f32).collect()
}

fn gpus() -> impl Iterator<Item = (&'static Device, &'static Gpu, f32)> {
    devices().iter().map(|(device, tolerance)| (device, device.gpu().unwrap(), *tolerance))
}

fn opened(host: Arc<Cpu>) -> Result<Gpu> {
    block_on(Gpu::wgpu(0, host)).unwrap()
}

fn listed() -> Vec<DeviceInfo> {
    block_on(super::list_wgpu()).unwrap()
}

/// A CUDA of its own, for what breaks it; nothing where there is none.
fn fresh(precision: Precision) -> Option<Gpu> {
    Gpu::cuda(0, Device::cpu(1).unwrap().host().clone(), precision).ok()
}

#[test]
fn bytes_go_there_and_back() {
    for (device, gpu, _) in gpus() {
        for n in [1, 3, 1000, 70_001] {
            let want = numbers(1, n);
            let mut x = Tensor::from_f32(device, &[n], &want);
            assert_eq!(x.to_vec(), want, "{device:?}");
            let copy = x.copied();
            x.fill_zero();
            assert_eq!(x.to_vec(), vec![0.0; n], "{device:?}");
            assert_eq!(copy.to_vec(), want, "{device:?}");
            assert_eq!(copy.rows(n / 2..n).to_vec(), want[n / 2..], "{device:?}");
        }
        gpu.wait();
        gpu.check().unwrap();
    }
}

/// `out = alpha a @ b + beta out` in f64.
fn want(
    [m, n, k]: [usize; 3],
    (a, a_transposed): (&[f32], bool),
    (b, b_transposed): (&[f32], bool),
    (alpha, beta, out): (f32, f32, &[f32]),
) -> Vec<f32> {
    let mut want = Vec::new();
    for row in 0..m {
        for col in 0..n {
            let one = |at: usize| {
                let a = if a_transposed { a[at * m + row] } else { a[row * k + at] };
                let b = if b_transposed { b[col * k + at] } else { b[at * n + col] };
                f64::from(a) * f64::from(b)
            };
            let sum: f64 = (0..k).map(one).sum();
            let out = if beta == 0.0 { 0.0 } else { beta * out[row * n + col] };
            want.push((f64::from(alpha) * sum) as f32 + out);
        }
    }
    want
}

fn side(tensor: &Tensor, transposed: bool) -> Side<'_> {
    if transposed { Side::Transposed(tensor) } else { Side::Plain(tensor) }
}

#[test]
fn products_are_those_of_the_cpu() {
    let sizes = [[1, 1, 1], [1, 5, 7], [3, 8, 16], [64, 64, 64], [70, 65, 33], [129, 40, 200]];
    for (size, (a_transposed, b_transposed)) in sizes
        .into_iter()
        .flat_map(|size| [false, true].map(move |a| (size, a)))
        .flat_map(|(size, a)| [false, true].map(move |b| (size, (a, b))))
    {
        let [m, n, k] = size;
        let (a, b, c) = (numbers(1, m * k), numbers(2, k * n), numbers(3, m * n));
        let a_shape = if a_transposed { [k, m] } else { [m, k] };
        let b_shape = if b_transposed { [n, k] } else { [k, n] };
        for (device, gpu, tolerance) in gpus() {
            let a_there = Tensor::from_f32(device, &a_shape, &a);
            let b_there = Tensor::from_f32(device, &b_shape, &b);
            for (alpha, beta) in [(1.0, 0.0), (-0.5, 1.0), (2.0, 0.25)] {
                let what = format!("{device:?}: {size:?} {a_transposed} {b_transposed} {beta}");
                let (a_side, b_side) = (side(&a_there, a_transposed), side(&b_there, b_transposed));
                let factors = (alpha, beta, &c[..]);
                let want = want(size, (&a, a_transposed), (&b, b_transposed), factors);
                let mut out = Tensor::from_f32(device, &[m, n], &c);
                gpu.product(&mut out, beta, alpha, a_side, b_side);
                compare_devices(&what, &want, &out.to_vec(), tolerance);
                // The result as an activation, and sides that are in its format already.
                let dtype = gpu.activation_dtype();
                let (a_cast, b_cast) = (gpu.cast(&a_there, dtype), gpu.cast(&b_there, dtype));
                let (a_side, b_side) = (side(&a_cast, a_transposed), side(&b_cast, b_transposed));
                let mut out = gpu.cast(&Tensor::from_f32(device, &[m, n], &c), dtype);
                if dtype == DType::F32 {
                    out = out.copied();
                }
                gpu.product(&mut out, beta, alpha, a_side, b_side);
                compare_devices(&what, &want, &out.to_vec(), tolerance);
            }
            gpu.check().unwrap();
        }
    }
}

#[test]
fn a_product_writes_its_rows_and_columns_and_nothing_else() {
    let (a, b) = (numbers(1, 6 * 5), numbers(2, 5 * 4));
    let want = want([6, 4, 5], (&a, false), (&b, false), (1.0, 0.0, &[]));
    for (device, gpu, tolerance) in gpus() {
        let a = Tensor::from_f32(device, &[6, 5], &a);
        let b = Tensor::from_f32(device, &[5, 4], &b);
        let mut out = Tensor::zeros(device, &[9, 4]);
        gpu.product(
            Rows { tensor: &mut out, rows: 2..8 },
            0.0,
            1.0,
            Side::Plain(&a),
            Side::Plain(&b),
        );
        let got = out.to_vec();
        compare_devices(&format!("{device:?}"), &want, &got[8..32], tolerance);
        assert!(got[..8].iter().chain(&got[32..]).all(|&x| x == 0.0), "{device:?}");
        let mut out = Tensor::zeros(device, &[6, 7]);
        let block = Block { tensor: &mut out, rows: 0..6, cols: 2..6 };
        gpu.product(block, 0.0, 1.0, Side::Plain(&a), Side::Plain(&b));
        let got = out.to_vec();
        for row in 0..6 {
            let line = &got[row * 7..][..7];
            compare_devices(&format!("{device:?}"), &want[row * 4..][..4], &line[2..6], tolerance);
            assert!(line[0] == 0.0 && line[1] == 0.0 && line[6] == 0.0, "{device:?}");
        }
        // Nothing to sum over: nothing, or nothing added.
        let (none_a, none_b) = (Tensor::zeros(device, &[0, 6]), Tensor::zeros(device, &[0, 4]));
        let mut out = Tensor::from_f32(device, &[6, 4], &[2.0; 24]);
        gpu.product(&mut out, 1.0, 1.0, Side::Transposed(&none_a), Side::Plain(&none_b));
        assert_eq!(out.to_vec(), [2.0; 24], "{device:?}");
        gpu.product(&mut out, 0.0, 1.0, Side::Transposed(&none_a), Side::Plain(&none_b));
        assert_eq!(out.to_vec(), [0.0; 24], "{device:?}");
        gpu.check().unwrap();
    }
}

#[test]
fn kernels_of_one_entry_and_several_texts_are_told_apart() {
    static ZERO: Kernel = Kernel {
        entry: "scale_columns",
        wgsl: "
            @group(0) @binding(0) var<storage, read> x: array<f32>;
            @group(0) @binding(1) var<storage, read> factors: array<f32>;
            @group(0) @binding(2) var<storage, read_write> y: array<f32>;
            struct Params { n: u32 }
            @group(0) @binding(3) var<uniform> p: Params;
            @compute @workgroup_size(THREADS)
            fn scale_columns(@builtin(global_invocation_id) id: vec3<u32>) {
                if id.x < p.n { y[id.x] = 0.0 * x[id.x] * factors[0]; }
            }",
        cuda: "
            struct Params { u32 n; };
            KERNEL scale_columns(const T0* x, const T1* factors, T2* y, Params p) {
                for (size_t i = thread_of(); i < p.n; i += n_threads()) y[i] = 0.0f;
            }",
    };
    for (device, gpu, _) in gpus() {
        let [x, factors] = [[1.0, 2.0], [3.0, 5.0]].map(|it| Tensor::from_f32(device, &[2], &it));
        for (kernel, want) in [(&SCALE, [3.0, 10.0]), (&ZERO, [0.0, 0.0])] {
            let mut y = Tensor::uninit(device, &[2]);
            let mut args = [Arg::In(&x), Arg::In(&factors), Arg::Out(&mut y)];
            gpu.launch(kernel, Work::each(2), &[("D", 2)], &mut args, &[2usize.into()]);
            assert_eq!(y.to_vec(), want, "{device:?}");
        }
        gpu.check().unwrap();
    }
}

#[test]
fn what_is_rewritten_is_new_for_every_handle_and_nothing_derived_stays() {
    for (device, gpu, _) in gpus() {
        let x = Tensor::from_f32(device, &[2], &[1.0, 2.0]);
        let other = x.clone();
        let copy = |x: &Tensor| x.derived(Derivation::Bf16, |x| gpu.cast(x, DType::F32).copied());
        assert_eq!(copy(&x).to_vec(), [1.0, 2.0], "{device:?}");
        x.rewrite(bytemuck::cast_slice(&[3.0f32, 4.0]));
        assert_eq!([&other, &copy(&other)].map(Tensor::to_vec), [[3.0, 4.0]; 2], "{device:?}");
    }
}

#[test]
fn a_master_is_cast_once_until_it_is_written() {
    let Some(gpu) = fresh(Precision::Bf16) else { return };
    let device = Device::Gpu(gpu.clone());
    let x = gpu.cast(&Tensor::from_f32(&device, &[1, 2], &[1.0, 1.0]), DType::BF16);
    let mut w = Tensor::from_f32(&device, &[2, 1], &[1.0, 2.0]);
    let mut y = Tensor::uninit(&device, &[1, 1]);
    let run = |w: &Tensor, y: &mut Tensor| {
        gpu.profile_start();
        gpu.product(&mut *y, 0.0, 1.0, Side::Plain(&x), Side::Plain(w));
        let n_launches: u64 = gpu.profile_stop().iter().map(|it| it.n_launches).sum();
        (n_launches, y.to_vec()[0])
    };
    assert_eq!(run(&w, &mut y), (2, 3.0));
    assert_eq!(run(&w, &mut y), (1, 3.0));
    w.write_f32(&[4.0, 8.0]);
    assert_eq!(run(&w, &mut y), (2, 12.0));
    gpu.check().unwrap();
}

#[test]
fn tf32_rounds_to_ten_bits_and_f32_does_not() {
    for (precision, want) in [(Precision::F32, 1.0 + 2f32.powi(-20)), (Precision::Tf32, 1.0)] {
        let Some(gpu) = fresh(precision) else { return };
        let device = Device::Gpu(gpu.clone());
        let mut out = Tensor::uninit(&device, &[16, 16]);
        let x = Tensor::from_f32(&device, &[16, 16], &[1.0 / 16.0; 256]);
        let y = Tensor::from_f32(&device, &[16, 16], &[1.0 + 2f32.powi(-20); 256]);
        gpu.product(&mut out, 0.0, 1.0, Side::Plain(&x), Side::Plain(&y));
        gpu.check().unwrap();
        assert_eq!(out.to_vec(), [want; 256], "{precision:?}");
    }
}

/// `y += factor x`, as a step that keeps its state where it lies.
fn step(gpu: &Gpu, x: &Tensor, state: &mut Tensor) -> Tensor {
    let device = Device::Gpu(gpu.clone());
    // From the host, and a buffer that comes and goes.
    let factors = Tensor::from_f32(&device, &[2], &[2.0, 3.0]);
    let mut scaled = Tensor::uninit(&device, &[4, 2]);
    let mut args = [Arg::In(x), Arg::In(&factors), Arg::Out(&mut scaled)];
    gpu.launch(&SCALE, Work::each(8), &[("D", 2)], &mut args, &[8usize.into()]);
    let one = Tensor::from_f32(&device, &[2, 2], &[1.0, 0.0, 0.0, 1.0]);
    gpu.product(&mut *state, 1.0, 1.0, Side::Plain(&scaled), Side::Plain(&one));
    state.copied()
}

#[test]
fn a_graph_does_the_same_work_again() {
    // Devices of its own: what others start meanwhile would be recorded too.
    let host = || Device::cpu(1).unwrap().host().clone();
    let found = [opened(host()).ok(), fresh(Precision::F32), fresh(Precision::Bf16)];
    for gpu in &found.into_iter().flatten().collect::<Vec<_>>() {
        let device = &Device::Gpu(gpu.clone());
        let x = Tensor::zeros(device, &[4, 2]);
        let mut state = Tensor::zeros(device, &[4, 2]);
        let mut graph = Graph::new(gpu);
        let mut want = [0.0f32; 8];
        for run in 0..5 {
            let numbers: Vec<f32> = (0..8).map(|n| (n * 4 + run) as f32).collect();
            x.rewrite(bytemuck::cast_slice(&numbers));
            for (idx, (want, x)) in want.iter_mut().zip(&numbers).enumerate() {
                *want += x * [2.0, 3.0][idx % 2];
            }
            let got = graph.run(|| step(gpu, &x, &mut state)).to_vec();
            assert_eq!(got, want, "run {run} on {device:?}");
            // Others take buffers in between and do not meet those of the graph.
            let other = Tensor::from_f32(device, &[4, 2], &[7.0; 8]);
            let got = graph.result().unwrap().to_vec();
            assert_eq!((other.to_vec(), got), (vec![7.0; 8], want.to_vec()), "{device:?}");
        }
        let live = gpu.memory().live;
        drop(graph);
        assert!(gpu.memory().live <= live);
        gpu.check().unwrap();
    }
}

#[test]
fn what_fails_is_told_with_the_name_of_the_kernel() {
    static BROKEN: Kernel = Kernel {
        entry: "broken",
        wgsl: "",
        cuda: "KERNEL broken(T0* y) {\n    y[0] = nothing_of_the_kind;\n}\n",
    };
    static GREEDY: Kernel = Kernel {
        entry: "greedy",
        wgsl: "",
        cuda: "struct Params { u32 a; };\nKERNEL greedy(T0* y, Params p) {}\n",
    };
    for (kernel, said) in [
        (&BROKEN, &["`broken`", "nothing_of_the_kind"]),
        (&GREEDY, &["`greedy`", "[8, 4] bytes, given are [8] and 8"]),
    ] {
        let Some(gpu) = fresh(Precision::F32) else { return };
        let device = Device::Gpu(gpu.clone());
        let mut y = Tensor::zeros(&device, &[1]);
        let params =
            if kernel.entry == "broken" { vec![] } else { vec![1usize.into(), 2usize.into()] };
        gpu.launch(kernel, Work::each(1), &[], &mut [Arg::Out(&mut y)], &params);
        // What comes after does nothing and does not panic.
        assert!(Tensor::zeros(&device, &[1]).to_vec()[0].is_nan());
        let problem = gpu.check().unwrap_err().report();
        assert!(said.iter().all(|word| problem.contains(word)), "{problem}");
        // Once it is told the device works again.
        assert_eq!(Tensor::zeros(&device, &[1]).to_vec(), [0.0]);
        gpu.check().unwrap();
        assert!(y.is_spoiled());
    }
    let Some(gpu) = fresh(Precision::F32) else { return };
    let problem = match Gpu::cuda(99, gpu.host().clone(), Precision::F32) {
        Ok(_) => panic!("a hundred devices"),
        Err(error) => error.report(),
    };
    assert!(problem.contains("no CUDA device 99"), "{problem}");
    assert!(problem.contains("list the devices"), "{problem}");
}

#[test]
fn out_of_memory_fails_one_step_and_the_next_one_works() {
    let there = [fresh(Precision::F32), opened(Device::cpu(1).unwrap().host().clone()).ok()];
    for gpu in there.into_iter().flatten() {
        let device = Device::Gpu(gpu.clone());
        let x = Tensor::from_f32(&device, &[4], &[1.0, 2.0, 3.0, 4.0]);
        let (mut unwritten, mut there_before) = (None, Tensor::zeros(&device, &[4]));
        let copy = x.derived(Derivation::Bf16, |x| {
            unwritten = Some(Tensor::uninit(&device, &[1 << 40]));
            there_before.write_f32(&[7.0; 4]);
            x.copied()
        });
        let error = gpu.check().unwrap_err();
        assert!(matches!(error, crate::error::Error::OutOfMemory { .. }), "{error}");
        assert!(error.report().contains("MiB"), "{error}");
        gpu.check().unwrap();
        assert!(copy.is_spoiled() && there_before.is_spoiled() && unwritten.unwrap().is_spoiled());
        // What was there is there, and what should have been made of it is made anew.
        assert_eq!(x.derived(Derivation::Bf16, Tensor::copied).to_vec(), [1.0, 2.0, 3.0, 4.0]);
        gpu.check().unwrap();
        // What was not written is not taken for numbers.
        let sum = there_before.copied();
        assert!(gpu.check().unwrap_err().report().contains("left unwritten"));
        assert!(sum.is_spoiled());
        assert_eq!(x.to_vec(), [1.0, 2.0, 3.0, 4.0]);
        gpu.check().unwrap();
    }
}

#[test]
fn times_are_taken_by_name() {
    let Some(gpu) = fresh(Precision::F32) else { return };
    let device = Device::Gpu(gpu.clone());
    let (x, mut state) = (Tensor::zeros(&device, &[4, 2]), Tensor::zeros(&device, &[4, 2]));
    step(&gpu, &x, &mut state);
    gpu.profile_start();
    for _ in 0..3 {
        step(&gpu, &x, &mut state);
    }
    let mut times = gpu.profile_stop();
    times.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<(&str, u64)> = times.iter().map(|it| (&it.name[..], it.n_launches)).collect();
    assert_eq!(names, [("product 4x2x2 f32 f32", 3), ("scale_columns", 3)]);
    assert!(times.iter().all(|it| it.ms > 0.0), "{times:?}");
    assert!(gpu.profile_stop().is_empty());
    let found = super::cuda::list();
    assert!(found.iter().any(|it| it.memory >= it.memory_free), "{found:?}");
    gpu.check().unwrap();
}

#[test]
fn wgpu_takes_times_by_name_too() {
    let Ok(gpu) = opened(Device::cpu(1).unwrap().host().clone()) else { return };
    let device = Device::Gpu(gpu.clone());
    let (x, mut state) = (Tensor::zeros(&device, &[4, 2]), Tensor::zeros(&device, &[4, 2]));
    assert!(gpu.profile_stop().is_empty());
    gpu.profile_start();
    // More than a set of queries has room for.
    for _ in 0..1030 {
        step(&gpu, &x, &mut state);
    }
    let mut times = gpu.profile_stop();
    gpu.check().unwrap();
    if times.is_empty() {
        return eprintln!("skip: the adapter takes no times");
    }
    times.sort_by(|a, b| a.name.cmp(&b.name));
    let names: Vec<(&str, u64)> = times.iter().map(|it| (&it.name[..], it.n_launches)).collect();
    assert_eq!(names, [("product 4x2x2", 1030), ("scale_columns", 1030)]);
    assert!(times.iter().all(|it| it.ms > 0.0), "{times:?}");
    assert!(gpu.profile_stop().is_empty());
}

#[test]
fn loops_that_a_driver_would_end_are_a_failure() {
    let Ok(gpu) = opened(Device::cpu(1).unwrap().host().clone()) else { return };
    gpu.expect_rounds(&SCALE, N_ROUNDS_MAX);
    gpu.check().unwrap();
    gpu.expect_rounds(&SCALE, N_ROUNDS_MAX + 1);
    let is_software = listed()[0].kind.as_deref() == Some("software");
    assert_eq!(gpu.check().is_err(), is_software);
}

#[test]
fn shared_memory_past_what_is_plain_is_allowed() {
    static WIDE: Kernel = Kernel {
        entry: "wide",
        wgsl: "",
        cuda: "extern __shared__ float wide_shared[];\n\
               KERNEL wide(T0* y) {\n\
                   for (u32 i = threadIdx.x; i < 16384; i += THREADS) wide_shared[i] = i;\n\
                   __syncthreads();\n\
                   if (threadIdx.x == 0) store(y, 0, wide_shared[16383]);\n\
               }\n",
    };
    let Some(gpu) = fresh(Precision::F32) else { return };
    let mut y = Tensor::zeros(&Device::Gpu(gpu.clone()), &[1]);
    let work = Work { shared: 65_536, ..Work::groups(1, 128) };
    gpu.launch(&WIDE, work, &[], &mut [Arg::Out(&mut y)], &[]);
    assert_eq!(y.to_vec(), [16383.0]);
    gpu.check().unwrap();
}

static SUMS: Kernel = Kernel {
    entry: "sums_of_a_group",
    wgsl: "
        @group(0) @binding(0) var<storage, read> x: array<f32>;
        @group(0) @binding(1) var<storage, read_write> out: array<f32>; // (3, THREADS)
        @compute @workgroup_size(THREADS)
        fn sums_of_a_group(@builtin(local_invocation_index) thread: u32) {
            out[thread] = group_sum(thread, x[thread]);
            out[THREADS + thread] = group_max(thread, x[thread]);
            out[2 * THREADS + thread] = lanes_sum(thread, x[thread]);
        }",
    cuda: "",
};

/// Of a group, its largest number, and of the 32 threads around each.
fn sums_of(x: &[f32]) -> Vec<f32> {
    let sum = |x: &[f32]| x.iter().map(|&x| f64::from(x)).sum::<f64>() as f32;
    let largest = x.iter().copied().fold(f32::MIN, f32::max);
    let lanes = x.chunks(32).flat_map(|lanes| vec![sum(lanes); lanes.len()]);
    [vec![sum(x); x.len()], vec![largest; x.len()], lanes.collect()].concat()
}

#[test]
fn sums_over_a_group_come_out_right_with_subgroups_and_without() {
    let host = Device::cpu(1).unwrap().host().clone();
    let Some(adapter) = listed().into_iter().next() else { return };
    let fast = opened(host.clone()).unwrap();
    let plain = Gpu::wgpu_plain(0, host, 1 << 20, &[]).unwrap();
    for (gpu, has) in [(fast, adapter.features.contains(&("subgroups", false))), (plain, false)] {
        assert_eq!(gpu.features().contains(&"subgroups"), has, "{}", adapter.name);
        let device = Device::Gpu(gpu.clone());
        for n_threads in [32, 64, 128, 256] {
            let x = numbers(n_threads as u64, n_threads);
            let there = Tensor::from_f32(&device, &[n_threads], &x);
            let mut out = Tensor::zeros(&device, &[3, n_threads]);
            let args = &mut [Arg::In(&there), Arg::Out(&mut out)];
            gpu.launch(&SUMS, Work::groups(1, n_threads), &[], args, &[]);
            let what = format!("{n_threads} threads, subgroups: {has}");
            compare_devices(&what, &sums_of(&x), &out.to_vec(), 1e-6);
        }
        gpu.check().unwrap();
    }
}

/// Products of `m` rows with a matrix in f16, (n, k) or (k, n), that begins anywhere in another;
/// of few rows also the other way to them.
fn products_of_halves(gpu: &Gpu, [m, n, k]: [usize; 3], dtype: DType) -> Vec<Vec<f32>> {
    let device = &Device::Gpu(gpu.clone());
    let x = Tensor::from_f32(device, &[m, k], &numbers(3, m * k));
    let mut list = Vec::new();
    for (n_rows, n_cols) in [(n, k), (k, n)] {
        // Columns of the result by ordinary numbers, by such below the normal ones, by large ones.
        let is_transposed = (n_rows, n_cols) == (n, k);
        let col = |at: usize| if is_transposed { at / n_cols } else { at % n_cols };
        let one = |(at, x): (usize, f32)| f16::from_f32(x * [1.0, 2e-5, 1e4][col(at) % 3]);
        let numbers = numbers(7, (n_rows + 1) * n_cols);
        let all: Vec<f16> = numbers.into_iter().enumerate().map(one).collect();
        let bytes = Arc::new(bytemuck::cast_slice(&all).to_vec());
        let stored = Tensor::from_shared(device, &[n_rows + 1, n_cols], DType::F16, bytes, 0);
        let w = gpu.decode_rows(&stored, 1..n_rows + 1, dtype);
        assert_eq!(w.dtype(), dtype);
        let mut out = Tensor::from_f32(device, &[m, n], &vec![1.0; m * n]);
        let side = if is_transposed { Side::Transposed(&w) } else { Side::Plain(&w) };
        gpu.product(&mut out, 2.0, 0.5, Side::Plain(&x), side);
        list.push(out.to_vec());
        if is_transposed && m <= N_FEW {
            gpu.few(&mut out, 0.0, 1.0, &x, &w);
            list.push(out.to_vec());
        }
    }
    gpu.check().unwrap();
    list
}

#[test]
fn a_matrix_in_f16_gives_the_same_bits_read_as_such_as_words_and_in_f32() {
    let host = Device::cpu(1).unwrap().host().clone();
    let Some(adapter) = listed().into_iter().next() else { return };
    let open = |bytes_max: usize| {
        let gpu = |features| Gpu::wgpu_plain(0, host.clone(), bytes_max, features).unwrap();
        (gpu(&["f16"]), gpu(&[]))
    };
    let has = adapter.features.contains(&("f16", false));
    let (large, small) = (open(usize::MAX), open(1 << 16));
    for (with, without) in [&large, &small] {
        assert_eq!((with.features().contains(&"f16"), without.features().len()), (has, 0));
    }
    // Few rows and many, on and off the edges of tiles of both sizes; the last three have more
    // than a small binding holds, on the right or everywhere.
    let few = [[1, 1, 1], [1, 70, 136], [5, 9, 37], [8, 130, 260], [9, 64, 16], [9, 65, 17]];
    let many = [[65, 66, 34], [200, 67, 36], [9, 300, 140], [3, 35, 1003], [1027, 1860, 9]];
    for size in few.into_iter().chain(many) {
        let want = products_of_halves(&large.0, size, DType::F32);
        let got = products_of_halves(&large.0, size, DType::F16);
        assert!(got == want, "{size:?}: not the bits of f32");
        assert!(products_of_halves(&large.1, size, DType::F16) == want, "{size:?}: as words");
        // Cut along k, sums have other bits, but the same for both.
        let got = products_of_halves(&small.0, size, DType::F16);
        assert!(products_of_halves(&small.1, size, DType::F16) == got, "{size:?}: in parts");
        for (want, got) in want.iter().zip(&got) {
            compare_devices(&format!("{size:?}, in parts"), want, got, 1e-4);
        }
    }
}
