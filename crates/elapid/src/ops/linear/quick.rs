//! Linear maps for generation: no gradients, matrices as they are stored.
//!
//! A matrix in blocks is multiplied with inputs rounded to 8 bits, as ggml does, without decoding
//! it. Few tokens read each byte of the matrix once (`quant::dot`); many go through a product of
//! small integers, or where the machine has none, of floats.
//!
//! For few tokens a result depends on its token alone, bit by bit: who else is in the batch does
//! not matter.

use super::operands::{Operands, Way};
use super::{Linear, Part};
use crate::ops::transpose;
use crate::tensor::cpu::{Mat, MatMut, Scope};
use crate::tensor::product::{Side, product};
use crate::tensor::quant::BlockType;
use crate::tensor::quant::dot::{Group, Inputs, Many, N_ROW, Rounded, Rounding, Rows, Set};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// Tokens that are few.
pub(super) const N_FEW: usize = 16;
/// Tokens that meet a strip of the matrix before the next: they stay in the second level of cache.
const N_MANY: usize = 128;
/// Rows of a matrix of halves that one task decodes.
const N_DECODED: usize = 96;
/// Bytes of matrices that one task reads: the least and the most.
const TASK_BYTES: Range<usize> = 1 << 14..1 << 18;

/// Whether a map can be computed this way. Lengths of rows are the exact way's.
pub(super) fn can(linear: &Linear) -> bool {
    linear.adapter.as_ref().is_none_or(|adapter| adapter.magnitude.is_none())
}

/// How maps are computed that are asked for together, each with its number of tokens.
pub(super) fn way<'a>(mut maps: impl Iterator<Item = (&'a Linear, usize)>) -> Way {
    let is_few = |(map, n_tok): (&Linear, usize)| n_tok <= N_FEW && !is_decoded(map.weight.value());
    if maps.all(is_few) { Way::Few } else { Way::Many }
}

/// The results of several maps: all of them at once where there are few tokens.
pub(super) fn quick(x: &Tensor, parts: &[Part], way: Way) -> Vec<Tensor> {
    let inputs = Forms::new(x, parts, way);
    let mut list = match way {
        Way::Few => few(parts, &inputs),
        Way::Many => parts.iter().map(|part| many(part, &inputs)).collect(),
    };
    for (y, part) in list.iter_mut().zip(parts) {
        put_in_order(y, part);
        add_bias(y, part);
        add_adapter(y, x, part);
    }
    list
}

/// The inputs, also in the forms that the matrices ask for.
struct Forms<'a> {
    x: &'a Tensor,
    rounded: Vec<(Rounding, Rounded)>,
}

impl<'a> Forms<'a> {
    fn new(x: &'a Tensor, parts: &[Part], way: Way) -> Forms<'a> {
        let (_, d_in) = x.dims2();
        let is_wanted = |&rounding: &Rounding| {
            parts.iter().any(|part| rounding_of(part.linear) == Some(rounding))
        };
        let wanted = [Rounding::Groups, Rounding::Eights].into_iter().filter(is_wanted);
        let pool = x.device().expect_cpu().pool();
        let round = match way {
            Way::Few => Rounded::few,
            Way::Many => Rounded::new,
        };
        let form = |rounding| (rounding, round(pool, x.f32(), d_in, rounding));
        Forms { x, rounded: wanted.map(form).collect() }
    }

    /// What a part asks for.
    fn of(&self, part: &Part) -> Inputs<'_> {
        let rounding = rounding_of(part.linear);
        match self.rounded.iter().find(|form| Some(form.0) == rounding) {
            Some((_, rounded)) => rounded.of(&part.tokens),
            None => {
                let (_, d_in) = self.x.dims2();
                Inputs::Floats(&self.x.f32()[part.tokens.start * d_in..part.tokens.end * d_in])
            }
        }
    }
}

fn rounding_of(linear: &Linear) -> Option<Rounding> {
    match linear.weight.value().dtype() {
        DType::Block(block) => Rounding::of(block),
        _ => None,
    }
}

/// Rows of a matrix as they are stored.
fn stored(weight: &Tensor, rows: Range<usize>) -> Rows<'_> {
    let row_bytes = weight.n_bytes() / weight.shape()[0].max(1);
    let bytes = &weight.bytes()[rows.start * row_bytes..rows.end * row_bytes];
    match weight.dtype() {
        DType::F32 => Rows::F32(bytemuck::cast_slice(bytes)),
        DType::F16 => Rows::F16(bytes),
        DType::BF16 => Rows::BF16(bytes),
        DType::Block(block) => Rows::Blocks(block, bytes),
        DType::U32 => panic!("a matrix of whole numbers"),
    }
}

