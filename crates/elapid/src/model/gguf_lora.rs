//! LoRA adapters as llama.cpp reads them: a GGUF file with `general.type` "adapter".
//!
//! Beside each tensor of the base lie `<tensor>.lora_a` (rank, d_in) and `<tensor>.lora_b` (d_out,
//! rank), by the names and maps of `config/gguf`: what moves or scales the rows of a matrix does
//! the same to the rows of B; where a parameter is cut in two, both parts have the same A.
//!
//! The factor is `adapter.lora.alpha / rank`, with one alpha for the whole file. A module whose
//! factor is another has the difference multiplied into its B. llama.cpp takes an alpha of zero for
//! a factor of one, so zero is never written.
//!
//! Not here: embeddings, experts, magnitudes (DoRA), activated adapters (aLoRA). They are refused
//! by name.

use super::lora::{Lora, Module, halves_problem, most_common};
use crate::error::{Error, Result};
use crate::files::gguf::{Gguf, Item};
use crate::files::{Outgoing, TensorFile};
use crate::model::Model;
use crate::model::config::gguf::{Arch, names};
use crate::model::place::{Map, Part, Place};
use crate::model::weights::{Role, Spec};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

const TYPE: &str = "general.type";
const ARCHITECTURE: &str = "general.architecture";
const ADAPTER_TYPE: &str = "adapter.type";
const ALPHA: &str = "adapter.lora.alpha";
const INVOCATION: &str = "adapter.alora.invocation_tokens";
const BASE_NAME: &str = "general.base_model.0.name";
const HALVES: [&str; 2] = [".lora_a", ".lora_b"];

pub fn is_adapter(gguf: &Gguf) -> bool {
    matches!(gguf.str(TYPE), Ok(Some("adapter")))
}

/// The base's parameters and their places in GGUF.
struct Base<'a> {
    arch: Arch,
    specs: &'a [Spec],
    places: Vec<Place>,
}

impl Base<'_> {
    fn new(model: &Model) -> Result<Base<'_>> {
        let arch = Arch::of(model.config())?;
        let places = names(model.config(), arch, model.specs())?.places;
        Ok(Base { arch, specs: model.specs(), places })
    }

    /// Why the parameter cannot have an adapter here.
    fn problem(&self, idx: usize) -> Option<&'static str> {
        let (spec, place) = (&self.specs[idx], &self.places[idx]);
        let is_expert = |part: &Part| part.rows.is_some() || part.shape.len() > 2;
        match spec.role {
            Role::Embedding => Some("adapters of embeddings are not supported"),
            Role::Vector | Role::Buffer => Some("it is no matrix of a linear map"),
            Role::Matrix if place.parts.iter().any(is_expert) => {
                Some("adapters of experts are not supported")
            }
            Role::Matrix if place.parts.iter().any(|part| part.shape.len() != 2) => {
                Some("it is stored as a vector")
            }
            Role::Matrix if place.map == Map::NegExp => Some("its numbers are stored mapped"),
            Role::Matrix => None,
        }
    }
}

/// Metadata and tensors of a file, for `gguf::write`.
pub type File<'a> = (Vec<(String, Item)>, Vec<Outgoing<'a>>);

/// The adapter file of an adapter of this base model.
pub fn write<'a>(lora: &'a Lora, model: &Model) -> Result<File<'a>> {
    let base = Base::new(model)?;
    let alpha = alpha_of_file(lora)?;
    let by_name: HashMap<&str, usize> =
        base.specs.iter().enumerate().map(|(idx, spec)| (spec.name.as_str(), idx)).collect();
    let mut tensors = Vec::new();
    for module in &lora.modules {
        let refuse = |problem: &str| {
            let problem = format!("`{}`: {problem}", module.param);
            Error::input(problem, "keep this adapter as a PEFT directory")
        };
        let idx = by_name.get(module.param.as_str());
        let idx = *idx.ok_or_else(|| refuse("the base model has no such matrix"))?;
        if let Some(problem) = base.problem(idx) {
            return Err(refuse(problem));
        }
        if module.magnitude.is_some() {
            return Err(refuse("GGUF has no magnitudes (DoRA)"));
        }
        if let Some(problem) = halves_problem(&module.a, &module.b, &base.specs[idx].shape) {
            return Err(refuse(&problem));
        }
        let wanted = effective_alpha(lora, module) as f32;
        let fold = if wanted == alpha { 1.0 } else { wanted / alpha };
        tensors.extend(module_tensors(module, &base.places[idx], fold));
    }
    Ok((metadata(lora, base.arch, alpha), tensors))
}

fn metadata(lora: &Lora, arch: Arch, alpha: f32) -> Vec<(String, Item)> {
    let text = |key: &str, value: &str| (key.to_string(), Item::Str(value.into()));
    let mut list = vec![
        text(ARCHITECTURE, arch.name()),
        text(TYPE, "adapter"),
        text(ADAPTER_TYPE, "lora"),
        (ALPHA.to_string(), Item::F32(alpha)),
    ];
    if let Some(base) = &lora.base {
        list.push(("general.base_model.count".into(), Item::U32(1)));
        list.push(text(BASE_NAME, base));
    }
    list
}

