//! Experts that are loaded when the router chooses them, within a limit of memory.
//!
//! The unit is one expert of one layer, with all of its matrices. An expert that is loaded is a map
//! of its own bytes of the file, read at once, or a copy of them on a GPU; one that is evicted is
//! unmapped, or its buffers take the next. So what is resident is what the process or the GPU holds
//! of experts. The system may keep bytes of the file in its cache beyond that, and takes them back
//! when memory is short.
//!
//! Every use of an expert counts one, and counts halve in `half_life` turns:
//!
//! ```text
//! score[t] = score[u] 2^-((t - u) / half_life) + 1        used at turn t, and before at turn u
//! ```
//!
//! Of those that are not in use the lowest score is evicted first, then the lowest number. Counts
//! of evicted experts are kept. Which expert is where has no influence on results: only bytes move.
//!
//! Where the experts of a batch do not fit side by side they take turns, in their order. Not here:
//! how rows of a turn are computed (`feed_forward.rs`).

use crate::error::{Error, Result};
use crate::files::Apart;
use crate::files::package::{HINT, Unchecked};
use crate::model::weights::{LinearIds, ParamId, Spec, Weights};
use crate::ops::linear::Linear;
use crate::tape::{Tape, Var};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What was done since the start, and what is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageUse {
    /// Experts that were there when they were chosen, and those that were not.
    pub n_hits: u64,
    pub n_loads: u64,
    /// Bytes that were loaded.
    pub bytes_read: u64,
    /// Bytes that are resident.
    pub bytes: usize,
}

/// Experts of a model, by parameter.
pub struct Pages {
    device: Device,
    bytes_max: usize,
    units: Vec<Unit>,
    /// Of each parameter of an expert: the expert, and which of its matrices it is.
    places: HashMap<ParamId, (usize, usize)>,
    sources: Arc<Vec<Apart>>,
    held: Mutex<Held>,
}

/// One expert.
struct Unit {
    name: Arc<str>,
    /// As they lie in the file; nobody reads their numbers here.
    matrices: Vec<Tensor>,
    /// Bytes on the device.
    n_bytes: usize,
    /// Matrices in the order of their bytes, and the hash of these.
    checks: Vec<(Vec<usize>, String)>,
}

struct Held {
    resident: BTreeMap<usize, Vec<Tensor>>,
    /// Of each unit: its score at its last turn, and that turn.
    scores: Vec<(f64, u64)>,
    turn: u64,
    usage: PageUse,
    /// What went wrong first: layers have no error to return.
    failed: Option<Error>,
}

/// What pages are made of.
pub struct Paging<'a> {
    /// Bytes of experts that may be resident.
    pub bytes_max: usize,
    pub specs: &'a [Spec],
    /// The files that experts lie in.
    pub sources: &'a Arc<Vec<Apart>>,
    /// Those of them that have a hash for each expert.
    pub unchecked: &'a [Unchecked],
}

impl Pages {
    /// Pages of the parameters that belong to experts; `matrix` gives the tensor of one as it lies
    /// in the file. Fails where there are none, where one does not lie there as it is needed, or
    /// where `bytes_max` does not hold the largest.
    pub fn new(
        device: &Device,
        paging: &Paging,
        matrix: impl Fn(ParamId) -> Option<Tensor>,
    ) -> Result<Pages> {
        let Paging { bytes_max, specs, sources, unchecked } = *paging;
        let (mut units, mut places) = (Vec::<Unit>::new(), HashMap::new());
        let mut by_name = HashMap::new();
        for (idx, spec) in specs.iter().enumerate() {
            let Some(name) = &spec.expert else { continue };
            let there = |matrix: &Tensor| source(sources, matrix.bytes()).is_some();
            let matrix = matrix(ParamId(idx)).filter(there).ok_or_else(|| {
                let problem = format!("`{}` cannot be loaded by itself", spec.name);
                Error::input(problem, "convert the model to a .gguf or .elapid file first")
            })?;
            let at = *by_name.entry(name.clone()).or_insert(units.len());
            if at == units.len() {
                let (name, matrices, checks) = (name.clone(), Vec::new(), Vec::new());
                units.push(Unit { name, matrices, n_bytes: 0, checks });
            }
            let unit = &mut units[at];
            places.insert(ParamId(idx), (at, unit.matrices.len()));
            unit.n_bytes += bytes_on(device, &matrix);
            unit.matrices.push(matrix);
        }
        for unit in &mut units {
            unit.checks = checks(unit, unchecked)?;
        }
        let Some(largest) = units.iter().map(|unit| unit.n_bytes).max() else {
            let hint = "a limit for experts is for mixture-of-experts models: omit it";
            return Err(Error::input("the model has no experts", hint));
        };
        if bytes_max < largest {
            let problem = format!("an expert takes {largest} bytes, {bytes_max} are allowed");
            return Err(Error::input(problem, &format!("allow at least {largest} bytes")));
        }
        let held = Held {
            resident: BTreeMap::new(),
            scores: vec![(0.0, 0); units.len()],
            turn: 0,
            usage: PageUse::default(),
            failed: None,
        };
        let (device, sources, held) = (device.clone(), sources.clone(), Mutex::new(held));
        Ok(Pages { device, bytes_max, units, places, sources, held })
    }

