//! Parameters out of containers of tensors, and into them, by their places.

use crate::error::{Error, Result};
use crate::files::{Outgoing, TensorFile};
use crate::model::place::{Map, Part, Place};
use crate::model::weights::{ParamId, Role, Spec, Weights};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Row `i` of a parameter is row `order[i]` of its tensor.
pub type Order = Arc<[usize]>;

/// Rows and columns; the numbers of a vector are rows of one.
fn dims(shape: &[usize]) -> (usize, usize) {
    match shape {
        [] => (1, 1),
        [n] => (*n, 1),
        [.., n_cols] => {
            let n_elem: usize = shape.iter().product();
            (n_elem.checked_div(*n_cols).unwrap_or(0), *n_cols)
        }
    }
}

type Index<'a> = HashMap<&'a str, &'a dyn TensorFile>;

/// Finds the file of each tensor. Every tensor that is there must be asked for.
fn index<'a>(
    places: &[Place],
    files: &[&'a dyn TensorFile],
    ignored: &[&str],
) -> Result<Index<'a>> {
    let mut by_name = Index::new();
    for file in files {
        for name in file.names() {
            if let Some(first) = by_name.insert(name, *file) {
                let problem = format!("tensor `{name}` is in {} too", first.file());
                let hint = "keep either the one file or its shards in the directory";
                return Err(Error::format(file.file(), problem, hint));
            }
        }
    }
    let parts = places.iter().flat_map(|place| &place.parts);
    let wanted: BTreeSet<&str> = parts.map(|part| part.name.as_str()).collect();
    for file in files {
        let is_known = |name: &&str| wanted.contains(name) || ignored.contains(name);
        if let Some(name) = file.names().into_iter().find(|name| !is_known(name)) {
            return Err(Error::ExtraTensor { name: name.into(), file: file.file().into() });
        }
    }
    Ok(by_name)
}

/// Reads all parameters. Every tensor asked for must be there, and every tensor there asked for.
///
/// A matrix whose rows the file has in another order stays where it is, and its order is told.
pub fn read_all(
    device: &Device,
    specs: &[Spec],
    places: &[Place],
    files: &[&dyn TensorFile],
    ignored: &[&str],
) -> Result<Vec<(Tensor, Option<Order>)>> {
    assert_eq!(specs.len(), places.len(), "one place per parameter");
    let index = index(places, files, ignored)?;
    // Layers are alike: there are as many orders as kinds of matrices.
    let mut orders: Vec<Order> = Vec::new();
    let mut shared = |order: Vec<usize>| {
        let known = orders.iter().find(|known| ***known == order).cloned();
        known.unwrap_or_else(|| {
            orders.push(order.into());
            orders[orders.len() - 1].clone()
        })
    };
    let read = |(spec, place)| {
        let (tensor, order) = read(device, spec, place, &index)?;
        Ok((tensor, order.map(&mut shared)))
    };
    specs.iter().zip(places).map(read).collect()
}

/// The bytes of all tensors by the name of their dtype; the same checks, and nothing is copied.
pub fn survey(
    device: &Device,
    places: &[Place],
    files: &[&dyn TensorFile],
    ignored: &[&str],
) -> Result<BTreeMap<&'static str, usize>> {
    let index = index(places, files, ignored)?;
    let mut n_bytes = BTreeMap::new();
    for part in places.iter().flat_map(|place| &place.parts) {
        let tensor = read_part(device, part, &index)?;
        *n_bytes.entry(tensor.dtype().name()).or_default() += tensor.n_bytes();
    }
    Ok(n_bytes)
}