/// The alpha of a factor `alpha / rank`.
fn effective_alpha(lora: &Lora, module: &Module) -> f64 {
    let rank = module.rank() as f64;
    // Without a square root nothing is rounded.
    if lora.rslora { lora.factor(module) * rank } else { module.alpha }
}

/// The alpha that most modules have: their B stays as it is.
fn alpha_of_file(lora: &Lora) -> Result<f32> {
    let alpha = |module: &Module| {
        let alpha = effective_alpha(lora, module) as f32;
        alpha.is_finite().then_some(alpha.to_bits()).ok_or_else(|| {
            let problem = format!("`{}`: alpha {} is too large", module.param, module.alpha);
            Error::input(problem, "the adapter may be damaged")
        })
    };
    let alphas = lora.modules.iter().map(alpha).collect::<Result<Vec<_>>>()?;
    let usable = alphas.into_iter().filter(|bits| f32::from_bits(*bits) != 0.0);
    Ok(most_common(usable).map_or(1.0, f32::from_bits))
}

fn module_tensors<'a>(module: &'a Module, place: &Place, fold: f32) -> Vec<Outgoing<'a>> {
    let (mut first, mut list) = (0, Vec::new());
    for part in &place.parts {
        let [a_name, b_name] = HALVES.map(|half| format!("{}{half}", part.name));
        let rows = first..first + part.shape[0];
        first = rows.end;
        let (shape, map) = ([rows.len(), module.rank()], place.map.clone());
        let b = move || mapped(&module.b, &map, fold).rows(rows.clone());
        list.push(outgoing_f32(a_name, module.a.shape(), || module.a.to_f32()));
        list.push(outgoing_f32(b_name, &shape, b));
    }
    list
}

fn outgoing_f32<'a>(name: String, shape: &[usize], make: impl Fn() -> Tensor + 'a) -> Outgoing<'a> {
    let bytes = Box::new(move || Ok(Cow::Owned(make().bytes().to_vec())));
    Outgoing { name, shape: shape.to_vec(), dtype: DType::F32, bytes }
}

fn mapped(b: &Tensor, map: &Map, fold: f32) -> Tensor {
    let (n_rows, rank) = b.dims2();
    let mut x = b.to_f32();
    match map.order(n_rows) {
        Some(order) => x = x.gather(&order),
        None => map.apply(x.f32_mut(), rank),
    }
    if fold != 1.0 {
        x.f32_mut().iter_mut().for_each(|x| *x *= fold);
    }
    x
}

/// B as the engine has it, from f32 of its own.
fn unmapped(mut x: Tensor, map: &Map) -> Tensor {
    let (n_rows, rank) = x.dims2();
    match map.order_back(n_rows) {
        Some(order) => x.gather(&order),
        None => {
            map.invert(x.f32_mut(), rank);
            x
        }
    }
}

pub fn read(device: &Device, gguf: &Gguf, model: &Model) -> Result<Lora> {
    // At hand, wherever the model is: it moves when it is attached.
    let device = &device.host_device();
    let base = Base::new(model)?;
    check_metadata(gguf, base.arch)?;
    let alpha = gguf.float(ALPHA)?.unwrap_or(0.0);
    if !(alpha as f32).is_finite() {
        let problem = format!("{alpha} is not a finite number");
        return Err(Error::config(gguf.file(), ALPHA, problem, "convert the adapter again"));
    }
    let mut modules = Vec::new();
    for (idx, parts) in found_parts(gguf, &base)? {
        let place = &base.places[idx];
        let halves = parts.iter().map(|&part| Half::read(device, gguf, &place.parts, part));
        let halves = halves.collect::<Result<Vec<_>>>()?;
        let n_rows = base.specs[idx].shape[0];
        let (a, b, alpha) = join(device, &halves, n_rows, alpha);
        let param = base.specs[idx].name.clone();
        let b = unmapped(b, &place.map);
        modules.push(Module { param, a, b, magnitude: None, alpha });
    }
    modules.sort_by(|a, b| a.param.cmp(&b.param));
    let of_base = gguf.str(BASE_NAME)?.map(str::to_string);
    Ok(Lora { modules, rslora: false, base: of_base })
}

fn check_metadata(gguf: &Gguf, arch: Arch) -> Result<()> {
    let file = gguf.file();
    for (key, want) in [(TYPE, "adapter"), (ADAPTER_TYPE, "lora")] {
        let got = gguf.str(key)?.unwrap_or("");
        if got != want {
            let problem = format!("is {got:?}, not {want:?}");
            let hint = "a GGUF adapter is written by llama.cpp's convert_lora_to_gguf.py, or by us";
            return Err(Error::config(file, key, problem, hint));
        }
    }
    let got = gguf.str(ARCHITECTURE)?.unwrap_or("");
    if got != arch.name() {
        let problem = format!("is {got:?}, the base model is {:?}", arch.name());
        let hint = "give the base model that the adapter was made for";
        return Err(Error::config(file, ARCHITECTURE, problem, hint));
    }
    if gguf.get(INVOCATION).is_some() {
        let problem = "adapters that begin at certain tokens (aLoRA) are not supported";
        return Err(Error::config(file, INVOCATION, problem, "use a plain LoRA adapter"));
    }
    Ok(())
}

