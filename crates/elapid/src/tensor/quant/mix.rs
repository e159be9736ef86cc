//! Mixes: which type llama.cpp stores each tensor of a model in, by the name of the file type.
//!
//! A mix has one type for most tensors and more bits for a few that lose most by rounding: the
//! output, the values of attention (`attn_v`), the way out of the feed-forward (`ffn_down`). The
//! rules below are those of llama.cpp's `llama-quant.cpp` without an importance matrix.
//!
//! | tensor                | type                                                                |
//! |-----------------------|---------------------------------------------------------------------|
//! | vectors, norms, gates | f32: they are small, and some kernels take nothing else             |
//! | output                | q6_k, or q8_0; a tied `token_embd` counts as output                 |
//! | `attn_v`, `ffn_down`  | in some layers more bits: see `attn_v` and `ffn_down`               |
//! | other                 | the type of the mix                                                 |
//! | a row that is no      | q4_k becomes q5_0, q5_k q5_1, q6_k q8_0, smaller ones q4_0;         |
//! | multiple of a block   | f16 where not even blocks of 32 fit                                 |
//!
//! "Layer" in these rules is a count: how many tensors of the kind came before, in the order of
//! llama.cpp (by layer, then by name). With experts, `ffn_down` takes the layer from its name.
//!
//! Not here: rules for families that this engine does not have; a choice by hand for one tensor.

use super::BlockType;
use super::BlockType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use crate::tensor::DType;

/// What the rules ask of a model.
#[derive(Clone, Copy, Debug)]
pub struct ArchFacts {
    pub n_layer: usize,
    /// Experts of a feed-forward; zero where there are none.
    pub n_expert: usize,
    /// Query heads to each key-value head in the first layer, if that layer has attention.
    pub n_gqa: Option<usize>,
    /// Whether llama.cpp calls the model 70B: 80 layers, and `general.architecture` is `llama` with
    /// fewer key-value heads than heads and not eight experts, or `qwen2`.
    pub is_70b: bool,
}

/// A file type of llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mix {
    /// All tensors f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    BF16,
    /// q8_0.
    Q8_0,
    /// q4_0, output q6_k.
    Q4_0,
    /// q4_1, output q6_k.
    Q4_1,
    /// q5_0, output q6_k.
    Q5_0,
    /// q5_1, output q6_k.
    Q5_1,
    /// q2_k, half of the layers' tensors q3_k or more.
    Q2K,
    /// q3_k.
    Q3KSmall,
    /// q3_k, more for `attn_v`, `attn_output` and `ffn_down`.
    Q3KMedium,
    /// q3_k, q5_k for `attn_v`, `attn_output` and `ffn_down`.
    Q3KLarge,
    /// q4_k, q5_k for `attn_v` and `ffn_down` of the first layers.
    Q4KSmall,
    /// q4_k, q6_k for half of `attn_v` and `ffn_down`.
    Q4KMedium,
    /// q5_k.
    Q5KSmall,
    /// q5_k, q6_k for half of `attn_v` and `ffn_down`.
    Q5KMedium,
    /// q6_k.
    Q6K,
}

