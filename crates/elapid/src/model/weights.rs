//! Parameters by name: their numbers, whether they are trained, and their adapter.
//!
//! Layers ask for a parameter and get a `Var`, or for a linear map and get its weight, bias and
//! adapter together. They do not know what is frozen, stored in 16 bits, or adapted.

use crate::error::Result;
use crate::files::TensorFile;
use crate::model::mixers::DeltaInit;
use crate::model::pages::{Pages, Paging};
use crate::model::params::{self, Order};
use crate::model::place::{Map, Part, Place};
pub use crate::ops::linear::Arithmetic;
use crate::ops::linear::{Adapter, Dropout, Linear, Magnitude, Norms, row_squares};
use crate::tape::{Tape, Var};
use crate::tensor::device::Device;
use crate::tensor::quant::BlockType;
use crate::tensor::rng::Rng;
use crate::tensor::{DType, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

#[derive(Clone, Copy, Debug)]
pub struct LinearIds {
    /// (d_out, d_in).
    pub weight: ParamId,
    /// (d_out).
    pub bias: Option<ParamId>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
    Constant(f32),
    /// `ln(column + 1)`: the decays of Mamba-1.
    LogColumn,
    /// `ln` of a uniform number between 1 and 16: the decays of Mamba-2.
    LogUniform,
    /// Inverse softplus of step sizes spread evenly in their logarithm.
    Delta(DeltaInit),
}

/// What a parameter is for, which decides its treatment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The right side of a linear map: kept as stored, decays.
    Matrix,
    /// The embedding: kept as stored.
    Embedding,
    /// Norms, biases, decays, convolutions: f32, no decay.
    Vector,
    /// Belongs to the model but is never trained.
    Buffer,
}

/// What the model wants of one parameter.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Unique name; where it is a part of a stored tensor, with the rows behind.
    pub name: String,
    pub shape: Vec<usize>,
    /// Where it is in a directory of its own family.
    pub stored: Part,
    pub init: Init,
    pub role: Role,
    /// The expert it is a part of.
    pub expert: Option<Arc<str>>,
}

impl Spec {
    pub fn place(&self) -> Place {
        Place { parts: vec![self.stored.clone()], map: Map::Same }
    }
}

#[derive(Clone)]
struct Param {
    name: String,
    role: Role,
    tensor: Tensor,
    /// Where its rows are in the tensor, if not in their places.
    order: Option<Order>,
    /// Whether it is a part of an expert.
    is_expert: bool,
    policy: Policy,
    adapter: Option<AdapterIds>,
}

/// What becomes of a parameter in training.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    /// Nothing, and nobody computes its gradient.
    Frozen,
    Trained,
    /// Its gradient is wanted, but it is made of other parameters.
    Derived,
}

#[derive(Clone)]
struct AdapterIds {
    a: ParamId,
    b: ParamId,
    scale: f32,
    /// The magnitudes, and the squares of the rows of the matrix.
    magnitude: Option<(ParamId, Tensor)>,
}

/// What `Weights::quantize` did, in tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantized {
    pub n_encoded: usize,
    /// Left in the blocks they were in.
    pub n_already: usize,
    /// Left as they were: their rows are no whole blocks.
    pub n_uneven: usize,
}

/// Where the random numbers of a training step come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    pub seed: u64,
    /// What tells steps and micro-batches apart.
    pub counter: u64,
}

pub struct AdapterTensors {
    /// (rank, d_in).
    pub a: Tensor,
    /// (d_out, rank).
    pub b: Tensor,
    /// (d_out), where lengths of rows are trained apart.
    pub magnitude: Option<Tensor>,
}

/// All parameters of a model, and of its adapters behind them.
#[derive(Clone)]
pub struct Weights {
    params: Vec<Param>,
    by_name: HashMap<String, ParamId>,
    /// Share of their input that adapters do not see while there is noise.
    dropout: f32,
    noise: Option<Noise>,
    arithmetic: Arithmetic,
    /// Where experts are loaded when they are chosen; their tensors are then on the CPU, in the
    /// file, and nobody reads them.
    pub(super) pages: Option<Arc<Pages>>,
}

