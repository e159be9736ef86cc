//! What a sequence carries between tokens: a list of slots, which the mixers of a model declare.
//!
//! A clone is a snapshot, and a sequence can be forked: both share what they hold until one of them
//! continues. Full pages of a cache stay shared for good; of the rest, the one that writes makes a
//! copy of its own.
//!
//! Not here: who keeps states, under which key, and for how long.

use crate::error::Result;
use crate::ops::attention::KvCache;
use crate::tensor::Tensor;
use crate::tensor::device::Device;

pub use crate::ops::attention::{CacheType, PAGE};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Keys and values, a row for every token: tokens can be taken back.
    Cache { n_kv_head: usize, d_head: usize },
    /// The state of a recurrence or the last inputs of a convolution, in the shape its op wants.
    Recurrent(Vec<usize>),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotId(pub usize);

impl Slot {
    fn held(&self, device: &Device, kind: CacheType) -> Result<Held> {
        Ok(match self {
            Slot::Cache { n_kv_head, d_head } => {
                Held::Cache(KvCache::with_type(device, *n_kv_head, *d_head, kind)?)
            }
            Slot::Recurrent(shape) => Held::Tensor(Tensor::zeros(device, shape)),
        })
    }

    /// Bytes before the first token, and bytes that each token adds to a cache in f32.
    pub fn n_bytes(&self) -> [usize; 2] {
        let n_bytes = |shape: &[usize]| 4 * shape.iter().product::<usize>();
        match self {
            Slot::Cache { n_kv_head, d_head } => [0, 2 * n_bytes(&[*n_kv_head, *d_head])],
            Slot::Recurrent(shape) => [n_bytes(shape), 0],
        }
    }
}

#[derive(Clone)]
enum Held {
    Cache(KvCache),
    Tensor(Tensor),
}

#[derive(Clone)]
pub struct State {
    slots: Vec<Held>,
    pub n_tok: usize,
}

/// One state for each sequence of a batch, where sequences continue.
pub(crate) type States<'a> = Option<&'a mut [State]>;

/// A window or a recurrent state of every sequence.
pub(crate) fn tensors(states: States<'_>, id: SlotId) -> Option<Vec<&mut Tensor>> {
    tensors_of(states, [id]).map(|[list]| list)
}

/// The same of several slots at once.
pub(crate) fn tensors_of<const N: usize>(
    states: States<'_>,
    ids: [SlotId; N],
) -> Option<[Vec<&mut Tensor>; N]> {
    let mut lists = std::array::from_fn(|_| Vec::new());
    for state in states? {
        let slots = state.slots.get_disjoint_mut(ids.map(|id| id.0)).expect("slots that differ");
        for (list, slot) in lists.iter_mut().zip(slots) {
            match slot {
                Held::Tensor(tensor) => list.push(tensor),
                Held::Cache(_) => panic!("a cache in place of a tensor"),
            }
        }
    }
    Some(lists)
}

pub(crate) fn caches(states: States<'_>, id: SlotId) -> Option<Vec<&mut KvCache>> {
    let all = states?.iter_mut().map(|state| match &mut state.slots[id.0] {
        Held::Cache(cache) => cache,
        Held::Tensor(_) => panic!("slot {} is no cache", id.0),
    });
    Some(all.collect())
}

impl State {
    /// Before the first token, with caches of this type, if the heads of the model allow it.
    pub(crate) fn new(device: &Device, slots: &[Slot], kind: CacheType) -> Result<State> {
        let slots = slots.iter().map(|slot| slot.held(device, kind)).collect::<Result<_>>()?;
        Ok(State { slots, n_tok: 0 })
    }

    fn caches(&self) -> impl Iterator<Item = &KvCache> {
        self.slots.iter().filter_map(|slot| match slot {
            Held::Cache(cache) => Some(cache),
            Held::Tensor(_) => None,
        })
    }

    /// Whether it grows with every token.
    pub(crate) fn has_cache(&self) -> bool {
        self.caches().next().is_some()
    }

    /// Whether tokens can be taken back: all that it holds is caches.
    pub(crate) fn can_truncate(&self) -> bool {
        self.caches().count() == self.slots.len()
    }