    pub fn has(&self, id: ParamId) -> bool {
        self.places.contains_key(&id)
    }

    pub fn usage(&self) -> PageUse {
        self.held().usage
    }

    /// Fails with what went wrong since the last call.
    pub fn check(&self) -> Result<()> {
        self.held().failed.take().map_or(Ok(()), Err)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs of a layer's experts that fit side by side; expert e is that of the parameter `ids[e]`
    /// and has the rows `offsets[e]..offsets[e + 1]`.
    pub fn turns(&self, ids: &[ParamId], offsets: &[usize]) -> Vec<Range<usize>> {
        let (mut turns, mut first, mut n_bytes) = (Vec::new(), 0, 0);
        for (expert, id) in ids.iter().enumerate() {
            if offsets[expert] == offsets[expert + 1] {
                continue;
            }
            let more = self.units[self.places[id].0].n_bytes;
            if n_bytes + more > self.bytes_max {
                turns.push(first..expert);
                (first, n_bytes) = (expert, 0);
            }
            n_bytes += more;
        }
        turns.push(first..ids.len());
        turns
    }

    /// The matrices of a turn: those of `ids`, which name an expert each by one of its parameters,
    /// on the device.
    pub fn fetch(&self, ids: &[ParamId]) -> Vec<Vec<Tensor>> {
        let wanted: Vec<usize> = ids.iter().map(|id| self.places[id].0).collect();
        let mut held = self.held();
        held.turn += 1;
        let missing = wanted.iter().filter(|unit| !held.resident.contains_key(unit));
        let n_bytes = missing.map(|unit| self.units[*unit].n_bytes).sum();
        self.make_room(&mut held, n_bytes, &wanted);
        wanted.iter().map(|&unit| self.fetch_one(&mut held, unit)).collect()
    }

    /// Which matrix of its expert a parameter is.
    pub fn place(&self, id: ParamId) -> usize {
        self.places[&id].1
    }

    fn fetch_one(&self, held: &mut Held, idx: usize) -> Vec<Tensor> {
        let (score, turn) = (held.score(idx) + 1.0, held.turn);
        held.scores[idx] = (score, turn);
        if let Some(matrices) = held.resident.get(&idx) {
            held.usage.n_hits += 1;
            return matrices.clone();
        }
        let unit = &self.units[idx];
        match self.load(unit) {
            Ok(matrices) => {
                let usage = &mut held.usage;
                usage.n_loads += 1;
                usage.bytes_read += unit.matrices.iter().map(|it| it.n_bytes() as u64).sum::<u64>();
                usage.bytes += unit.n_bytes;
                held.resident.insert(idx, matrices.clone());
                matrices
            }
            Err(error) => {
                held.failed.get_or_insert(error);
                let zeros = |matrix: &Tensor| Tensor::zeros(&self.device, matrix.shape());
                unit.matrices.iter().map(zeros).collect()
            }
        }
    }

    /// Evicts until `n_bytes` more may come; those that are wanted stay.
    fn make_room(&self, held: &mut Held, n_bytes: usize, wanted: &[usize]) {
        while held.usage.bytes + n_bytes > self.bytes_max {
            let others = held.resident.keys().copied().filter(|unit| !wanted.contains(unit));
            let order = |a: &usize, b: &usize| held.score(*a).total_cmp(&held.score(*b));
            let Some(least) = others.min_by(order) else { return };
            held.resident.remove(&least);
            held.usage.bytes -= self.units[least].n_bytes;
        }
    }

    fn load(&self, unit: &Unit) -> Result<Vec<Tensor>> {
        let bytes = unit.matrices.iter().map(|matrix| {
            let source = source(&self.sources, matrix.bytes()).expect("checked when it was made");
            source.take(matrix.bytes())
        });
        let bytes = bytes.collect::<Result<Vec<_>>>()?;
        for (order, want) in &unit.checks {
            let mut hasher = blake3::Hasher::new();
            for &at in order {
                hasher.update_rayon((*bytes[at]).as_ref());
            }
            let got = hasher.finalize().to_hex();
            if got.as_str() != want {
                let problem =
                    format!("`{}` was changed: its hash is {got}, it was {want}", unit.name);
                return Err(Error::input(problem, HINT));
            }
        }
        let pairs = unit.matrices.iter().zip(bytes);
        let tensor = |(it, bytes): (&Tensor, _)| {
            Tensor::from_shared(&self.device, it.shape(), it.dtype(), bytes, 0)
        };
        Ok(pairs.map(tensor).collect())
    }
}

impl Held {
    /// The score of a unit now; counts halve once every expert could have had a turn.
    fn score(&self, unit: usize) -> f64 {
        let (score, turn) = self.scores[unit];
        score * (-((self.turn - turn) as f64) / self.scores.len() as f64).exp2()
    }
}

impl Weights {
    /// What became of experts that are loaded when they are chosen, if they are.
    pub fn page_use(&self) -> Option<PageUse> {
        self.pages.as_ref().map(|pages| pages.usage())
    }