impl Weights {
    fn from_tensors(
        specs: &[Spec],
        tensors: impl Iterator<Item = (Tensor, Option<Order>)>,
    ) -> Weights {
        let mut weights = Weights {
            params: Vec::new(),
            by_name: HashMap::new(),
            dropout: 0.0,
            noise: None,
            arithmetic: Arithmetic::Exact,
            pages: None,
        };
        for (spec, (tensor, order)) in specs.iter().zip(tensors) {
            let id = weights.add(spec.name.clone(), spec.role, tensor, Policy::Frozen);
            let param = &mut weights.params[id.0];
            (param.order, param.is_expert) = (order, spec.expert.is_some());
        }
        weights
    }

    fn add(&mut self, name: String, role: Role, tensor: Tensor, policy: Policy) -> ParamId {
        let id = ParamId(self.params.len());
        self.by_name.insert(name.clone(), id);
        let (order, is_expert, adapter) = (None, false, None);
        self.params.push(Param { name, role, tensor, order, is_expert, policy, adapter });
        id
    }

    /// Fresh parameters from a seed. Each number depends on seed, parameter and place alone.
    pub fn init(device: &Device, specs: &[Spec], seed: u64) -> Weights {
        let tensors = specs.iter().enumerate().map(|(idx, spec)| {
            // On the CPU, whatever the device: the same numbers everywhere.
            let mut tensor = Tensor::uninit(&device.host_device(), &spec.shape);
            fill(&mut tensor, spec.init, &Rng::new(seed, idx as u64));
            (tensor.to(device), None)
        });
        Weights::from_tensors(specs, tensors)
    }

    /// Parameters from files, at these places. Matrices stay where they are, in the dtype they are
    /// stored in, also where the file has their rows in another order: on the CPU linear maps then
    /// put their results in order.
    ///
    /// Every tensor asked for must be there in its shape, and every tensor there must be asked for,
    /// but for those of `ignored`.
    pub fn load(
        device: &Device,
        specs: &[Spec],
        places: &[Place],
        files: &[&dyn TensorFile],
        ignored: &[&str],
    ) -> Result<Weights> {
        let tensors = params::read_all(&device.host_device(), specs, places, files, ignored)?;
        let mut weights = Weights::from_tensors(specs, tensors.into_iter());
        weights.move_to(device);
        device.check()?;
        Ok(weights)
    }

    /// The same for generation, on another device: experts are loaded when they are chosen.
    pub fn paged(mut self, device: &Device, paging: &Paging) -> Result<Weights> {
        let matrix = |id: ParamId| {
            let param = &self.params[id.0];
            param.order.is_none().then(|| param.tensor.clone())
        };
        self.pages = Some(Arc::new(Pages::new(device, paging, matrix)?));
        self.move_to(device);
        device.check()?;
        Ok(self)
    }

    /// The same with the rows of every matrix in their places, as training wants them.
    pub fn in_order(mut self) -> Weights {
        self.ids().for_each(|id| self.put_in_order(id));
        self
    }

    /// Copies a matrix whose rows are not in their places.
    fn put_in_order(&mut self, id: ParamId) {
        let param = &mut self.params[id.0];
        if let Some(order) = param.order.take() {
            param.tensor = param.tensor.gather(&order);
        }
    }

    /// The same numbers under the same names, frozen: tensors share their bytes, and what is
    /// adapted in one is not in the other.
    pub fn share(&self) -> Weights {
        let mut weights = Weights { dropout: 0.0, noise: None, ..self.clone() };
        weights.params.iter_mut().for_each(|param| param.policy = Policy::Frozen);
        weights
    }

