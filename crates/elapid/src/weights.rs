//! Parameters by name: their numbers, whether they are trained, and their adapter.
//!
//! Layers ask for a parameter and get a `Var`, or for a linear map and get its weight, bias and
//! adapter together. They do not know what is frozen, stored in 16 bits, or adapted.

use crate::config::DeltaInit;
use crate::device::Device;
use crate::error::Result;
use crate::formats::{TensorFile, params};
use crate::ops::linear::{Adapter, Linear};
use crate::place::{Map, Part, Place};
use crate::rng::Rng;
use crate::tape::{Tape, Var};
use crate::tensor::{DType, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// A parameter, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// A linear map's parameters.
#[derive(Clone, Copy, Debug)]
pub struct LinearIds {
    /// (d_out, d_in).
    pub weight: ParamId,
    /// (d_out).
    pub bias: Option<ParamId>,
}

/// How a fresh parameter is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with this deviation.
    Normal(f32),
    /// Uniform between minus and plus this.
    Uniform(f32),
    /// All this.
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
    /// Shape in the engine.
    pub shape: Vec<usize>,
    /// Tensor in the file that holds it.
    pub stored_name: String,
    /// Shape of that tensor.
    pub stored_shape: Vec<usize>,
    /// Rows of that tensor, all axes but the last taken together; `None`: all of it.
    pub stored_rows: Option<Range<usize>>,
    /// How it begins in training from scratch.
    pub init: Init,
    /// What it is for.
    pub role: Role,
}

impl Spec {
    /// Its place in a directory of its own family.
    pub fn place(&self) -> Place {
        let (name, shape) = (self.stored_name.clone(), self.stored_shape.clone());
        let part = Part { name, shape, rows: self.stored_rows.clone() };
        Place { parts: vec![part], map: Map::Same }
    }
}

struct Param {
    name: String,
    role: Role,
    tensor: Tensor,
    trained: bool,
    adapter: Option<AdapterIds>,
}

#[derive(Clone, Copy)]
struct AdapterIds {
    a: ParamId,
    b: ParamId,
    scale: f32,
}

/// All parameters of a model, and of its adapters behind them.
pub struct Weights {
    params: Vec<Param>,
    by_name: HashMap<String, ParamId>,
}

impl Weights {
    fn from_tensors(specs: &[Spec], tensors: impl Iterator<Item = Tensor>) -> Weights {
        let params: Vec<Param> = specs
            .iter()
            .zip(tensors)
            .map(|(spec, tensor)| Param {
                name: spec.name.clone(),
                role: spec.role,
                tensor,
                trained: false,
                adapter: None,
            })
            .collect();
        let by_name = |(idx, param): (usize, &Param)| (param.name.clone(), ParamId(idx));
        let by_name = params.iter().enumerate().map(by_name).collect();
        Weights { params, by_name }
    }

    /// Fresh parameters from a seed. Each number depends on seed, parameter and place alone.
    pub fn init(device: &Device, specs: &[Spec], seed: u64) -> Weights {
        let tensors = specs.iter().enumerate().map(|(idx, spec)| {
            let mut tensor = Tensor::uninit(device, &spec.shape);
            fill(&mut tensor, spec.init, &Rng::new(seed, idx as u64));
            tensor
        });
        Weights::from_tensors(specs, tensors)
    }

    /// Parameters from files. Matrices stay where they are, in the dtype they are stored in.
    ///
    /// `places` says where each is. Every tensor asked for must be there in its shape, and every
    /// tensor there must be asked for, but for those of `ignored`.
    pub fn load(
        device: &Device,
        specs: &[Spec],
        places: &[Place],
        files: &[&dyn TensorFile],
        ignored: &[&str],
    ) -> Result<Weights> {
        let tensors = params::read_all(device, specs, places, files, ignored)?;
        Ok(Weights::from_tensors(specs, tensors.into_iter()))
    }

    /// The parameter of this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }

    /// All parameters in order.
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.params.len()).map(ParamId)
    }

    /// Its name.
    pub fn name(&self, id: ParamId) -> &str {
        &self.params[id.0].name
    }

    /// What it is for.
    pub fn role(&self, id: ParamId) -> Role {
        self.params[id.0].role
    }

    /// Its numbers.
    pub fn tensor(&self, id: ParamId) -> &Tensor {
        &self.params[id.0].tensor
    }

    /// Its numbers, to change. Only what is trained has numbers of its own.
    pub fn tensor_mut(&mut self, id: ParamId) -> &mut Tensor {
        &mut self.params[id.0].tensor
    }

    /// Whether it is trained.
    pub fn is_trained(&self, id: ParamId) -> bool {
        self.params[id.0].trained
    }

    /// Whether one of these, or an adapter of one, is trained.
    pub fn any_trained(&self, mut ids: Range<usize>) -> bool {
        ids.any(|id| {
            let adapter = self.params[id].adapter;
            let of_adapter = |a: AdapterIds| self.is_trained(a.a) || self.is_trained(a.b);
            self.params[id].trained || adapter.is_some_and(of_adapter)
        })
    }

    /// Trained parameters in order.
    pub fn trained(&self) -> Vec<ParamId> {
        self.ids().filter(|&id| self.is_trained(id)).collect()
    }

    /// Numbers in all parameters.
    pub fn n_elem(&self) -> usize {
        self.params.iter().map(|param| param.tensor.n_elem()).sum()
    }

    /// Trains every parameter that `wanted` says yes to, freezes the others; returns how many.
    ///
    /// What is trained gets f32 numbers of its own; what is frozen stays as it is.
    pub fn train(&mut self, wanted: impl Fn(&str, Role) -> bool) -> usize {
        let mut n_trained = 0;
        for param in &mut self.params {
            param.trained = param.role != Role::Buffer && wanted(&param.name, param.role);
            if param.trained {
                n_trained += 1;
                if !param.tensor.is_unique() || param.tensor.dtype() != DType::F32 {
                    param.tensor = param.tensor.to_f32();
                }
            }
        }
        n_trained
    }

    /// Adds a low-rank adapter to a matrix; its two halves become parameters of these names.
    pub fn adapt(&mut self, id: ParamId, names: [String; 2], halves: [Tensor; 2], scale: f32) {
        let [d_out, d_in] = self.params[id.0].tensor.shape() else {
            panic!("an adapter on `{}`, which is no matrix", self.params[id.0].name)
        };
        let rank = halves[0].shape()[0];
        halves[0].expect_shape("adapter: a", &[rank, *d_in]);
        halves[1].expect_shape("adapter: b", &[*d_out, rank]);
        let first = self.params.len();
        for (name, tensor) in names.into_iter().zip(halves) {
            self.by_name.insert(name.clone(), ParamId(self.params.len()));
            let role = Role::Matrix;
            self.params.push(Param { name, role, tensor, trained: false, adapter: None });
        }
        let adapter = AdapterIds { a: ParamId(first), b: ParamId(first + 1), scale };
        self.params[id.0].adapter = Some(adapter);
    }

    /// The parameter as a value of a computation.
    pub fn var(&self, tape: &Tape, id: ParamId) -> Var {
        let param = &self.params[id.0];
        if param.trained {
            tape.leaf(id.0, &param.tensor)
        } else {
            Var::constant(param.tensor.clone())
        }
    }

    /// Weight, bias and adapter of a linear map.
    pub fn linear(&self, tape: &Tape, ids: &LinearIds) -> Linear {
        let adapter = self.params[ids.weight.0].adapter.map(|adapter| Adapter {
            a: self.var(tape, adapter.a),
            b: self.var(tape, adapter.b),
            scale: adapter.scale,
        });
        Linear {
            weight: self.var(tape, ids.weight),
            bias: ids.bias.map(|bias| self.var(tape, bias)),
            adapter,
        }
    }
}

fn fill(tensor: &mut Tensor, init: Init, rng: &Rng) {
    let (_, n_cols) = tensor.dims2();
    let Device::Cpu(cpu) = tensor.device().clone();
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