impl std::fmt::Display for Mix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Mix {
    /// Every mix: its name, its number in `general.file_type`, the type of most tensors.
    pub(crate) const ALL: [(Mix, &'static str, u32, DType); 17] = [
        (Mix::F32, "f32", 0, DType::F32),
        (Mix::F16, "f16", 1, DType::F16),
        (Mix::BF16, "bf16", 32, DType::BF16),
        (Mix::Q8_0, "q8_0", 7, DType::Block(Q8_0)),
        (Mix::Q4_0, "q4_0", 2, DType::Block(Q4_0)),
        (Mix::Q4_1, "q4_1", 3, DType::Block(Q4_1)),
        (Mix::Q5_0, "q5_0", 8, DType::Block(Q5_0)),
        (Mix::Q5_1, "q5_1", 9, DType::Block(Q5_1)),
        (Mix::Q2K, "q2_k", 10, DType::Block(Q2K)),
        (Mix::Q3KSmall, "q3_k_s", 11, DType::Block(Q3K)),
        (Mix::Q3KMedium, "q3_k_m", 12, DType::Block(Q3K)),
        (Mix::Q3KLarge, "q3_k_l", 13, DType::Block(Q3K)),
        (Mix::Q4KSmall, "q4_k_s", 14, DType::Block(Q4K)),
        (Mix::Q4KMedium, "q4_k_m", 15, DType::Block(Q4K)),
        (Mix::Q5KSmall, "q5_k_s", 16, DType::Block(Q5K)),
        (Mix::Q5KMedium, "q5_k_m", 17, DType::Block(Q5K)),
        (Mix::Q6K, "q6_k", 18, DType::Block(Q6K)),
    ];

    pub(crate) fn from_name(name: &str) -> Option<Mix> {
        Mix::ALL.into_iter().find(|entry| entry.1 == name).map(|entry| entry.0)
    }

    fn entry(self) -> (Mix, &'static str, u32, DType) {
        let entry = Mix::ALL.into_iter().find(|entry| entry.0 == self);
        entry.expect("ALL has every mix")
    }

    /// As people write it: `q4_k_m`.
    pub(crate) fn name(self) -> &'static str {
        self.entry().1
    }

    /// Its number in `general.file_type` of a GGUF file.
    pub(crate) fn file_type(self) -> u32 {
        self.entry().2
    }

    /// The type of each tensor, in the order given.
    ///
    /// Names are those of GGUF; the last axis of a shape is the length of a row. What llama.cpp
    /// would leave in the type it finds is f32 here, as its converters write it.
    pub(crate) fn choose(self, tensors: &[(String, Vec<usize>)], arch: &ArchFacts) -> Vec<DType> {
        let kinds: Vec<Kind> = tensors.iter().map(|tensor| Kind::of(&tensor.0)).collect();
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|idx| (layer_of(&tensors[*idx].0), tensors[*idx].0.as_str()));
        let mut rules = Rules {
            mix: self,
            arch,
            is_tied: !kinds.contains(&Kind::Output),
            n_attn_v: kinds.iter().filter(|kind| **kind == Kind::AttnV).count(),
            attn_v_idx: 0,
            ffn_down_idx: 0,
        };
        let mut chosen = vec![DType::F32; tensors.len()];
        for idx in order {
            let (name, shape) = &tensors[idx];
            if is_rounded(name, shape) {
                let n_row = shape[shape.len() - 1];
                chosen[idx] = match self.entry().3 {
                    DType::Block(usual) => {
                        fitting(rules.block(usual, name, kinds[idx], n_row), n_row)
                    }
                    plain => plain,
                };
            }
        }
        chosen
    }
}

/// Whether a tensor is stored in the types of the mix: matrices, but for small or delicate ones.
fn is_rounded(name: &str, shape: &[usize]) -> bool {
    // The axes of ggml: the row length first, ones at the end not counted.
    let is_matrix = shape.len() >= 2 && shape[..shape.len() - 1].iter().any(|n| *n > 1);
    let kept = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d"];
    is_matrix && name.ends_with("weight") && !kept.iter().any(|part| name.contains(part))
}

/// The layer in a name such as `blk.3.attn_v.weight`.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// What a tensor is, as far as the rules ask.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Output,
    TokenEmbd,
    /// Values, alone or in one matrix with others.
    AttnV,
    AttnK,
    AttnOutput,
    FfnDown,
    Other,
}

impl Kind {
    fn of(name: &str) -> Kind {
        let has = |part: &str| name.contains(part);
        match name {
            "output.weight" => Kind::Output,
            "token_embd.weight" => Kind::TokenEmbd,
            _ if has("attn_qkv.weight") || has("attn_kv_b.weight") => Kind::AttnV,
            _ if has("attn_v.weight") => Kind::AttnV,
            _ if has("attn_k.weight") => Kind::AttnK,
            _ if has("attn_output.weight") => Kind::AttnOutput,
            _ if has("ffn_down") => Kind::FfnDown,
            _ => Kind::Other,
        }
    }
}