    /// Forgets all tokens but the first `n_tok`.
    pub(crate) fn truncate(&mut self, n_tok: usize) {
        for slot in &mut self.slots {
            let Held::Cache(cache) = slot else { panic!("a recurrence cannot be truncated") };
            cache.truncate(n_tok);
        }
        self.n_tok = n_tok;
    }

    /// Bytes it holds; what clones share is counted for each of them.
    pub fn n_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// What it holds, piece by piece: a number that pieces of several states have in common only
    /// if they are the same memory, and the bytes.
    pub fn parts(&self) -> Vec<(usize, usize)> {
        let parts = |slot: &Held| match slot {
            Held::Cache(cache) => cache.pages().collect(),
            Held::Tensor(tensor) => vec![(tensor.memory_id(), tensor.n_bytes())],
        };
        self.slots.iter().flat_map(parts).collect()
    }

    /// Whether recorded work may continue with it: what it writes is nobody else's.
    pub(crate) fn can_step(&mut self) -> bool {
        let n_tok = self.n_tok;
        self.slots.iter_mut().all(|slot| match slot {
            Held::Cache(cache) => cache.n_tok() == n_tok && cache.can_step(),
            Held::Tensor(tensor) => tensor.is_unique(),
        })
    }

    /// Where everything is that a step writes, on a GPU.
    pub(crate) fn places(&self) -> Vec<u64> {
        let places = |slot: &Held| match slot {
            Held::Cache(cache) => cache.places().into_iter().flatten().collect(),
            Held::Tensor(tensor) => vec![tensor.cuda_address()],
        };
        self.slots.iter().flat_map(places).collect()
    }

