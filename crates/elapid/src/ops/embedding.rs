//! Embedding: each token takes its row of a table.
//!
//! ```text
//! y[t] = table[ids[t]]            dtable[v] = sum of dy[t] over the t with ids[t] = v
//! ```
//!
//! | name    | shape              |                                              |
//! |---------|--------------------|----------------------------------------------|
//! | `table` | (n_vocab, d_model) | any dtype; a table that is not f32 is frozen |
//! | `y`     | (n_tok, d_model)   |                                              |
//!
//! Backward sorts the tokens by id, so that each row is summed by one task in the order of tokens;
//! on a GPU by one group, from lists that the host has made of the ids. In text a few ids are many
//! of the tokens: rows are summed in parts there, and then the parts.

use super::softmax::row_threads;
use crate::tape::{Tape, Var};
use crate::tensor::batch::Tokens;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Gpu, Kernel, Word, Work};
use crate::tensor::{DType, Tensor};

/// Rows one task works on.
const N_ROWS: usize = 64;

/// Rows of `table`, one per id. Panics on an id outside it: the caller checks ids from outside.
pub fn embedding(tape: &Tape, table: &Var, ids: &Tokens) -> Var {
    let y = forward(table.value(), ids);
    let (ids, shape) = (ids.clone(), table.value().shape().to_vec());
    tape.record("embedding", &[table], y, move |dy| vec![Some(backward(&shape, &ids, &dy))])
}

fn forward(table: &Tensor, ids: &Tokens) -> Tensor {
    let (n_vocab, d_model) = table.dims2();
    let cpu = match table.device() {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => {
            let outside = ids.iter().find(|&&id| id as usize >= n_vocab);
            assert!(outside.is_none(), "embedding: id {outside:?} of {n_vocab}");
            let ids = ids.on(table.device());
            // The residual stream begins here, and stays in f32 whatever branches are in.
            return gpu.gather_rows(table, &ids, DType::F32);
        }
    };
    let mut y = Tensor::uninit(table.device(), &[ids.len(), d_model]);
    cpu.each_piece(y.f32_mut(), N_ROWS * d_model, |idx, y| {
        for (y, &id) in y.chunks_exact_mut(d_model).zip(&ids[idx * N_ROWS..]) {
            assert!((id as usize) < n_vocab, "embedding: id {id} of {n_vocab}");
            table.read_f32(id as usize * d_model, y);
        }
    });
    y
}