/// The rules of a mix, and how many tensors of a kind they have seen.
struct Rules<'a> {
    mix: Mix,
    arch: &'a ArchFacts,
    is_tied: bool,
    n_attn_v: usize,
    attn_v_idx: usize,
    ffn_down_idx: usize,
}

impl Rules<'_> {
    /// The format for one tensor, whether or not its rows fit.
    fn block(&mut self, usual: BlockType, name: &str, kind: Kind, n_row: usize) -> BlockType {
        match kind {
            Kind::Output => output(usual, n_row),
            Kind::TokenEmbd if self.is_tied => output(usual, n_row),
            Kind::AttnV => self.attn_v(usual),
            Kind::AttnK if self.arch.n_expert == 8 => Q8_0,
            Kind::AttnOutput => self.attn_output(usual),
            Kind::FfnDown => self.ffn_down(usual, name),
            _ => usual,
        }
    }

    fn attn_v(&mut self, usual: BlockType) -> BlockType {
        let idx = self.attn_v_idx;
        self.attn_v_idx += 1;
        let block = match self.mix {
            Mix::Q2K if self.arch.n_gqa.is_some_and(|n_gqa| n_gqa >= 4) => Q4K,
            Mix::Q2K => Q3K,
            Mix::Q3KMedium if idx < 2 => Q5K,
            Mix::Q3KMedium => Q4K,
            Mix::Q3KLarge => Q5K,
            Mix::Q4KSmall if idx < 4 => Q5K,
            Mix::Q4KMedium | Mix::Q5KMedium if wants_more_bits(idx, self.n_attn_v) => Q6K,
            _ => usual,
        };
        // Where it is an eighth of `attn_q`, or little beside the experts, more bits cost nothing.
        match block {
            _ if self.arch.n_expert == 8 => Q8_0,
            Q3K | Q4K if self.arch.is_70b => Q5K,
            block => block,
        }
    }

    fn attn_output(&self, usual: BlockType) -> BlockType {
        match (self.mix, self.arch.n_expert == 8) {
            (Mix::Q2K | Mix::Q3KSmall | Mix::Q3KMedium, true) => Q5K,
            (Mix::Q4KSmall | Mix::Q4KMedium, true) => Q5K,
            (Mix::Q2K, false) => Q3K,
            (Mix::Q3KMedium, false) => Q4K,
            (Mix::Q3KLarge, false) => Q5K,
            _ => usual,
        }
    }

    fn ffn_down(&mut self, usual: BlockType, name: &str) -> BlockType {
        let count = self.ffn_down_idx;
        self.ffn_down_idx += 1;
        // A layer has several of them with experts.
        let of_name = if self.arch.n_expert > 1 { layer_of(name) } else { None };
        let (idx, n_layer) = (of_name.unwrap_or(count), self.arch.n_layer);
        match self.mix {
            Mix::Q2K => Q3K,
            Mix::Q3KMedium if idx < n_layer / 16 => Q5K,
            Mix::Q3KMedium => Q4K,
            Mix::Q3KLarge => Q5K,
            Mix::Q4KSmall if idx < n_layer / 8 => Q5K,
            Mix::Q4KMedium | Mix::Q5KMedium if wants_more_bits(idx, n_layer) => Q6K,
            _ => usual,
        }
    }
}

fn output(usual: BlockType, n_row: usize) -> BlockType {
    if usual == Q8_0 || !n_row.is_multiple_of(usual.n_elem()) { Q8_0 } else { Q6K }
}

/// The first and the last eighth, and every third between.
fn wants_more_bits(idx: usize, n: usize) -> bool {
    let eighth = n / 8;
    idx < eighth || idx >= n - n.div_ceil(8) || (idx - eighth) % 3 == 2
}