    /// Notes a token that recorded work has taken.
    pub(crate) fn step_on(&mut self) {
        self.n_tok += 1;
        for slot in &mut self.slots {
            if let Held::Cache(cache) = slot {
                cache.step_on();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::{AttentionConfig, Config, Mamba2Config, MixerConfig};
    use crate::model::weights::Weights;
    use crate::model::{ForwardOptions, Model};
    use crate::ops::attention::Side;
    use crate::tape::Tape;
    use crate::tensor::batch::Batch;
    use crate::tensor::rng::Rng;

    /// A small model with a layer of every kind.
    fn fixture(device: &Device) -> (Model, Weights) {
        let config = serde_json::json!({
            "model_type": "elapid", "vocab_size": 40, "d_model": 16,
            "layers": ["mamba1", {"mixer": "short_conv", "feed_forward": "dense"}, "mamba2",
                       "attention", "mamba3"],
            "tied": true, "eps": 1e-3, "init_std": 0.2, "n_ctx": 64,
            "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba3": {"d_state": 8, "d_head": 8, "rank": 2},
            "attention": {"n_head": 4, "n_kv_head": 2, "d_head": 16, "rope_base": 5000.0,
                          "qk_norm": true},
            "dense": {"d_ff": 24, "activation": "gelu"},
        });
        let mut config = Config::from_json("config", &config.to_string()).unwrap();
        // Both side by side, which our own configurations do not name.
        let mut both = config.layers[2].clone();
        let attention = match &config.layers[3].mixer {
            MixerConfig::Attention(c) => AttentionConfig { prefix: "beside".into(), ..c.clone() },
            _ => panic!("the last layer is attention"),
        };
        let mamba = match &config.layers[2].mixer {
            MixerConfig::Mamba2(c) => Mamba2Config { prefix: "both".into(), ..c.clone() },
            _ => panic!("the third layer is Mamba-2"),
        };
        both.mixer = MixerConfig::Parallel(mamba, attention);
        both.mixer_norm = "both_norm".into();
        both.feed_forward = crate::model::config::FeedForwardConfig::None;
        config.layers.push(both);
        let model = Model::new(config);
        let weights = Weights::init(device, model.specs(), 3);
        (model, weights)
    }

    fn step(model: &Model, weights: &Weights, tokens: &[u32], state: &mut State) -> Vec<f32> {
        let tape = Tape::off();
        let batch = Batch::continuing(&[(tokens, state.n_tok)]);
        let states = std::slice::from_mut(state);
        let options = ForwardOptions::default();
        let hidden = model.forward(&tape, weights, &batch, Some(states), options).unwrap().hidden;
        model.logits(&tape, weights, &hidden).value().f32().to_vec()
    }

    /// Every number it holds, by slot.
    fn contents(state: &State) -> Vec<Vec<f32>> {
        let numbers = |slot: &Held| match slot {
            Held::Cache(cache) => {
                let sides = [Side::Keys, Side::Values];
                sides.map(|side| cache.read(side, 0..cache.n_tok())).concat()
            }
            Held::Tensor(tensor) => tensor.to_vec(),
        };
        state.slots.iter().map(numbers).collect()
    }

    fn tokens(n_tok: usize) -> Vec<u32> {
        (0..n_tok as u64).map(|n| Rng::new(5, 1).below(n, 40) as u32).collect()
    }

    #[test]
    fn forks_share_everything_until_they_go_on_and_full_pages_after() {
        let device = Device::cpu(1).unwrap();
        let (model, weights) = fixture(&device);
        let tokens = tokens(2 * PAGE + 10);
        let mut trunk = model.state(&device);
        step(&model, &weights, &tokens[..PAGE + 7], &mut trunk);
        let (snapshot, live) = (trunk.clone(), device.memory().live);
        assert_eq!(trunk.parts(), snapshot.parts());
        let kept = contents(&snapshot);
        let mut forks = [trunk.clone(), trunk.clone()];
        assert_eq!(device.memory().live, live, "a clone takes no memory");
        let first = step(&model, &weights, &tokens[PAGE + 7..PAGE + 8], &mut trunk);
        for fork in &mut forks {
            assert_eq!(step(&model, &weights, &tokens[PAGE + 7..PAGE + 8], fork), first);
            let rest = step(&model, &weights, &tokens[PAGE + 8..], fork);
            assert!(rest.iter().all(|x| x.is_finite()));
        }
        assert!(contents(&snapshot) == kept, "a snapshot changed");
        assert!(contents(&forks[0]) == contents(&forks[1]));
        // Two layers have caches; their first page is one for all.
        let shared = |a: &State, b: &State| {
            let of_b = b.parts();
            a.parts().iter().filter(|part| of_b.contains(part)).count()
        };
        assert_eq!((shared(&forks[0], &snapshot), shared(&trunk, &forks[1])), (2, 2));
    }

    #[test]
    fn a_truncated_state_continues_as_if_it_had_not_seen_the_rest() {
        let device = Device::cpu(1).unwrap();
        let (model, _) = fixture(&device);
        assert!(!model.state(&device).can_truncate(), "it has recurrences");
        let mut config = model.config().clone();
        config.layers = vec![config.layers[3].clone()];
        let model = Model::new(config);
        let weights = Weights::init(&device, model.specs(), 3);
        let tokens = tokens(2 * PAGE + 10);
        for n_tok in [1, PAGE - 1, PAGE, PAGE + 40] {
            let [mut cut, mut fresh] = [model.state(&device), model.state(&device)];
            step(&model, &weights, &tokens[..n_tok], &mut fresh);
            step(&model, &weights, &tokens[..n_tok], &mut cut);
            step(&model, &weights, &tokens[n_tok..], &mut cut);
            assert!(cut.can_truncate());
            cut.truncate(n_tok);
            assert!(contents(&cut) == contents(&fresh), "{n_tok} tokens");
            let next = &tokens[n_tok..n_tok + 9];
            let want = step(&model, &weights, next, &mut fresh);
            assert!(step(&model, &weights, next, &mut cut) == want, "{n_tok} tokens");
        }
    }

    #[test]
    fn its_size_is_known_before_it_is_made() {
        let device = Device::cpu(1).unwrap();
        let (model, weights) = fixture(&device);
        let mut state = model.state(&device);
        let [n_bytes, per_token] = model.state_bytes();
        assert_eq!(state.n_bytes(), n_bytes);
        step(&model, &weights, &tokens(PAGE), &mut state);
        assert_eq!(state.n_bytes(), n_bytes + PAGE * per_token);
    }

    #[test]
    fn a_gpu_keeps_caches_as_activations_alone() {
        let (model, _) = fixture(&Device::cpu(1).unwrap());
        for (device, _) in crate::ops::check::devices() {
            let state = model.state(device);
            assert_eq!(state.clone().parts(), state.parts());
            let error = model.state_with(device, CacheType::F16).err();
            assert!(error.unwrap().to_string().contains("f16 is only supported on the CPU"));
        }
    }
}