fn read(
    device: &Device,
    spec: &Spec,
    place: &Place,
    index: &Index,
) -> Result<(Tensor, Option<Vec<usize>>)> {
    let parts = place.parts.iter().map(|part| read_part(device, part, index));
    let mut parts = parts.collect::<Result<Vec<_>>>()?;
    let stored = match &parts[..] {
        [one] => one.clone(),
        [first, rest @ ..] => {
            if rest.iter().any(|part| part.dtype() != first.dtype()) {
                parts.iter_mut().for_each(|part| *part = part.to_f32());
            }
            Tensor::stack(&parts)
        }
        [] => panic!("`{}` has no place", spec.name),
    };
    let param = match &place.map {
        Map::Same => stored,
        map => match map.order_back(stored.shape()[0]) {
            Some(order) if spec.role == Role::Matrix && stored.shape() == spec.shape => {
                return Ok((stored, Some(order)));
            }
            Some(order) => stored.gather(&order),
            None => undo(map, place, &stored, index)?,
        },
    };
    let param = param.reshape(&spec.shape);
    let param = match spec.role {
        Role::Matrix | Role::Embedding => param,
        Role::Vector | Role::Buffer => param.to_f32(),
    };
    Ok((param, None))
}

/// Takes back a map that changed numbers.
fn undo(map: &Map, place: &Place, stored: &Tensor, index: &Index) -> Result<Tensor> {
    let (_, n_cols) = dims(stored.shape());
    let mut x = stored.to_f32();
    let steps = match (&place.parts[..], stored.dtype()) {
        ([part], DType::F32) => index[part.name.as_str()].corrections(&part.name)?,
        _ => None,
    };
    match steps {
        Some(steps) => map.invert_exactly(x.f32_mut(), n_cols, &steps),
        None => map.invert(x.f32_mut(), n_cols),
    }
    Ok(x)
}

fn read_part(device: &Device, part: &Part, index: &Index) -> Result<Tensor> {
    let missing = || Error::MissingTensor { name: part.name.clone(), shape: part.shape.clone() };
    let file = index.get(part.name.as_str()).ok_or_else(missing)?;
    let stored = file.tensor(device, &part.name)?.ok_or_else(missing)?;
    if stored.shape() != part.shape {
        return Err(Error::WrongShape {
            name: part.name.clone(),
            file: file.file().into(),
            got: stored.shape().to_vec(),
            want: part.shape.clone(),
        });
    }
    let (n_rows, n_cols) = dims(&part.shape);
    let matrix = match part.shape[..] {
        // The rows of a vector are its numbers, and a block is more than one.
        [n] if matches!(stored.dtype(), DType::Block(_)) => stored.to_f32().reshape(&[n]),
        [n] => stored.reshape(&[n]),
        _ => stored.reshape(&[n_rows, n_cols]),
    };
    Ok(match &part.rows {
        Some(rows) => matrix.rows(rows.clone()),
        None => matrix,
    })
}

/// A tensor of a file that is to be written, and the parameters it is made of.
pub struct Target {
    pub name: String,
    pub shape: Vec<usize>,
    /// How its numbers are stored now, where all of them are alike.
    pub dtype: Option<DType>,
    /// Whether it is a matrix that may be stored in another dtype.
    pub role: Role,
    pieces: Vec<Piece>,
}

struct Piece {
    param: ParamId,
    map: Map,
    /// Rows of the parameter, as it lies in the file.
    from: Range<usize>,
    /// First row of the tensor.
    to: usize,
}

/// The tensors that hold these parameters at these places, in order of first appearance.
///
/// A parameter may come more than once, at different places.
pub fn targets(weights: &Weights, places: &[(ParamId, Place)]) -> Vec<Target> {
    let mut list: Vec<Target> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    for (param, place) in places {
        let (dtype, role) = (weights.tensor(*param).dtype(), weights.role(*param));
        let mut from = 0;
        for part in &place.parts {
            let rows = part.rows.clone().unwrap_or(0..dims(&part.shape).0);
            let idx = *by_name.entry(part.name.clone()).or_insert_with(|| {
                let (name, shape) = (part.name.clone(), part.shape.clone());
                let pieces = Vec::new();
                list.push(Target { name, shape, dtype: Some(dtype), role, pieces });
                list.len() - 1
            });
            let target = &mut list[idx];
            target.dtype = target.dtype.filter(|&first| first == dtype);
            let (map, to) = (place.map.clone(), rows.start);
            target.pieces.push(Piece { param: *param, map, from: from..from + rows.len(), to });
            from += rows.len();
        }
    }
    list
}