/// (n_tok, d_out) for each map.
fn few(parts: &[Part], inputs: &Forms) -> Vec<Tensor> {
    let x = inputs.x;
    let cpu = x.device().expect_cpu();
    // With one token, rows of results and columns of results are the same.
    let shape = |part: &Part| [part.rows.len(), part.tokens.len()];
    let mut list: Vec<Tensor> =
        parts.iter().map(|part| Tensor::uninit(x.device(), &shape(part))).collect();
    // Two tasks for each thread, where that makes pieces of a good size.
    let of_part = |part: &Part| {
        let weight = part.linear.weight.value();
        weight.n_bytes() / weight.shape()[0].max(1) * part.rows.len()
    };
    let n_bytes: usize = parts.iter().map(of_part).sum();
    let task_bytes = (n_bytes / (2 * cpu.n_threads())).clamp(TASK_BYTES.start, TASK_BYTES.end);
    let mut tasks = Vec::new();
    for (part, y) in parts.iter().zip(&mut list) {
        let (weight, n_tok) = (part.linear.weight.value(), part.tokens.len());
        let n_row = weight.shape()[0];
        let per_task = (task_bytes * n_row).div_ceil(weight.n_bytes().max(1)).max(1);
        for (idx, y) in y.f32_mut().chunks_mut((per_task * n_tok).max(1)).enumerate() {
            let first = part.rows.start + idx * per_task;
            let weight = stored(weight, first..first + y.len() / n_tok);
            tasks.push((weight, inputs.of(part), n_tok, y));
        }
    }
    let set = Set::best();
    cpu.share_out(tasks, |(weight, inputs, n_tok, y)| set.products(weight, inputs, n_tok, y));
    let turned = list.into_iter().zip(parts).map(|(y, part)| {
        let n_tok = part.tokens.len();
        if n_tok == 1 {
            return y.reshape(&[1, part.rows.len()]);
        }
        let mut out = Tensor::uninit(x.device(), &[n_tok, part.rows.len()]);
        transpose(y.f32(), n_tok, out.f32_mut());
        out
    });
    turned.collect()
}

/// Whether a matrix has to be decoded to be multiplied.
fn is_decoded(weight: &Tensor) -> bool {
    matches!(weight.dtype(), DType::Block(block) if Rounding::of(block).is_none())
}

/// (n_tok, d_out) of one map, for many tokens.
fn many(part: &Part, inputs: &Forms) -> Tensor {
    let x = inputs.x;
    let weight = part.linear.weight.value();
    let mut y = Tensor::uninit(x.device(), &[part.tokens.len(), part.rows.len()]);
    match (weight.dtype(), inputs.of(part)) {
        (DType::Block(block), Inputs::Rounded(groups, _)) if Set::best().has_strips() => {
            let weight = weight.rows(part.rows.clone());
            strips(block, &weight, groups, &mut y);
        }
        (_, Inputs::Rounded(groups, _)) => {
            let mut rounded = Tensor::uninit(x.device(), &[part.tokens.len(), x.dims2().1]);
            for (group, out) in groups.iter().zip(rounded.f32_mut().as_chunks_mut::<32>().0) {
                group.decode(out);
            }
            exact(part, &rounded, &mut y);
        }
        (DType::F16 | DType::BF16, Inputs::Floats(x)) => {
            decoded_strips(&weight.rows(part.rows.clone()), x, &mut y);
        }
        (_, Inputs::Floats(_)) => {
            exact(part, &x.rows(part.tokens.clone()), &mut y);
        }
    }
    y
}

/// `y = x @ w^T` with the matrix decoded to f32.
fn exact(part: &Part, x: &Tensor, y: &mut Tensor) {
    let operands = Operands::as_stored(part.linear);
    operands.product(part.rows.clone(), x, 0.0, y.into(), Way::Many);
}

