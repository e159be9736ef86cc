//! Embedding: each token takes its row of a table.
//!
//!     y[t] = table[ids[t]]            dtable[v] = sum of dy[t] over the t with ids[t] = v
//!
//! | name    | shape              |                                              |
//! |---------|--------------------|----------------------------------------------|
//! | `table` | (n_vocab, d_model) | any dtype; a table that is not f32 is frozen |
//! | `y`     | (n_tok, d_model)   |                                              |
//!
//! Backward sorts the tokens by id, so that each row is summed by one task in the order of tokens.

use crate::device::Device;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use std::sync::Arc;

/// Rows one task works on.
const N_ROWS: usize = 64;

/// Rows of `table`, one per id. Panics on an id outside it: the caller checks ids from outside.
pub fn embedding(tape: &Tape, table: &Var, ids: &Arc<[u32]>) -> Var {
    let y = forward(table.value(), ids);
    let (ids, shape) = (ids.clone(), table.value().shape().to_vec());
    tape.record("embedding", &[table], y, move |dy| vec![Some(backward(&shape, &ids, &dy))])
}

fn forward(table: &Tensor, ids: &[u32]) -> Tensor {
    let cpu = table.device().expect_cpu();
    let (n_vocab, d_model) = table.dims2();
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
    let cpu = dy.device().expect_cpu();
    let d_model = shape[1];
    // Stable: tokens with one id stay in order.
    let mut by_id: Vec<u32> = (0..ids.len() as u32).collect();
    by_id.sort_by_key(|&tok| ids[tok as usize]);
    let mut dtable = Tensor::zeros(dy.device(), shape);
    cpu.each_piece(dtable.f32_mut(), N_ROWS * d_model, |idx, rows| {
        let first = idx * N_ROWS;
        let begin = by_id.partition_point(|&tok| (ids[tok as usize] as usize) < first);
        for &tok in &by_id[begin..] {
            let row = ids[tok as usize] as usize - first;
            let Some(row) = rows.get_mut(row * d_model..(row + 1) * d_model) else { break };
            let dy = &dy.f32()[tok as usize * d_model..];
            row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
        }
    });
    dtable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::quant::BlockType;
    use crate::tensor::DType;
    use half::f16;

    #[test]
    fn gradients() {
        // One token; tokens that come again; rows of two tasks.
        let cases = [(1, vec![0u32]), (4, vec![2, 0, 2, 2, 3]), (71, vec![2, 70, 65, 63, 64, 70])];
        for (n_vocab, ids) in cases {
            let ids: Arc<[u32]> = ids.into();
            let inputs = [Input::normal(1, &[n_vocab, 5], 1.0)];
            check_gradients(&inputs, |tape, v| vec![embedding(tape, &v[0], &ids)]);
        }
    }

    #[test]
    fn rows_of_a_stored_table_are_those_of_its_decoded_values() {
        let device = Device::cpu(2).unwrap();
        let (n_vocab, d_model) = (71, 96);
        let ids: Arc<[u32]> = vec![70, 0, 3, 70, 1, 64, 63].into();
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
            let table = Tensor::from_shared(&device, &shape, dtype, Arc::new(bytes), 0);
            let y = embedding(&Tape::off(), &Var::constant(table), &ids);
            y.value().expect_shape("embedding", &[ids.len(), d_model]);
            for (row, &id) in y.value().f32().chunks(d_model).zip(ids.iter()) {
                assert_eq!(row, &values[id as usize * d_model..][..d_model], "{dtype:?}, id {id}");
            }
        }
    }
}