    /// Fails where an expert could not be loaded since the last call.
    pub fn check(&self) -> Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.check())
    }

    /// Runs of experts to compute one after the other: all at once, or as many as memory holds.
    /// Expert e has the rows `offsets[e]..offsets[e + 1]`, and `ids[e]` is one of its maps.
    pub fn turns(&self, ids: &[LinearIds], offsets: &[usize]) -> Vec<Range<usize>> {
        let weights = || ids.iter().map(|ids| ids.weight).collect::<Vec<_>>();
        match &self.pages {
            Some(pages) => pages.turns(&weights(), offsets),
            None => std::iter::once(0..ids.len()).collect(),
        }
    }

    /// The maps of all experts of a layer, matrix by matrix; of those that are loaded when they are
    /// chosen the experts of `turn` that have rows are loaded, the others not to be read.
    pub fn experts<const N: usize>(
        &self,
        tape: &Tape,
        maps: [&[LinearIds]; N],
        offsets: &[usize],
        turn: Range<usize>,
    ) -> [Vec<Linear>; N] {
        let linears = |ids: &[LinearIds]| ids.iter().map(|ids| self.linear(tape, ids)).collect();
        let mut lists: [Vec<Linear>; N] = maps.map(linears);
        let Some(pages) = &self.pages else { return lists };
        let busy: Vec<usize> = turn.filter(|&e| offsets[e] < offsets[e + 1]).collect();
        let ids: Vec<ParamId> = busy.iter().map(|&expert| maps[0][expert].weight).collect();
        for (expert, matrices) in busy.into_iter().zip(pages.fetch(&ids)) {
            for (list, ids) in lists.iter_mut().zip(maps) {
                let matrix = &matrices[pages.place(ids[expert].weight)];
                list[expert].weight = Var::constant(matrix.clone());
            }
        }
        lists
    }
}

/// What holds these bytes.
fn source<'a>(sources: &'a [Apart], bytes: &[u8]) -> Option<&'a Apart> {
    sources.iter().find(|source| source.holds(bytes))
}

/// Bytes of a matrix on a device: with the cast that products make of f32 where they compute in 16
/// bits.
fn bytes_on(device: &Device, matrix: &Tensor) -> usize {
    let is_cast = matrix.dtype() == DType::F32 && device.activation_dtype() != DType::F32;
    matrix.n_bytes() + if is_cast { 2 * matrix.n_elem() } else { 0 }
}