/// Inverts `forward`.
fn backward(shape: &[usize], ids: &[u32], dy: &Tensor) -> Tensor {
    let d_model = shape[1];
    // Stable: tokens with one id stay in order.
    let mut by_id: Vec<u32> = (0..ids.len() as u32).collect();
    by_id.sort_by_key(|&tok| ids[tok as usize]);
    let mut dtable = Tensor::zeros(dy.device(), shape);
    match dy.device() {
        Device::Cpu(cpu) => cpu.each_piece(dtable.f32_mut(), N_ROWS * d_model, |idx, rows| {
            let first = idx * N_ROWS;
            let start = by_id.partition_point(|&tok| (ids[tok as usize] as usize) < first);
            for &tok in &by_id[start..] {
                let row = ids[tok as usize] as usize - first;
                let Some(row) = rows.get_mut(row * d_model..(row + 1) * d_model) else { break };
                let dy = &dy.f32()[tok as usize * d_model..];
                row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
        }),
        Device::Gpu(gpu) => backward_gpu(gpu, ids, &by_id, dy, &mut dtable),
    }
    dtable
}

static BACKWARD: Kernel =
    Kernel::new("embedding_backward", include_str!("embedding.wgsl"), include_str!("embedding.cu"));

/// Tokens of one id that a group of a GPU adds up.
const N_PART: usize = 64;

/// Adds to the zeros of `dtable` the rows that have tokens.
fn backward_gpu(gpu: &Gpu, ids: &[u32], by_id: &[u32], dy: &Tensor, dtable: &mut Tensor) {
    // Where a row begins in `by_id`, and which it is.
    let id_at = |at: usize| ids[by_id[at] as usize];
    let mut begins: Vec<u32> = (0..by_id.len() as u32)
        .filter(|&at| at == 0 || id_at(at as usize - 1) != id_at(at as usize))
        .collect();
    let rows: Vec<u32> = begins.iter().map(|&at| id_at(at as usize)).collect();
    begins.push(by_id.len() as u32);
    if begins.windows(2).all(|run| (run[1] - run[0]) as usize <= N_PART) {
        return add_rows(gpu, [by_id, &rows, &begins], dy, dtable);
    }
    // Where the parts begin, and the first part of each row.
    let (mut parts, mut firsts) = (Vec::new(), Vec::new());
    for run in begins.windows(2) {
        firsts.push(parts.len() as u32);
        parts.extend((run[0]..run[1]).step_by(N_PART));
    }
    let all: Vec<u32> = (0..parts.len() as u32).collect();
    parts.push(by_id.len() as u32);
    firsts.push(all.len() as u32);
    let mut sums = Tensor::uninit(dy.device(), &[all.len(), dtable.dims2().1]);
    add_rows(gpu, [by_id, &all, &parts], dy, &mut sums);
    add_rows(gpu, [&all, &rows, &firsts], &sums, dtable);
}

/// Sums of rows of `x`, in the order of the first list, as rows of `sums` that the second names.
/// The third says where each begins in the first, and has its end behind all.
fn add_rows(gpu: &Gpu, lists: [&[u32]; 3], x: &Tensor, sums: &mut Tensor) {
    let [order, rows, _] = lists;
    let (n_rows, d) = sums.dims2();
    let lists = Tensor::from_u32(x.device(), &lists.concat());
    for window in gpu.windows(n_rows, 4 * d) {
        let first = rows.partition_point(|&row| (row as usize) < window.start);
        let end = rows.partition_point(|&row| (row as usize) < window.end);
        if first == end {
            continue;
        }
        let bytes = window.start * 4 * d..window.end * 4 * d;
        let mut args = [Arg::In(&lists), Arg::In(x), Arg::Window(sums, bytes)];
        let params = [order.len(), rows.len(), first, end, window.start, d].map(Word::from);
        gpu.launch(&BACKWARD, Work::groups(end - first, row_threads(d)), &[], &mut args, &params);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices};
    use crate::tensor::quant::BlockType;
    use half::f16;
    use std::sync::Arc;

    #[test]
    fn gradients() {
        // One token; tokens that come again; rows of two tasks.
        let cases = [(1, vec![0u32]), (4, vec![2, 0, 2, 2, 3]), (71, vec![2, 70, 65, 63, 64, 70])];
        for (n_vocab, ids) in cases {
            let ids: Tokens = ids.into();
            for d_model in [1, 5, 300] {
                let inputs = [Input::normal(1, &[n_vocab, d_model], 1.0)];
                check_gradients(&inputs, |tape, v| vec![embedding(tape, &v[0], &ids)]);
            }
        }
    }

    #[test]
    fn a_table_larger_than_a_binding_goes_in_runs_of_rows() {
        let Some(small) = crate::ops::check::small_bindings() else { return };
        // 700 rows of 48 numbers: 131 KiB, with 64 KiB to a binding.
        let (n_vocab, d_model) = (700, 48);
        let ids: Tokens = vec![699, 0, 3, 340, 341, 342, 699, 0, 500].into();
        let run = |device: &Device| {
            let tape = Tape::new();
            let table = Input::normal(1, &[n_vocab, d_model], 1.0).tensor(device);
            let y = embedding(&tape, &tape.leaf(0, &table), &ids);
            let dy = Input::normal(2, &[ids.len(), d_model], 1.0).tensor(device);
            let mut out = y.value().to_vec();
            let mut grads = crate::tape::Gradients::default();
            tape.walk(vec![(y, dy)], &mut grads);
            out.extend(grads.get(0).unwrap().to_vec());
            device.check().unwrap();
            out
        };
        assert!(run(small) == run(&Device::cpu(1).unwrap()));
    }

    #[test]
    fn gradients_with_many_tokens_of_one_id() {
        for n_tok in [33, 200] {
            // And one token of an id alone.
            let ids: Tokens =
                (0..n_tok).map(|tok| if tok == 7 { 3 } else { [1, 1, 2][tok % 3] }).collect();
            let inputs = [Input::normal(1, &[4, 5], 1.0)];
            check_gradients(&inputs, |tape, v| vec![embedding(tape, &v[0], &ids)]);
        }
    }

    #[test]
    fn rows_of_a_stored_table_are_those_of_its_decoded_values() {
        let device = Device::cpu(2).unwrap();
        let (n_vocab, d_model) = (71, 96);
        let ids: Tokens = vec![70, 0, 3, 70, 1, 64, 63].into();
        let exact = Input::normal(1, &[n_vocab, d_model], 1.0).tensor(&device);
        let exact = exact.f32();
        let halves: Vec<f16> = exact.iter().map(|&x| f16::from_f32(x)).collect();
        let mut blocks = vec![0; n_vocab * d_model / 32 * 34];
        BlockType::Q8_0.encode(exact, &mut blocks);
        let mut of_blocks = vec![0.0; exact.len()];
        BlockType::Q8_0.decode(&blocks, &mut of_blocks);
        let of_halves: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
        let halves: Vec<u8> = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
        for (dtype, bytes, values) in
            [(DType::F16, halves, of_halves), (DType::Block(BlockType::Q8_0), blocks, of_blocks)]
        {
            let shape = [n_vocab, d_model];
            let bytes = Arc::new(bytes);
            let table = Tensor::from_shared(&device, &shape, dtype, bytes.clone(), 0);
            let y = embedding(&Tape::off(), &Var::constant(table), &ids);
            y.value().expect_shape("embedding", &[ids.len(), d_model]);
            for (row, &id) in y.value().f32().chunks(d_model).zip(ids.iter()) {
                assert_eq!(row, &values[id as usize * d_model..][..d_model], "{dtype:?}, id {id}");
            }
            for (device, tolerance) in devices() {
                let table = Tensor::from_shared(device, &shape, dtype, bytes.clone(), 0);
                let there = embedding(&Tape::off(), &Var::constant(table), &ids);
                let (want, got) = (y.value().f32(), there.value().to_vec());
                compare_devices(&format!("{dtype:?}, {device:?}"), want, &got, *tolerance);
            }
        }
    }
}