/// A matrix of halves with many inputs: each task decodes some rows and multiplies them while they
/// are in its second level of cache.
fn decoded_strips(weight: &Tensor, x: &[f32], y: &mut Tensor) {
    let device = weight.device();
    let cpu = device.expect_cpu();
    let ((n_tok, d_out), d_in) = (y.dims2(), weight.shape()[1]);
    let x = Mat::new(x, n_tok, d_in);
    let n_strip = d_out.div_ceil(N_DECODED);
    let mut out = Tensor::uninit(device, &[n_strip, N_DECODED, n_tok]);
    cpu.each_piece(out.f32_mut(), N_DECODED * n_tok, |strip, out| {
        let rows = strip * N_DECODED..d_out.min((strip + 1) * N_DECODED);
        let mut w = Tensor::uninit(device, &[rows.len(), d_in]);
        weight.read_f32(rows.start * d_in, w.f32_mut());
        let w = Mat::new(w.f32(), rows.len(), d_in);
        let out = MatMut::new(&mut out[..n_tok * rows.len()], n_tok, rows.len());
        cpu.gemm(out, 0.0, 1.0, x, w.t(), Scope::Thread);
    });
    for (strip, out) in out.f32().chunks_exact(N_DECODED * n_tok).enumerate() {
        let first = strip * N_DECODED;
        let n_row = N_DECODED.min(d_out - first);
        for (out, y) in out.chunks_exact(n_row).zip(y.f32_mut().chunks_exact_mut(d_out)) {
            y[first..first + n_row].copy_from_slice(out);
        }
    }
}

/// A matrix in blocks with many rounded inputs, sixteen rows at a time.
fn strips(block: BlockType, weight: &Tensor, groups: &[Group], y: &mut Tensor) {
    let cpu = weight.device().expect_cpu();
    let (n_tok, d_out) = y.dims2();
    let (w, set) = (weight.bytes(), Set::best());
    let (per_tok, strip_bytes) = (groups.len() / n_tok, N_ROW * (w.len() / d_out));
    let n_strip = d_out.div_ceil(N_ROW);
    let mut out = Tensor::uninit(weight.device(), &[n_strip, n_tok.min(N_MANY), N_ROW]);
    for (idx, groups) in groups.chunks(N_MANY * per_tok).enumerate() {
        let n = groups.len() / per_tok;
        let inputs = Many::new(groups, n);
        let out = &mut out.f32_mut()[..n_strip * n * N_ROW];
        cpu.each_piece(out, n * N_ROW, |strip, out| {
            let rows = strip * strip_bytes..w.len().min((strip + 1) * strip_bytes);
            set.strip(block, &w[rows], &inputs, out);
        });
        let y = &mut y.f32_mut()[idx * N_MANY * d_out..][..n * d_out];
        for (tok, y) in y.chunks_exact_mut(d_out).enumerate() {
            for (strip, y) in y.chunks_mut(N_ROW).enumerate() {
                y.copy_from_slice(&out[(strip * n + tok) * N_ROW..][..y.len()]);
            }
        }
    }
}

/// Moves the outputs of a matrix whose rows are not in their places.
fn put_in_order(y: &mut Tensor, part: &Part) {
    let Some(order) = &part.linear.order else { return };
    assert_eq!(part.rows, 0..order.len(), "linear: all rows of a matrix in another order");
    let mut out = Tensor::uninit(y.device(), y.shape());
    let rows = y.f32().chunks_exact(order.len());
    for (y, out) in rows.zip(out.f32_mut().chunks_exact_mut(order.len())) {
        out.iter_mut().zip(&**order).for_each(|(out, row)| *out = y[*row]);
    }
    *y = out;
}

fn add_bias(y: &mut Tensor, part: &Part) {
    if let Some(bias) = &part.linear.bias {
        let bias = &bias.value().f32()[part.rows.clone()];
        for y in y.f32_mut().chunks_exact_mut(bias.len().max(1)) {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
}

/// `y += scale (x @ a^T) @ b^T`.
fn add_adapter(y: &mut Tensor, x: &Tensor, part: &Part) {
    let Some(adapter) = &part.linear.adapter else { return };
    let x = x.rows(part.tokens.clone());
    let u = float_product(&x, adapter.a.value());
    let more = float_product(&u, &adapter.b.value().rows(part.rows.clone()));
    let numbers = y.f32_mut().iter_mut().zip(more.f32());
    numbers.for_each(|(y, more)| *y += adapter.scale * more);
}

/// `x @ w^T` of floats, each token by itself where they are few.
fn float_product(x: &Tensor, w: &Tensor) -> Tensor {
    let ((n_tok, d_in), d_out) = (x.dims2(), w.shape()[0]);
    let mut y = Tensor::uninit(x.device(), &[n_tok, d_out]);
    if n_tok <= N_FEW {
        let set = Set::best();
        for (x, y) in x.f32().chunks_exact(d_in).zip(y.f32_mut().chunks_exact_mut(d_out)) {
            set.products(Rows::F32(w.f32()), Inputs::Floats(x), 1, y);
        }
    } else {
        product(&mut y, 0.0, 1.0, Side::Plain(x), Side::Transposed(w));
    }
    y
}