/// The format itself, or one with smaller blocks and no fewer bits if rows are no multiple of it.
fn fitting(block: BlockType, n_row: usize) -> DType {
    let fits = |block: BlockType| n_row.is_multiple_of(block.n_elem());
    let other = match block {
        _ if fits(block) => block,
        Q2K | Q3K => Q4_0,
        Q4K => Q5_0,
        Q5K => Q5_1,
        Q6K => Q8_0,
        small => small,
    };
    if fits(other) { DType::Block(other) } else { DType::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: ArchFacts = ArchFacts { n_layer: 0, n_expert: 0, n_gqa: Some(4), is_70b: false };

    type Tensors = Vec<(String, Vec<usize>)>;

    /// A model with the tensors of `table`'s head, and `more` that stay f32.
    fn model(table: &str, n_layer: usize, d: usize, d_ff: usize, more: &[&str]) -> Tensors {
        let shape = |kind: &str| match kind {
            "token_embd" | "output" => vec![64, d],
            "attn_k" | "attn_v" => vec![d / 4, d],
            "attn_output" => vec![d, d],
            "ffn_up" => vec![d_ff, d],
            "ffn_down" => vec![d, d_ff],
            "ffn_up_exps" => vec![8, d_ff, d],
            "ffn_down_exps" => vec![8, d, d_ff],
            "ssm_x" => vec![d_ff + 32, d],
            "ssm_dt" => vec![d, d_ff],
            other => panic!("{other}"),
        };
        let mut list: Tensors = more.iter().map(|name| (name.to_string(), vec![7, d])).collect();
        for kind in table.lines().next().unwrap().split_whitespace().skip(1) {
            let shape = shape(kind);
            if ["token_embd", "output"].contains(&kind) {
                list.push((format!("{kind}.weight"), shape));
                continue;
            }
            let of_layer = |layer| (format!("blk.{layer}.{kind}.weight"), shape.clone());
            list.extend((0..n_layer).map(of_layer));
        }
        list
    }

    /// A table has a column for each kind of tensor: one type for all layers, or the bits of each.
    fn expect(table: &str, tensors: &Tensors, arch: ArchFacts) {
        let mut lines = table.lines();
        let kinds: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
        for line in lines {
            let cells: Vec<&str> = line.split_whitespace().collect();
            assert_eq!(cells.len(), kinds.len(), "{line}");
            let mix = Mix::from_name(cells[0]).unwrap();
            let chosen = mix.choose(tensors, &arch);
            for (kind, want) in kinds.iter().zip(&cells).skip(1) {
                let of_kind = |name: &str| name.rsplit('.').nth(1) == Some(*kind);
                let pairs = tensors.iter().zip(&chosen).filter(|pair| of_kind(&pair.0.0));
                let got: Vec<&str> = pairs.map(|pair| pair.1.name()).collect();
                let bits: String = got.iter().map(|name| &name[1..2]).collect();
                let equal = got.iter().all(|name| name == want) || bits == *want;
                assert!(equal, "{} {kind}: {got:?}, not {want}", cells[0]);
            }
            for (tensor, chosen) in tensors.iter().zip(&chosen).filter(|pair| pair.0.1[0] == 7) {
                assert_eq!(*chosen, DType::F32, "{}", tensor.0);
            }
        }
    }

    // All tables are what `llama_model_quantize` (llama.cpp of 2026) made of files with these
    // tensors.

    #[test]
    fn a_dense_model_is_stored_as_llama_cpp_does() {
        let table = "\
mix    token_embd output attn_k attn_v attn_output ffn_up ffn_down
f32    f32  f32  f32  f32  f32  f32  f32
f16    f16  f16  f16  f16  f16  f16  f16
bf16   bf16 bf16 bf16 bf16 bf16 bf16 bf16
q8_0   q8_0 q8_0 q8_0 q8_0 q8_0 q8_0 q8_0
q4_0   q4_0 q6_k q4_0 q4_0 q4_0 q4_0 q4_0
q4_1   q4_1 q6_k q4_1 q4_1 q4_1 q4_1 q4_1
q5_0   q5_0 q6_k q5_0 q5_0 q5_0 q5_0 q5_0
q5_1   q5_1 q6_k q5_1 q5_1 q5_1 q5_1 q5_1
q2_k   q2_k q6_k q2_k q4_k q3_k q2_k q3_k
q3_k_s q3_k q6_k q3_k q3_k q3_k q3_k q3_k
q3_k_m q3_k q6_k q3_k 55444444444444444444444444444444 q4_k q3_k 55444444444444444444444444444444
q3_k_l q3_k q6_k q3_k q5_k q5_k q3_k q5_k
q4_k_s q4_k q6_k q4_k 55554444444444444444444444444444 q4_k q4_k 55554444444444444444444444444444
q4_k_m q4_k q6_k q4_k 66664464464464464464464464466666 q4_k q4_k 66664464464464464464464464466666
q5_k_s q5_k q6_k q5_k q5_k q5_k q5_k q5_k
q5_k_m q5_k q6_k q5_k 66665565565565565565565565566666 q5_k q5_k 66665565565565565565565565566666
q6_k   q6_k q6_k q6_k q6_k q6_k q6_k q6_k";
        let kept = ["output_norm.weight", "blk.3.ffn_norm.weight", "blk.3.attn_q.bias"];
        let tensors = model(table, 32, 256, 512, &kept);
        expect(table, &tensors, ArchFacts { n_layer: 32, ..DENSE });
    }

    #[test]
    fn a_tied_embedding_is_stored_as_the_output() {
        let table = "\
mix    token_embd attn_v            ffn_down
q8_0   q8_0       q8_0              q8_0
q4_0   q6_k       q4_0              q4_0
q2_k   q6_k       q3_k              q3_k
q3_k_m q6_k       55444444444444444 54444444444444444
q4_k_s q6_k       55554444444444444 55444444444444444
q4_k_m q6_k       66446446446446666 66446446446446666
q5_k_m q6_k       66556556556556666 66556556556556666
q6_k   q6_k       q6_k              q6_k";
        let arch = ArchFacts { n_layer: 17, n_gqa: Some(2), ..DENSE };
        expect(table, &model(table, 17, 256, 512, &["output_norm.weight"]), arch);
    }

    #[test]
    fn beside_eight_experts_attention_gets_more_bits() {
        let table = "\
mix    output attn_k attn_v attn_output ffn_up_exps ffn_down_exps
q8_0   q8_0   q8_0   q8_0   q8_0        q8_0        q8_0
q4_0   q6_k   q8_0   q8_0   q4_0        q4_0        q4_0
q2_k   q6_k   q8_0   q8_0   q5_k        q2_k        q3_k
q3_k_s q6_k   q8_0   q8_0   q5_k        q3_k        q3_k
q3_k_m q6_k   q8_0   q8_0   q5_k        q3_k        q4_k
q3_k_l q6_k   q8_0   q8_0   q3_k        q3_k        q5_k
q4_k_s q6_k   q8_0   q8_0   q5_k        q4_k        54444444444
q4_k_m q6_k   q8_0   q8_0   q5_k        q4_k        64464464466
q5_k_s q6_k   q8_0   q8_0   q5_k        q5_k        q5_k
q5_k_m q6_k   q8_0   q8_0   q5_k        q5_k        65565565566
q6_k   q6_k   q8_0   q8_0   q6_k        q6_k        q6_k";
        let kept = ["blk.0.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight"];
        let arch = ArchFacts { n_layer: 11, n_expert: 8, ..DENSE };
        expect(table, &model(table, 11, 256, 256, &kept), arch);
    }

    #[test]
    fn with_experts_the_layer_is_read_from_the_name() {
        // Every other layer has experts and a shared one: a count would run ahead of the layers.
        let kinds = [&["ffn_down"][..], &["ffn_down_exps", "ffn_down_shexp"]];
        let name = |layer: usize, kind: &str| format!("blk.{layer}.{kind}.weight");
        let of_layer = |layer: usize| kinds[layer % 2].iter().map(move |kind| name(layer, kind));
        let tensors: Tensors =
            (0..16).flat_map(of_layer).map(|name| (name, vec![8, 256])).collect();
        let arch = ArchFacts { n_layer: 16, n_expert: 16, ..DENSE };
        for (tensor, chosen) in tensors.iter().zip(Mix::Q4KMedium.choose(&tensors, &arch)) {
            let layer = layer_of(&tensor.0).unwrap();
            let want = if [0, 1, 4, 7, 10, 13, 14, 15].contains(&layer) { Q6K } else { Q4K };
            assert_eq!(chosen, DType::Block(want), "{}", tensor.0);
        }
    }

    #[test]
    fn shared_values_of_a_70b_get_more_bits() {
        let table = "\
mix    attn_v
q4_0   q4_0
q2_k   q5_k
q3_k_s q5_k
q3_k_m q5_k
q4_k_s q5_k
q4_k_m 66666666665565565565565565565565565565565565565565565565565565565565566666666666
q6_k   q6_k";
        let arch = ArchFacts { n_layer: 80, n_gqa: Some(8), is_70b: true, ..DENSE };
        expect(table, &model(table, 80, 256, 512, &[]), arch);
    }

    #[test]
    fn rows_that_are_no_multiple_of_a_block_take_smaller_ones() {
        let table = "\
mix    output attn_k attn_v   attn_output ffn_down
q8_0   q8_0   q8_0   q8_0     q8_0        f16
q4_0   q8_0   q4_0   q4_0     q4_0        f16
q2_k   q8_0   q4_0   q5_0     q4_0        f16
q3_k_l q8_0   q4_0   q5_1     q5_1        f16
q4_k_m q8_0   q5_0   85585588 q5_0        f16
q5_k_s q8_0   q5_1   q5_1     q5_1        f16
q6_k   q8_0   q8_0   q8_0     q8_0        f16";
        expect(table, &model(table, 8, 96, 100, &[]), ArchFacts { n_layer: 8, ..DENSE });
    }

    #[test]
    fn the_small_matrices_of_mamba_fall_back_too() {
        let arch = ArchFacts { n_layer: 5, n_gqa: None, ..DENSE };
        let kept = ["blk.0.ssm_conv1d.weight", "blk.0.ssm_a", "blk.0.ssm_norm.weight"];
        let table = "\
mix    token_embd output ssm_x ssm_dt
q8_0   q8_0       q8_0   q8_0  q8_0
q2_k   q2_k       q6_k   q2_k  q4_0
q4_k_m q4_k       q6_k   q4_k  q5_0
q5_k_m q5_k       q6_k   q5_k  q5_1
q6_k   q6_k       q6_k   q6_k  q8_0";
        expect(table, &model(table, 5, 512, 160, &kept), arch);
        let table = "mix ssm_dt\nq8_0 f16\nq4_0 f16\nq4_k_m f16\nbf16 bf16";
        expect(table, &model(table, 12, 512, 48, &kept), arch);
    }

    #[test]
    fn a_matrix_of_one_row_stays_f32() {
        let tensors = [("blk.0.ffn_up.weight".to_string(), vec![1, 1, 256])];
        assert_eq!(Mix::Q4_0.choose(&tensors, &DENSE), [DType::F32]);
    }

    #[test]
    fn the_order_of_the_tensors_does_not_matter() {
        let head = "mix attn_v ffn_down output";
        let tensors = model(head, 32, 256, 512, &["output_norm.weight"]);
        let reversed: Tensors = tensors.iter().rev().cloned().collect();
        for mix in Mix::ALL.map(|entry| entry.0) {
            let arch = ArchFacts { n_layer: 32, ..DENSE };
            let mut chosen = mix.choose(&reversed, &arch);
            chosen.reverse();
            assert_eq!(chosen, mix.choose(&tensors, &arch), "{mix:?}");
        }
    }

    #[test]
    fn a_mix_is_found_by_its_name() {
        for name in Mix::ALL.map(|entry| entry.1) {
            assert_eq!(Mix::from_name(name).unwrap().name(), name);
        }
        assert_eq!(Mix::from_name("q4_k_m").map(Mix::file_type), Some(15));
        assert_eq!(Mix::from_name("q4_k"), None);
        let numbers: std::collections::BTreeSet<u32> = Mix::ALL.iter().map(|mix| mix.2).collect();
        assert_eq!(numbers.len(), Mix::ALL.len());
    }
}