/// What the manifests of files say of a unit that lies in them.
fn checks(unit: &Unit, unchecked: &[Unchecked]) -> Result<Vec<(Vec<usize>, String)>> {
    let mut list = Vec::new();
    for file in unchecked {
        let address = |at: &usize| unit.matrices[*at].bytes().as_ptr() as usize;
        let mut inside: Vec<usize> =
            (0..unit.matrices.len()).filter(|at| file.holds(unit.matrices[*at].bytes())).collect();
        inside.sort_by_key(address);
        if !inside.is_empty() {
            list.push((inside, file.hash_of(&unit.name)?.to_string()));
        }
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::place::Part;
    use crate::model::weights::{Init, Role};
    use crate::tensor::SharedBytes;

    const N: usize = 6;
    /// Bytes of one expert: two matrices of 2 x 4 numbers.
    const ONE: usize = 64;

    /// Six experts, whose numbers are all those of their own.
    fn pages(bytes_max: usize) -> Pages {
        let device = Device::cpu(1).unwrap();
        let numbers: Vec<f32> = (0..N * ONE / 4).map(|n| (n / 16) as f32).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let whole: SharedBytes = Arc::new(bytes.clone());
        let take = move |range: Range<usize>| Ok(Arc::new(bytes[range].to_vec()) as SharedBytes);
        let spec = |idx: usize| Spec {
            name: format!("{idx}"),
            shape: vec![2, 4],
            stored: Part { name: format!("{idx}"), shape: vec![2, 4], rows: None },
            init: Init::Constant(0.0),
            role: Role::Matrix,
            expert: Some(format!("expert {}", idx / 2).into()),
        };
        let specs: Vec<Spec> = (0..2 * N).map(spec).collect();
        let sources = Arc::new(vec![Apart { whole: whole.clone(), take: Box::new(take) }]);
        let matrix = |id: ParamId| {
            let bytes = whole.clone();
            Some(Tensor::from_shared(&device, &[2, 4], DType::F32, bytes, id.0 * ONE / 2))
        };
        let paging = Paging { bytes_max, specs: &specs, sources: &sources, unchecked: &[] };
        Pages::new(&device, &paging, matrix).unwrap()
    }

    fn fetch(pages: &Pages, experts: &[usize]) {
        let ids: Vec<ParamId> = experts.iter().map(|expert| ParamId(2 * expert)).collect();
        for (expert, matrices) in experts.iter().zip(pages.fetch(&ids)) {
            assert_eq!(matrices.len(), 2);
            assert!(matrices.iter().all(|it| it.to_vec() == [*expert as f32; 8]), "{expert}");
        }
    }

    fn resident(pages: &Pages) -> Vec<usize> {
        pages.held().resident.keys().copied().collect()
    }

    #[test]
    fn what_is_used_least_makes_room_and_every_use_is_counted() {
        let pages = pages(3 * ONE);
        fetch(&pages, &[0, 1]);
        fetch(&pages, &[0, 2]);
        assert_eq!(resident(&pages), [0, 1, 2]);
        // 1 was used once, before 2.
        fetch(&pages, &[3]);
        assert_eq!(resident(&pages), [0, 2, 3]);
        // Counts of what was evicted are kept: 1 comes back with two uses, and stays before 2.
        fetch(&pages, &[1]);
        assert_eq!(resident(&pages), [0, 1, 3]);
        fetch(&pages, &[4]);
        assert_eq!(resident(&pages), [0, 1, 4]);
        let (n_hits, n_loads) = (1, 6);
        let want = PageUse { n_hits, n_loads, bytes_read: 6 * ONE as u64, bytes: 3 * ONE };
        assert_eq!(pages.usage(), want);
    }

    #[test]
    fn old_uses_are_forgotten_by_and_by() {
        let pages = pages(2 * ONE);
        (0..4).for_each(|_| fetch(&pages, &[0]));
        (0..40).for_each(|_| fetch(&pages, &[1]));
        fetch(&pages, &[2]);
        assert_eq!(resident(&pages), [1, 2]);
    }

    #[test]
    fn what_does_not_fit_side_by_side_takes_turns_and_idle_experts_take_none() {
        let ids: Vec<ParamId> = (0..N).map(|expert| ParamId(2 * expert)).collect();
        let offsets = [0, 2, 2, 3, 4, 4, 9];
        let all = std::slice::from_ref(&(0..6));
        assert_eq!(pages(N * ONE).turns(&ids, &offsets), all);
        assert_eq!(pages(2 * ONE).turns(&ids, &offsets), [0..3, 3..6]);
        assert_eq!(pages(ONE).turns(&ids, &offsets), [0..2, 2..3, 3..5, 5..6]);
        assert_eq!(pages(ONE).turns(&ids, &[0; 7]), all);
    }

    #[test]
    fn those_of_a_turn_stay_until_it_is_over() {
        let pages = pages(3 * ONE);
        fetch(&pages, &[0]);
        (0..9).for_each(|_| fetch(&pages, &[1, 2]));
        fetch(&pages, &[0, 4, 5]);
        assert_eq!(resident(&pages), [0, 4, 5]);
        assert_eq!(pages.usage().bytes, 3 * ONE);
    }
}