    /// Whether a pass without noise computes the same with both, because they are the same tensors.
    pub(crate) fn is_same(&self, other: &Weights) -> bool {
        let is_same = |(a, b): (&Param, &Param)| {
            let scales = [a, b].map(|param| param.adapter.as_ref().map(|it| it.scale.to_bits()));
            a.tensor.memory_id() == b.tensor.memory_id() && scales[0] == scales[1]
        };
        self.params.len() == other.params.len()
            && self.arithmetic == other.arithmetic
            && self.params.iter().zip(&other.params).all(is_same)
    }

    /// The same on another device; what is there already is shared.
    pub fn to(&self, device: &Device) -> Weights {
        let mut weights = self.clone();
        weights.move_to(device);
        weights
    }

    /// The same in the memory of the host, as soon as it is there.
    pub async fn read_to_host(&self) -> Weights {
        let host = self.device().host_device();
        let mut weights = self.clone();
        for param in &mut weights.params {
            param.tensor = param.tensor.read_to(&host).await;
            if let Some((_, squares)) = param.adapter.as_mut().and_then(|it| it.magnitude.as_mut())
            {
                *squares = squares.read_to(&host).await;
            }
        }
        weights
    }

    fn move_to(&mut self, device: &Device) {
        let pages = self.pages.clone();
        let is_paged = |idx| pages.as_ref().is_some_and(|pages| pages.has(ParamId(idx)));
        for (_, param) in self.params.iter_mut().enumerate().filter(|(idx, _)| !is_paged(*idx)) {
            // Only products on the CPU put their results in order.
            if let Device::Gpu(_) = device
                && let Some(order) = param.order.take()
            {
                param.tensor = param.tensor.gather(&order);
            }
            param.tensor = param.tensor.to(device);
            if let Some((_, squares)) = param.adapter.as_mut().and_then(|it| it.magnitude.as_mut())
            {
                *squares = squares.to(device);
            }
        }
    }

    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.params.len()).map(ParamId)
    }

    pub fn name(&self, id: ParamId) -> &str {
        &self.params[id.0].name
    }

    pub fn role(&self, id: ParamId) -> Role {
        self.params[id.0].role
    }

    /// Whether it is a matrix of an expert.
    pub fn is_expert(&self, id: ParamId) -> bool {
        self.params[id.0].is_expert
    }

    /// Its numbers; after `load`, its rows in the order of the file.
    pub fn tensor(&self, id: ParamId) -> &Tensor {
        &self.params[id.0].tensor
    }

    /// Its numbers, to change. Only what is trained has numbers of its own.
    pub fn tensor_mut(&mut self, id: ParamId) -> &mut Tensor {
        self.put_in_order(id);
        &mut self.params[id.0].tensor
    }

    /// The numbers of several, to change; ids in their order.
    pub fn tensors_mut(&mut self, ids: &[ParamId]) -> Vec<&mut Tensor> {
        ids.iter().for_each(|&id| self.put_in_order(id));
        let params = self.params.iter_mut().enumerate();
        let wanted = params.filter(|(idx, _)| ids.binary_search(&ParamId(*idx)).is_ok());
        wanted.map(|(_, param)| &mut param.tensor).collect()
    }

    pub fn is_trained(&self, id: ParamId) -> bool {
        self.params[id.0].policy == Policy::Trained
    }

    /// Whether one of these, or an adapter of one, wants a gradient.
    pub fn any_trained(&self, mut ids: Range<usize>) -> bool {
        ids.any(|id| {
            let param = &self.params[id];
            let of_adapter = |ids: &AdapterIds| {
                let m = ids.magnitude.as_ref().map(|magnitude| magnitude.0);
                [ids.a, ids.b].into_iter().chain(m).any(|id| self.is_trained(id))
            };
            param.policy != Policy::Frozen || param.adapter.as_ref().is_some_and(of_adapter)
        })
    }

    pub fn trained(&self) -> Vec<ParamId> {
        self.ids().filter(|&id| self.is_trained(id)).collect()
    }

    pub fn n_elem(&self) -> usize {
        self.params.iter().map(|param| param.tensor.n_elem()).sum()
    }

    /// Trains every parameter that `wanted` says yes to, freezes the others; returns how many.
    ///
    /// What is trained gets f32 numbers of its own; what is frozen stays as it is.
    pub fn train(&mut self, wanted: impl Fn(&str, Role) -> bool) -> usize {
        self.ids().for_each(|id| self.put_in_order(id));
        let mut n_trained = 0;
        for param in &mut self.params {
            let trained = param.role != Role::Buffer && wanted(&param.name, param.role);
            param.policy = if trained { Policy::Trained } else { Policy::Frozen };
            if trained {
                n_trained += 1;
                if !param.tensor.is_unique() || param.tensor.dtype() != DType::F32 {
                    param.tensor = param.tensor.to_f32();
                }
            }
        }
        n_trained
    }

    /// Encodes in blocks, in memory, the frozen matrices and embeddings that `wanted` says yes to.
    ///
    /// What is in blocks already stays as it is: to encode it again would add to its error.
    pub fn quantize(&mut self, block: BlockType, wanted: impl Fn(&str, Role) -> bool) -> Quantized {
        let mut counts = Quantized::default();
        for param in &mut self.params {
            let is_table = matches!(param.role, Role::Matrix | Role::Embedding);
            if param.policy != Policy::Frozen || !is_table || !wanted(&param.name, param.role) {
                continue;
            }
            let (_, n_cols) = param.tensor.dims2();
            if matches!(param.tensor.dtype(), DType::Block(_)) {
                counts.n_already += 1;
            } else if !n_cols.is_multiple_of(block.n_elem()) {
                counts.n_uneven += 1;
            } else {
                param.tensor = encoded(&param.tensor, block);
                counts.n_encoded += 1;
            }
        }
        counts
    }

    /// Adds a trained parameter behind all others.
    pub fn push(&mut self, name: &str, role: Role, tensor: Tensor) -> ParamId {
        self.add(name.into(), role, tensor.to(self.device()), Policy::Trained)
    }

    /// From now on the parameter is made of others: it has a gradient, and no optimizer.
    pub fn derive(&mut self, id: ParamId) {
        self.params[id.0].policy = Policy::Derived;
    }

    /// A hash of everything that is frozen: names, shapes and bytes.
    pub fn frozen_hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for param in self.params.iter().filter(|param| param.policy == Policy::Frozen) {
            let (shape, dtype) = (param.tensor.shape(), param.tensor.dtype().name());
            let head = format!("{} {shape:?} {dtype}\n", param.name);
            hasher.update(head.as_bytes());
            hasher.update_rayon(&param.tensor.to_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// What the product of an adapter's halves is multiplied by, if the matrix has one.
    pub fn adapter_factor(&self, id: ParamId) -> Option<f32> {
        self.params[id.0].adapter.as_ref().map(|ids| ids.scale)
    }

    /// The adapter of a matrix, if it has one, on the CPU: as files have it.
    pub fn adapter_of(&self, id: ParamId) -> Option<AdapterTensors> {
        let ids = self.params[id.0].adapter.as_ref()?;
        let host = self.device().host_device();
        let at_hand = |id: ParamId| self.tensor(id).to(&host);
        let magnitude = ids.magnitude.as_ref().map(|magnitude| at_hand(magnitude.0));
        let [a, b] = [ids.a, ids.b].map(at_hand);
        Some(AdapterTensors { a, b, magnitude })
    }

    pub fn device(&self) -> &Device {
        self.params.first().expect("a model has parameters").tensor.device()
    }

    /// Adds a low-rank adapter to a matrix; its two halves become parameters of these names.
    pub fn adapt(&mut self, id: ParamId, names: [String; 2], halves: [Tensor; 2], scale: f32) {
        let [d_out, d_in] = self.params[id.0].tensor.shape() else {
            panic!("an adapter on `{}`, which is no matrix", self.params[id.0].name)
        };
        let rank = halves[0].shape()[0];
        halves[0].expect_shape("adapter: a", &[rank, *d_in]);
        halves[1].expect_shape("adapter: b", &[*d_out, rank]);
        let device = self.device().clone();
        let mut half = |name: String, tensor: &Tensor| {
            self.add(name, Role::Matrix, tensor.to(&device), Policy::Frozen)
        };
        let [a_name, b_name] = names;
        let (a, b) = (half(a_name, &halves[0]), half(b_name, &halves[1]));
        self.params[id.0].adapter = Some(AdapterIds { a, b, scale, magnitude: None });
    }

    /// Brings the rows of an adapted matrix to lengths, which become a parameter of this name:
    /// those given, or those they have without the adapter.
    pub fn add_magnitude(&mut self, id: ParamId, name: String, lengths: Option<Tensor>) {
        self.put_in_order(id);
        let squares = match &self.pages {
            Some(pages) if pages.has(id) => row_squares(&pages.fetch(&[id])[0][pages.place(id)]),
            _ => row_squares(&self.params[id.0].tensor),
        };
        let tensor = lengths.unwrap_or_else(|| {
            let lengths: Vec<f32> = squares.to_vec().iter().map(|x| x.sqrt()).collect();
            Tensor::from_f32(squares.device(), squares.shape(), &lengths)
        });
        let tensor = tensor.to(squares.device());
        tensor.expect_shape("adapter: magnitude", squares.shape());
        let m = self.add(name, Role::Vector, tensor, Policy::Frozen);
        let adapter = self.params[id.0].adapter.as_mut();
        adapter.expect("a magnitude stands beside an adapter").magnitude = Some((m, squares));
    }

    /// The share of their input that adapters do not see while there is noise: 0 to below 1.
    pub fn set_dropout(&mut self, rate: f32) {
        assert!((0.0..1.0).contains(&rate), "a dropout of {rate}");
        self.dropout = rate;
    }

    /// Noise for a training step; `None` for everything else.
    ///
    /// It is not the tape that decides: a checkpointed span runs first on one that is off, and must
    /// see what it will see when it runs again.
    pub fn set_noise(&mut self, noise: Option<Noise>) {
        self.noise = noise;
    }

    /// How products are computed where nothing is recorded: exactly, unless told otherwise.
    pub fn set_arithmetic(&mut self, arithmetic: Arithmetic) {
        self.arithmetic = arithmetic;
    }

    pub fn var(&self, tape: &Tape, id: ParamId) -> Var {
        let param = &self.params[id.0];
        match param.policy {
            Policy::Frozen => Var::constant(param.tensor.clone()),
            Policy::Trained | Policy::Derived => tape.leaf(id.0, &param.tensor),
        }
    }

    pub fn linear(&self, tape: &Tape, ids: &LinearIds) -> Linear {
        let param = &self.params[ids.weight.0];
        Linear {
            order: param.order.clone(),
            bias: ids.bias.map(|bias| self.var(tape, bias)),
            adapter: param.adapter.as_ref().map(|it| self.adapter(tape, ids.weight, it)),
            arithmetic: self.arithmetic,
            ..Linear::from(self.var(tape, ids.weight))
        }
    }

    fn adapter(&self, tape: &Tape, weight: ParamId, ids: &AdapterIds) -> Adapter {
        let noise = self.noise.filter(|_| self.dropout > 0.0);
        Adapter {
            a: self.var(tape, ids.a),
            b: self.var(tape, ids.b),
            scale: ids.scale,
            dropout: noise.map(|Noise { seed, counter }| Dropout {
                rate: self.dropout,
                seed,
                stream: weight.0 as u64,
                counter,
            }),
            magnitude: ids.magnitude.as_ref().map(|(m, squares)| Magnitude {
                m: self.var(tape, *m),
                norms: Norms::Followed(squares.clone()),
            }),
        }
    }
}

fn encoded(tensor: &Tensor, block: BlockType) -> Tensor {
    const N_ROWS: usize = 64;
    let device = tensor.device();
    let cpu = device.host();
    let tensor = tensor.to(&device.host_device());
    let (n_rows, n_cols) = tensor.dims2();
    let row_bytes = n_cols / block.n_elem() * block.n_bytes();
    let pieces = cpu.map((0..n_rows).step_by(N_ROWS).collect(), |row: usize| {
        let n = N_ROWS.min(n_rows - row);
        let (mut x, mut bytes) = (vec![0.0; n * n_cols], vec![0; n * row_bytes]);
        tensor.read_f32(row * n_cols, &mut x);
        block.encode(&x, &mut bytes);
        bytes
    });
    let bytes = Arc::new(pieces.concat());
    Tensor::from_shared(device, tensor.shape(), DType::Block(block), bytes, 0)
}

fn fill(tensor: &mut Tensor, init: Init, rng: &Rng) {
    let (_, n_cols) = tensor.dims2();
    let cpu = tensor.device().expect_cpu().clone();
    let number = |n: usize| -> f32 {
        let uniform = || rng.uniform(n as u64);
        match init {
            Init::Normal(std) => (rng.normal(n as u64) * std as f64) as f32,
            Init::Uniform(bound) => ((2.0 * uniform() - 1.0) * bound as f64) as f32,
            Init::Constant(value) => value,
            Init::LogColumn => ((n % n_cols + 1) as f64).ln() as f32,
            Init::LogUniform => (1.0 + 15.0 * uniform()).ln() as f32,
            Init::Delta(DeltaInit { min, max, floor }) => {
                let (low, high) = ((min as f64).ln(), (max as f64).ln());
                let delta = (low + (high - low) * uniform()).exp().max(floor as f64);
                // softplus(x) = delta, solved without cancellation.
                (delta + (-(-delta).exp_m1()).ln()) as f32
            }
        }
    };
    const PIECE: usize = 1 << 12;
    cpu.each_piece(tensor.f32_mut(), PIECE, |idx, piece| {
        piece.iter_mut().enumerate().for_each(|(n, x)| *x = number(idx * PIECE + n));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear::linear;
    use crate::tape::Gradients;

    const NAMES: [&str; 4] = ["x.weight", "y.weight", "uneven.weight", "norm"];

    fn weights(device: &Device) -> Weights {
        let spec = |name: &str, shape: &[usize], role: Role| Spec {
            name: name.into(),
            shape: shape.to_vec(),
            stored: Part { name: name.into(), shape: shape.to_vec(), rows: None },
            init: Init::Normal(0.5),
            role,
            expert: None,
        };
        let specs = [
            spec(NAMES[0], &[70, 64], Role::Matrix),
            spec(NAMES[1], &[64, 70], Role::Embedding),
            spec(NAMES[2], &[4, 70], Role::Matrix),
            spec(NAMES[3], &[64], Role::Vector),
        ];
        Weights::init(device, &specs, 1)
    }

    #[test]
    fn quantising_encodes_what_it_can_and_counts_the_rest() {
        let device = Device::cpu(2).unwrap();
        let mut weights = weights(&device);
        let exact = weights.tensor(ParamId(0)).clone();
        weights.train(|name, _| name == NAMES[3]);
        let counts = weights.quantize(BlockType::Nf4, |_, _| true);
        assert_eq!(counts, Quantized { n_encoded: 1, n_already: 0, n_uneven: 2 });
        let stored = weights.tensor(ParamId(0));
        assert_eq!(stored.dtype(), DType::Block(BlockType::Nf4));
        let mut bytes = vec![0; 70 * 36];
        BlockType::Nf4.encode(exact.f32(), &mut bytes);
        assert_eq!(stored.bytes(), bytes);
        assert_eq!(weights.tensor(ParamId(3)).dtype(), DType::F32);
        let counts = weights.quantize(BlockType::Q8_0, |name, _| name == NAMES[0]);
        assert_eq!(counts, Quantized { n_encoded: 0, n_already: 1, n_uneven: 0 });
        assert_eq!(weights.tensor(ParamId(0)).bytes(), bytes);
    }

    fn adapted(device: &Device) -> (Weights, LinearIds) {
        let mut weights = weights(device);
        let id = ParamId(0);
        let half = |seed: u64, shape: &[usize]| {
            let mut half = Tensor::uninit(device, shape);
            fill(&mut half, Init::Normal(0.1), &Rng::new(seed, 0));
            half
        };
        let halves = [half(1, &[2, 64]), half(2, &[70, 2])];
        weights.adapt(id, ["a".into(), "b".into()], halves, 2.0);
        weights.add_magnitude(id, "m".into(), None);
        (weights, LinearIds { weight: id, bias: None })
    }

    #[test]
    fn a_magnitude_begins_at_the_lengths_of_the_rows_and_is_trained_by_its_name() {
        let device = Device::cpu(1).unwrap();
        let (mut weights, _) = adapted(&device);
        let m = weights.find("m").unwrap();
        for (row, m) in weights.tensor(ParamId(0)).f32().chunks(64).zip(weights.tensor(m).f32()) {
            let length = row.iter().map(|w| w * w).sum::<f32>().sqrt();
            assert!((length - m).abs() < 1e-5);
        }
        assert!(!weights.any_trained(0..1));
        assert_eq!(weights.train(|name, role| name == "m" && role == Role::Vector), 1);
        assert!(weights.any_trained(0..1));
    }

    /// The result of the adapted map, and the gradient of its halves, plain or checkpointed.
    fn run(weights: &Weights, ids: &LinearIds, checkpointed: bool) -> Vec<Vec<f32>> {
        let device = weights.tensor(ParamId(0)).device().clone();
        let x = Tensor::from_f32(&device, &[5, 64], &[0.5; 5 * 64]);
        let tape = Tape::new();
        let x = tape.leaf(usize::MAX / 2, &x);
        let span = |tape: &Tape, x: &[Var]| vec![linear(tape, &x[0], &weights.linear(tape, ids))];
        let y = match checkpointed {
            true => tape.checkpoint(&[&x], span).pop().unwrap(),
            false => span(&tape, &[x]).pop().unwrap(),
        };
        let mut out = vec![y.value().f32().to_vec()];
        let mut grads = Gradients::default();
        let dy = Tensor::from_f32(&device, &[5, 70], &[0.25; 5 * 70]);
        tape.walk(vec![(y, dy)], &mut grads);
        out.extend(grads.iter().map(|(_, grad)| grad.f32().to_vec()));
        out
    }

    #[test]
    fn dropout_follows_the_noise_alone_and_is_the_same_in_a_checkpointed_span() {
        let device = Device::cpu(2).unwrap();
        let (mut weights, ids) = adapted(&device);
        weights.train(|name, _| ["a", "b", "m"].contains(&name));
        let quiet = run(&weights, &ids, false);
        assert_eq!(quiet.len(), 5, "a result, and gradients of x, a, b and m");
        weights.set_dropout(0.5);
        assert!(run(&weights, &ids, false) == quiet, "no noise, no dropout");
        weights.set_noise(Some(Noise { seed: 1, counter: 1 }));
        let noisy = run(&weights, &ids, false);
        assert!(noisy != quiet);
        assert!(run(&weights, &ids, true) == noisy, "the span saw another mask the second time");
        weights.set_noise(Some(Noise { seed: 1, counter: 2 }));
        assert!(run(&weights, &ids, false) != noisy, "another step, another mask");
        weights.set_noise(None);
        assert!(run(&weights, &ids, true) == quiet);
    }
}