/// Which parts of which parameters the file adapts, in order.
fn found_parts(gguf: &Gguf, base: &Base) -> Result<BTreeMap<usize, Vec<usize>>> {
    let mut by_tensor: HashMap<&str, (usize, usize)> = HashMap::new();
    for (idx, place) in base.places.iter().enumerate() {
        for (part_idx, part) in place.parts.iter().enumerate() {
            by_tensor.insert(&part.name, (idx, part_idx));
        }
    }
    let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for entry in gguf.tensors() {
        let name = entry.name.as_str();
        let refuse = |problem: &str| {
            let problem = format!("tensor `{name}`: {problem}");
            Error::format(gguf.file(), problem, "the adapter may belong to another base model")
        };
        let tensor = HALVES.iter().find_map(|half| name.strip_suffix(half));
        let tensor = tensor.ok_or_else(|| refuse("is not a half of an adapter we know"))?;
        let place = by_tensor.get(tensor);
        let &(idx, part) = place.ok_or_else(|| refuse("the base model has no such matrix"))?;
        if let Some(problem) = base.problem(idx) {
            return Err(refuse(problem));
        }
        let parts = found.entry(idx).or_default();
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    if found.is_empty() {
        let hint = "convert the adapter again";
        return Err(Error::format(gguf.file(), "the adapter holds no tensors", hint));
    }
    found.values_mut().for_each(|parts| parts.sort_unstable());
    Ok(found)
}

struct Half {
    a: Tensor,
    b: Tensor,
    /// Which rows of the matrix, as they are in the file.
    first_row: usize,
}

impl Half {
    fn read(device: &Device, gguf: &Gguf, parts: &[Part], idx: usize) -> Result<Half> {
        let part = &parts[idx];
        let read = |half: &str| {
            let name = format!("{}{half}", part.name);
            gguf.tensor(device, &name)?.ok_or_else(|| {
                let problem = format!("there is no `{name}`, the other half is there");
                Error::format(gguf.file(), problem, "convert the adapter again")
            })
        };
        let (a, b) = (read(HALVES[0])?, read(HALVES[1])?);
        if let Some(problem) = halves_problem(&a, &b, &part.shape) {
            let hint = "the adapter may belong to another base model";
            return Err(Error::format(gguf.file(), format!("`{}`: {problem}", part.name), hint));
        }
        Ok(Half { a, b, first_row: parts[..idx].iter().map(|part| part.shape[0]).sum() })
    }
}

/// One adapter of the whole matrix, in f32: A, B as the file orders its rows, alpha.
fn join(device: &Device, halves: &[Half], n_rows: usize, alpha: f64) -> (Tensor, Tensor, f64) {
    let first = &halves[0];
    let rank = first.a.shape()[0];
    // llama.cpp takes zero for a factor of one.
    let of_rank = |rank: usize| if alpha == 0.0 { rank as f64 } else { alpha };
    let a = first.a.to_f32();
    let shares_a = |half: &Half| half.a.shape() == a.shape() && half.a.to_f32().f32() == a.f32();
    if halves.iter().all(shares_a) {
        let mut b = Tensor::zeros(device, &[n_rows, rank]);
        halves.iter().for_each(|half| half.fill(&mut b, 0, 1.0));
        return (a, b, of_rank(rank));
    }
    // Parts adapted apart stand beside each other: A below A, and B with zeros for the others.
    let ranks = halves.iter().map(|half| half.a.shape()[0]);
    let rank_sum: usize = ranks.clone().sum();
    let a = Tensor::stack(&halves.iter().map(|half| half.a.to_f32()).collect::<Vec<_>>());
    let mut b = Tensor::zeros(device, &[n_rows, rank_sum]);
    let factor = of_rank(rank) / rank as f64;
    let mut first_col = 0;
    for (half, rank) in halves.iter().zip(ranks) {
        half.fill(&mut b, first_col, (of_rank(rank) / rank as f64 / factor) as f32);
        first_col += rank;
    }
    (a, b, factor * rank_sum as f64)
}

impl Half {
    /// Writes its B into that of the whole matrix.
    fn fill(&self, whole: &mut Tensor, first_col: usize, scale: f32) {
        let (_, width) = whole.dims2();
        let (_, rank) = self.b.dims2();
        let b = self.b.to_f32();
        let rows = whole.f32_mut().chunks_exact_mut(width).skip(self.first_row);
        for (to, from) in rows.zip(b.f32().chunks_exact(rank)) {
            let to = &mut to[first_col..first_col + rank];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * scale);
        }
    }
}