impl Target {
    pub fn outgoing<'a>(&'a self, weights: &'a Weights, dtype: DType) -> Outgoing<'a> {
        Outgoing {
            name: self.name.clone(),
            shape: self.shape.clone(),
            dtype,
            bytes: Box::new(move || Ok(self.bytes(weights, dtype))),
        }
    }

    pub fn n_rows(&self) -> usize {
        dims(&self.shape).0
    }

    /// The parameters in it, and the rows of each.
    pub fn params(&self) -> impl Iterator<Item = (ParamId, Range<usize>)> {
        self.pieces.iter().map(|piece| (piece.param, piece.to..piece.to + piece.from.len()))
    }

    /// The parameter, where the tensor is the whole of one under a map that loses bits.
    pub fn lossy(&self) -> Option<(ParamId, &Map)> {
        match &self.pieces[..] {
            [Piece { param, map, .. }] if map.order(0).is_none() => Some((*param, map)),
            _ => None,
        }
    }

    fn bytes<'a>(&self, weights: &'a Weights, dtype: DType) -> Cow<'a, [u8]> {
        let (n_rows, n_cols) = dims(&self.shape);
        if let [Piece { param, map: Map::Same, from, .. }] = &self.pieces[..] {
            let tensor = weights.tensor(*param);
            let is_whole = from.len() == n_rows && tensor.n_elem() == n_rows * n_cols;
            if tensor.dtype() == dtype && is_whole {
                return Cow::Borrowed(tensor.bytes());
            }
        }
        let per_row = dtype.n_bytes(n_cols).expect("rows of whole blocks");
        let mut out = vec![0; n_rows * per_row];
        for piece in &self.pieces {
            let begin = piece.to * per_row;
            let out = &mut out[begin..begin + piece.from.len() * per_row];
            piece.write(weights.tensor(piece.param), n_cols, dtype, out);
        }
        Cow::Owned(out)
    }
}

impl Piece {
    fn write(&self, tensor: &Tensor, n_cols: usize, dtype: DType, out: &mut [u8]) {
        let n_rows = tensor.n_elem().checked_div(n_cols).unwrap_or(0);
        let matrix = tensor.reshape(&[n_rows, n_cols]);
        let x = match self.map.order(n_rows) {
            Some(order) => {
                let rows = matrix.gather(&order[self.from.clone()]);
                if tensor.dtype() == dtype {
                    return out.copy_from_slice(rows.bytes());
                }
                rows.to_f32()
            }
            None => {
                let mut x = matrix.to_f32();
                self.map.apply(x.f32_mut(), n_cols);
                x.rows(self.from.clone())
            }
        };
        encode(&x, dtype, out);
    }
}

/// Encodes rows side by side on all threads.
fn encode(x: &Tensor, dtype: DType, out: &mut [u8]) {
    let cpu = x.device().expect_cpu();
    let (n_rows, n_cols) = x.dims2();
    let rows_per_task = (1usize << 16).div_ceil(n_cols.max(1)).min(n_rows.max(1));
    let per_task = rows_per_task * dtype.n_bytes(n_cols).expect("rows of whole blocks");
    let x = x.f32();
    let tasks: Vec<_> = out.chunks_mut(per_task.max(1)).enumerate().collect();
    cpu.map(tasks, |(idx, out)| {
        let begin = idx * rows_per_task * n_cols;
        let end = (begin + rows_per_task * n_cols).min(x.len());
        dtype.encode(&x[begin..end], out);
    });
}
