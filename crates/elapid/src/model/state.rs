//! What a sequence carries between tokens: per layer a key-value cache, or a window and a state.
//!
//! A clone is a snapshot, and a sequence can be forked: both share what they hold until one of them
//! goes on. Full pages of a cache stay shared for good; of the rest, the one that writes makes a
//! copy of its own.
//!
//! A state can be written and read again, for a model of the same shape:
//!
//! | bytes | what                                                                      |
//! |-------|---------------------------------------------------------------------------|
//! | 8     | `elapidst`                                                                |
//! | 4     | version                                                                   |
//! | 32    | BLAKE3 of the shape of the model, see `shape_hash`                        |
//! | 1     | type of the caches: 0 f32, 1 f16, 2 q8_0                                  |
//! | 8     | tokens seen                                                               |
//! | ...   | per layer: window and state in f32; or keys, then values, as stored;      |
//! |       | of two mixers side by side first those of the recurrence. No lengths:     |
//! |       | shape, type and tokens say how many there are                             |
//! | 32    | BLAKE3 of all before                                                      |
//!
//! Numbers are little-endian. A state may be written on one device and read on another; those of
//! graphics processors have caches of type f32. The weights are not part of the hash: a state of
//! another model of the same shape is read, and means nothing.
//!
//! Not here: who keeps states, under which key, and for how long.

use crate::error::{Error, Result};
use crate::model::config::{AttentionConfig, Config, Mamba1Config, Mamba2Config, MixerConfig};
use crate::ops::attention::{KvCache, Side};
use crate::tensor::Tensor;
use crate::tensor::device::Device;

pub use crate::ops::attention::{CacheType, PAGE};

const MAGIC: &[u8; 8] = b"elapidst";
const VERSION: u32 = 1;
const N_HASH: usize = blake3::OUT_LEN;
/// Tokens that no sequence has; positions stay far from any overflow.
const N_TOK_MAX: u64 = u32::MAX as u64;

/// The state of one sequence in one mixer.
#[derive(Clone)]
pub enum MixerState {
    /// Keys and values so far.
    Attention(KvCache),
    /// The last inputs of the convolution, and the state of the recurrence.
    Recurrent {
        /// (d_conv - 1, channels).
        window: Tensor,
        /// As the op wants it.
        state: Tensor,
    },
    /// The last inputs of a convolution.
    Window(Tensor),
    /// Of two mixers side by side.
    Parallel(Box<MixerState>, Box<MixerState>),
}

/// The state of one sequence in all layers.
#[derive(Clone)]
pub struct State {
    /// Per layer.
    pub layers: Vec<MixerState>,
    /// Tokens seen.
    pub n_tok: usize,
    /// `shape_hash` of the model.
    shape: [u8; N_HASH],
}

impl State {
    /// Before the first token, with caches in f32.
    pub fn new(device: &Device, config: &Config) -> State {
        State::with_cache(device, config, CacheType::F32).expect("f32 takes rows of any width")
    }

    /// Before the first token, with caches of this type, if the heads of the model allow it.
    pub fn with_cache(device: &Device, config: &Config, kind: CacheType) -> Result<State> {
        let layers = config.layers.iter();
        let layers =
            layers.map(|layer| MixerState::new(device, &layer.mixer, config.d_model, kind));
        let layers = layers.collect::<Result<_>>()?;
        Ok(State { layers, n_tok: 0, shape: shape_hash(config) })
    }

    /// How its keys and values are stored; f32 where there are none.
    pub fn cache_type(&self) -> CacheType {
        self.layers.iter().find_map(MixerState::cache_type).unwrap_or_default()
    }

    /// Whether it grows with every token.
    pub(crate) fn has_cache(&self) -> bool {
        self.layers.iter().any(|layer| layer.cache_type().is_some())
    }

    /// Bytes it holds; what clones share is counted for each of them.
    pub fn n_bytes(&self) -> usize {
        self.parts().iter().map(|part| part.1).sum()
    }

    /// What it holds, piece by piece: a number that pieces of several states have in common only
    /// if they are the same memory, and the bytes.
    pub fn parts(&self) -> Vec<(usize, usize)> {
        let mut list = Vec::new();
        self.layers.iter().for_each(|layer| layer.list_parts(&mut list));
        list
    }

    /// Whether recorded work may go on with it: what it writes is nobody else's.
    pub(crate) fn can_step(&mut self) -> bool {
        let n_tok = self.n_tok;
        self.layers.iter_mut().all(|layer| layer.can_step(n_tok))
    }

    /// Where everything is that a step writes, on a graphics processor.
    pub(crate) fn places(&self) -> Vec<u64> {
        let mut list = Vec::new();
        self.layers.iter().for_each(|layer| layer.list_places(&mut list));
        list
    }

    /// Notes a token that recorded work has taken.
    pub(crate) fn step_on(&mut self) {
        self.n_tok += 1;
        self.layers.iter_mut().for_each(MixerState::step_on);
    }

    /// Bytes that a state holds before the first token, without making one.
    pub fn n_bytes_at_start(config: &Config) -> usize {
        let shapes = config.layers.iter().flat_map(|layer| match &layer.mixer {
            MixerConfig::Attention(_) => Vec::new(),
            MixerConfig::Mamba1(c) => mamba1_shapes(c).to_vec(),
            MixerConfig::Mamba2(c) | MixerConfig::Parallel(c, _) => mamba2_shapes(c).to_vec(),
            MixerConfig::ShortConv(c) => vec![vec![c.d_conv - 1, config.d_model]],
        });
        shapes.map(|shape| shape.iter().product::<usize>() * 4).sum()
    }

    /// Hands what `read` reads to `sink`, piece by piece.
    pub fn write(&self, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut hasher = blake3::Hasher::new();
        let mut put = |bytes: &[u8]| {
            hasher.update(bytes);
            sink(bytes)
        };
        put(MAGIC)?;
        put(&VERSION.to_le_bytes())?;
        put(&self.shape)?;
        put(&[cache_code(self.cache_type())])?;
        put(&(self.n_tok as u64).to_le_bytes())?;
        for layer in &self.layers {
            layer.write(self.n_tok, &mut put)?;
            layer.check_device()?;
        }
        let hash = hasher.finalize();
        sink(hash.as_bytes())
    }

    /// Reads what `write` wrote for a model of the same shape; `file` is for messages.
    pub fn read(file: &str, bytes: &[u8], device: &Device, config: &Config) -> Result<State> {
        let mut source = Source { file, left: bytes };
        if source.take(MAGIC.len())? != MAGIC {
            return Err(source.error("it does not begin as the state of a sequence does"));
        }
        let version = u32::from_le_bytes(source.array()?);
        if version != VERSION {
            let problem = format!("it has version {version}, this program reads {VERSION}");
            return Err(source.error(problem));
        }
        let (body, hash) = bytes.split_at(bytes.len().saturating_sub(N_HASH));
        if blake3::hash(body).as_bytes() != hash {
            return Err(source.error("it is damaged: the hash at its end is not that of its bytes"));
        }
        if source.array()? != shape_hash(config) {
            return Err(source.error("it belongs to a model of another shape"));
        }
        let [code] = source.array()?;
        let Some(kind) = CacheType::ALL.into_iter().find(|kind| cache_code(*kind) == code) else {
            return Err(source.error(format!("it has caches of the unknown type {code}")));
        };
        let n_tok = u64::from_le_bytes(source.array()?);
        if n_tok > N_TOK_MAX {
            return Err(source.error(format!("it says that it has seen {n_tok} tokens")));
        }
        let mut state = State::with_cache(device, config, kind)?;
        state.n_tok = n_tok as usize;
        for layer in &mut state.layers {
            layer.read(state.n_tok, &mut source)?;
        }
        match source.left.len() {
            N_HASH => Ok(state),
            n_left => Err(source.error(format!("{n_left} bytes are left where {N_HASH} belong"))),
        }
    }
}

/// The number of a type in a file.
fn cache_code(kind: CacheType) -> u8 {
    match kind {
        CacheType::F32 => 0,
        CacheType::F16 => 1,
        CacheType::Q8_0 => 2,
    }
}

/// Tells models apart whose states are not for each other: vocabulary, width, and what every mixer
/// is and how large.
fn shape_hash(config: &Config) -> [u8; N_HASH] {
    let mut hasher = blake3::Hasher::new();
    let mut put = |n: usize| _ = hasher.update(&(n as u64).to_le_bytes());
    [config.n_vocab, config.d_model, config.layers.len()].into_iter().for_each(&mut put);
    for layer in &config.layers {
        mixer_facts(&layer.mixer).into_iter().for_each(&mut put);
    }
    *hasher.finalize().as_bytes()
}

fn mixer_facts(mixer: &MixerConfig) -> Vec<usize> {
    let attention = |c: &AttentionConfig| {
        let window = c.dims.window.unwrap_or(usize::MAX);
        vec![1, c.dims.n_head, c.dims.n_kv_head, c.dims.d_head, window]
    };
    let mamba2 = |c: &Mamba2Config| vec![3, c.n_head, c.d_head, c.n_group, c.d_state, c.d_conv];
    match mixer {
        MixerConfig::Attention(c) => attention(c),
        MixerConfig::Mamba1(c) => vec![2, c.d_inner, c.d_state, c.d_conv, c.delta_rank],
        MixerConfig::Mamba2(c) => mamba2(c),
        MixerConfig::ShortConv(c) => vec![4, c.d_conv],
        MixerConfig::Parallel(a, b) => [vec![5], mamba2(a), attention(b)].concat(),
    }
}

/// Bytes of a file that have not been read.
struct Source<'a> {
    file: &'a str,
    left: &'a [u8],
}

impl<'a> Source<'a> {
    fn error(&self, problem: impl Into<String>) -> Error {
        Error::format(self.file, problem, "read the prompt again and save its state anew")
    }

    fn take(&mut self, n_bytes: usize) -> Result<&'a [u8]> {
        match self.left.split_off(..n_bytes) {
            Some(bytes) => Ok(bytes),
            None => {
                let n_left = self.left.len();
                Err(self.error(format!("{n_bytes} bytes should follow, {n_left} are there")))
            }
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("as many bytes as were taken"))
    }

    fn tensor(&mut self, tensor: &mut Tensor) -> Result<()> {
        let bytes = self.take(tensor.n_bytes())?;
        let numbers = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        tensor.write_f32(&numbers.collect::<Vec<_>>());
        Ok(())
    }
}

/// Window and state.
fn mamba1_shapes(c: &Mamba1Config) -> [Vec<usize>; 2] {
    [vec![c.d_conv - 1, c.d_inner], vec![c.d_state, c.d_inner]]
}

/// Window and state.
fn mamba2_shapes(c: &Mamba2Config) -> [Vec<usize>; 2] {
    let channels = c.d_inner() + 2 * c.n_group * c.d_state;
    [vec![c.d_conv - 1, channels], vec![c.n_head, c.d_state, c.d_head]]
}

impl MixerState {
    fn new(
        device: &Device,
        mixer: &MixerConfig,
        d_model: usize,
        kind: CacheType,
    ) -> Result<MixerState> {
        let zeros = |shape: &[usize]| Tensor::zeros(device, shape);
        let recurrent = |[window, state]: [Vec<usize>; 2]| MixerState::Recurrent {
            window: zeros(&window),
            state: zeros(&state),
        };
        let cache = |c: &AttentionConfig| {
            KvCache::with_type(device, c.dims.n_kv_head, c.dims.d_head, kind)
                .map(MixerState::Attention)
        };
        Ok(match mixer {
            MixerConfig::Attention(c) => cache(c)?,
            MixerConfig::Mamba1(c) => recurrent(mamba1_shapes(c)),
            MixerConfig::Mamba2(c) => recurrent(mamba2_shapes(c)),
            MixerConfig::ShortConv(c) => MixerState::Window(zeros(&[c.d_conv - 1, d_model])),
            MixerConfig::Parallel(mamba, attention) => MixerState::Parallel(
                Box::new(recurrent(mamba2_shapes(mamba))),
                Box::new(cache(attention)?),
            ),
        })
    }

    fn cache_type(&self) -> Option<CacheType> {
        match self {
            MixerState::Attention(cache) => Some(cache.kind()),
            MixerState::Recurrent { .. } | MixerState::Window(_) => None,
            MixerState::Parallel(a, b) => a.cache_type().or(b.cache_type()),
        }
    }

    /// Tells whether what was brought over is what was there.
    fn check_device(&self) -> Result<()> {
        match self {
            MixerState::Attention(cache) => cache.check_device(),
            MixerState::Recurrent { window, .. } | MixerState::Window(window) => {
                window.device().check()
            }
            MixerState::Parallel(a, _) => a.check_device(),
        }
    }

    fn can_step(&mut self, n_tok: usize) -> bool {
        match self {
            MixerState::Attention(cache) => cache.n_tok() == n_tok && cache.can_step(),
            MixerState::Recurrent { window, state } => window.is_unique() && state.is_unique(),
            MixerState::Window(window) => window.is_unique(),
            MixerState::Parallel(a, b) => a.can_step(n_tok) && b.can_step(n_tok),
        }
    }

    fn list_places(&self, list: &mut Vec<u64>) {
        match self {
            MixerState::Attention(cache) => list.extend(cache.places().into_iter().flatten()),
            MixerState::Recurrent { window, state } => {
                list.extend([window, state].map(Tensor::cuda_address))
            }
            MixerState::Window(window) => list.push(window.cuda_address()),
            MixerState::Parallel(a, b) => {
                a.list_places(list);
                b.list_places(list);
            }
        }
    }

    fn step_on(&mut self) {
        match self {
            MixerState::Attention(cache) => cache.step_on(),
            MixerState::Recurrent { .. } | MixerState::Window(_) => {}
            MixerState::Parallel(a, b) => {
                a.step_on();
                b.step_on();
            }
        }
    }

    fn list_parts(&self, list: &mut Vec<(usize, usize)>) {
        let part = |tensor: &Tensor| (tensor.memory_id(), tensor.n_bytes());
        match self {
            MixerState::Attention(cache) => list.extend(cache.pages()),
            MixerState::Recurrent { window, state } => list.extend([window, state].map(part)),
            MixerState::Window(window) => list.push(part(window)),
            MixerState::Parallel(a, b) => {
                a.list_parts(list);
                b.list_parts(list);
            }
        }
    }

    fn write(&self, n_tok: usize, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self {
            MixerState::Recurrent { window, state } => {
                put(bytemuck::cast_slice(&window.to_vec()))?;
                put(bytemuck::cast_slice(&state.to_vec()))
            }
            MixerState::Window(window) => put(bytemuck::cast_slice(&window.to_vec())),
            MixerState::Attention(cache) if cache.n_tok() == n_tok => {
                let sides = [Side::Keys, Side::Values].into_iter();
                sides.flat_map(|side| cache.stored(side)).try_for_each(|bytes| put(&bytes))
            }
            MixerState::Attention(cache) => Err(Error::input(
                format!("a state of {n_tok} tokens has a cache of {}", cache.n_tok()),
                "truncate all its caches to one length before it is saved",
            )),
            MixerState::Parallel(a, b) => {
                a.write(n_tok, put)?;
                b.write(n_tok, put)
            }
        }
    }

    /// Fills a state before the first token.
    fn read(&mut self, n_tok: usize, source: &mut Source) -> Result<()> {
        match self {
            MixerState::Recurrent { window, state } => {
                source.tensor(window)?;
                source.tensor(state)
            }
            MixerState::Window(window) => source.tensor(window),
            MixerState::Attention(cache) => {
                let Some(n_bytes) = cache.n_bytes_stored(n_tok) else {
                    return Err(source.error(format!("it says that it has seen {n_tok} tokens")));
                };
                let (keys, values) = (source.take(n_bytes)?, source.take(n_bytes)?);
                cache.restore(n_tok, keys, values);
                Ok(())
            }
            MixerState::Parallel(a, b) => {
                a.read(n_tok, source)?;
                b.read(n_tok, source)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::Weights;
    use crate::model::{ForwardOptions, Model};
    use crate::tape::Tape;
    use crate::tensor::batch::Batch;
    use crate::tensor::rng::Rng;

    /// A small model with a layer of every kind.
    fn fixture(device: &Device) -> (Model, Weights) {
        let config = serde_json::json!({
            "model_type": "elapid", "vocab_size": 40, "d_model": 16,
            "layers": ["mamba1", {"mixer": "short_conv", "feed_forward": "dense"}, "mamba2",
                       "attention"],
            "tied": true, "eps": 1e-3, "init_std": 0.2, "n_ctx": 64,
            "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
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

    fn saved(state: &State) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut sink = |piece: &[u8]| {
            bytes.extend(piece);
            Ok(())
        };
        state.write(&mut sink).unwrap();
        bytes
    }

    fn tokens(n_tok: usize) -> Vec<u32> {
        (0..n_tok as u64).map(|n| Rng::new(5, 1).below(n, 40) as u32).collect()
    }

    #[test]
    fn a_state_that_was_written_and_read_goes_on_with_the_same_bits() {
        let device = Device::cpu(1).unwrap();
        let (model, weights) = fixture(&device);
        let tokens = tokens(2 * PAGE + 30);
        for kind in CacheType::ALL {
            for n_tok in [0, 1, PAGE - 1, PAGE, PAGE + 40] {
                let mut state = State::with_cache(&device, model.config(), kind).unwrap();
                if n_tok > 0 {
                    step(&model, &weights, &tokens[..n_tok], &mut state);
                }
                let bytes = saved(&state);
                let mut again = State::read("s", &bytes, &device, model.config()).unwrap();
                assert_eq!((again.n_tok, again.cache_type()), (n_tok, kind));
                assert!(saved(&again) == bytes, "{n_tok} tokens in {}", kind.name());
                for next in [n_tok..n_tok + 1, n_tok + 1..n_tok + 20, n_tok + 20..n_tok + 22] {
                    let want = step(&model, &weights, &tokens[next.clone()], &mut state);
                    let got = step(&model, &weights, &tokens[next], &mut again);
                    assert!(got == want, "{n_tok} tokens in {}", kind.name());
                }
            }
        }
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
        let kept = saved(&snapshot);
        let mut forks = [trunk.clone(), trunk.clone()];
        assert_eq!(device.memory().live, live, "a clone takes no memory");
        let first = step(&model, &weights, &tokens[PAGE + 7..PAGE + 8], &mut trunk);
        for fork in &mut forks {
            assert_eq!(step(&model, &weights, &tokens[PAGE + 7..PAGE + 8], fork), first);
            let rest = step(&model, &weights, &tokens[PAGE + 8..], fork);
            assert!(rest.iter().all(|x| x.is_finite()));
        }
        assert!(saved(&snapshot) == kept, "a snapshot changed");
        assert!(saved(&forks[0]) == saved(&forks[1]));
        // Two layers have caches; their first page is one for all.
        let shared = |a: &State, b: &State| {
            let of_b = b.parts();
            a.parts().iter().filter(|part| of_b.contains(part)).count()
        };
        assert_eq!((shared(&forks[0], &snapshot), shared(&trunk, &forks[1])), (2, 2));
    }

    #[test]
    fn every_cut_and_random_changes_of_a_saved_state_are_errors() {
        let device = Device::cpu(1).unwrap();
        let (model, weights) = fixture(&device);
        let mut state = model.state(&device);
        step(&model, &weights, &tokens(3), &mut state);
        let bytes = saved(&state);
        let read = |bytes: &[u8]| State::read("saved", bytes, &device, model.config());
        assert!(read(&bytes).is_ok());
        for n_left in 0..bytes.len() {
            assert!(read(&bytes[..n_left]).is_err(), "cut to {n_left} bytes");
        }
        let rng = Rng::new(11, 2);
        for n in 0..2000 {
            let mut changed = bytes.clone();
            changed[rng.below(2 * n, bytes.len() as u64) as usize] ^=
                1 + rng.below(2 * n + 1, 255) as u8;
            assert!(read(&changed).is_err(), "change {n}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(read(&longer).is_err());
    }

    /// Whoever makes up a file can make up its hash.
    #[test]
    fn a_saved_state_that_lies_under_a_right_hash_is_an_error() {
        let device = Device::cpu(1).unwrap();
        let (model, weights) = fixture(&device);
        let mut state = model.state(&device);
        step(&model, &weights, &tokens(3), &mut state);
        let bytes = saved(&state);
        let forged = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut body = bytes[..bytes.len() - N_HASH].to_vec();
            change(&mut body);
            let hash = blake3::hash(&body);
            let file = [&body[..], hash.as_bytes()].concat();
            State::read("saved", &file, &device, model.config())
        };
        assert!(forged(&|_| {}).is_ok());
        let n_tok_at = 8 + 4 + N_HASH + 1;
        for n_tok in [0, 2, 4, 1 << 20, u32::MAX as u64, 1 << 33, 1 << 61, u64::MAX] {
            let lie = move |body: &mut Vec<u8>| {
                body[n_tok_at..n_tok_at + 8].copy_from_slice(&n_tok.to_le_bytes());
            };
            assert!(forged(&lie).is_err(), "{n_tok} tokens");
        }
        for code in [1, 2, 3, 255] {
            assert!(forged(&move |body: &mut Vec<u8>| body[n_tok_at - 1] = code).is_err());
        }
        assert!(forged(&|body: &mut Vec<u8>| body.push(0)).is_err());
        assert!(forged(&|body: &mut Vec<u8>| _ = body.pop()).is_err());
        assert!(forged(&|body: &mut Vec<u8>| body.truncate(60)).is_err());
        assert!(forged(&|body: &mut Vec<u8>| body.truncate(5)).is_err());
    }

    /// Sets every number of a state before the first token; keys and values of `n_tok` tokens.
    fn fill(state: &mut State, n_tok: usize) {
        fn fill_mixer(mixer: &mut MixerState, n_tok: usize, seed: u64) {
            // What bf16 holds too, so that no device rounds it.
            let number = |n: u64| Rng::new(seed, 9).below(n, 255) as f32 / 64.0 - 2.0;
            let numbers = |n: usize| (0..n as u64).map(number).collect::<Vec<f32>>();
            match mixer {
                MixerState::Attention(cache) => {
                    let width = cache.n_bytes_stored(1).unwrap() / 4;
                    let both = numbers(2 * n_tok * width);
                    let (keys, values) = both.split_at(n_tok * width);
                    cache.append(keys, values);
                }
                MixerState::Recurrent { window, state } => {
                    window.write_f32(&numbers(window.n_elem()));
                    state.write_f32(&numbers(state.n_elem()));
                }
                MixerState::Window(window) => window.write_f32(&numbers(window.n_elem())),
                MixerState::Parallel(a, b) => {
                    fill_mixer(a, n_tok, seed + 100);
                    fill_mixer(b, n_tok, seed + 200);
                }
            }
        }
        state.n_tok = n_tok;
        for (idx, layer) in state.layers.iter_mut().enumerate() {
            fill_mixer(layer, n_tok, idx as u64);
        }
    }

    #[test]
    fn a_state_is_written_on_one_device_and_read_on_another() {
        let host = Device::cpu(1).unwrap();
        let (model, _) = fixture(&host);
        for n_tok in [0, 1, PAGE - 1, 2 * PAGE + 3] {
            let mut state = State::new(&host, model.config());
            fill(&mut state, n_tok);
            let bytes = saved(&state);
            for (device, _) in crate::ops::check::devices() {
                let there = State::read("s", &bytes, device, model.config()).unwrap();
                assert!(saved(&there) == bytes, "{device:?}: read, {n_tok} tokens");
                let mut made = State::new(device, model.config());
                fill(&mut made, n_tok);
                let bytes_there = saved(&made);
                assert!(bytes_there == bytes, "{device:?}: written, {n_tok} tokens");
                let back = State::read("s", &bytes_there, &host, model.config()).unwrap();
                assert!(saved(&back) == bytes, "{device:?}: back, {n_tok} tokens");
                assert_eq!(made.clone().parts(), made.parts());
                let error = State::with_cache(device, model.config(), CacheType::F16).err();
                assert!(error.unwrap().to_string().contains("not as f16"));
            }
        }
    }

    #[test]
    fn the_state_of_another_model_is_refused_by_name() {
        let device = Device::cpu(1).unwrap();
        let (model, _) = fixture(&device);
        let bytes = saved(&model.state(&device));
        let mut config = model.config().clone();
        config.layers.swap(0, 1);
        let error = State::read("old.state", &bytes, &device, &config).err().unwrap().to_string();
        assert!(error.contains("old.state: it belongs to a model of another shape"), "{error}");
        let mut state = model.state(&device);
        state.n_tok = 4;
        let error = state.write(&mut |_| Ok(())).err().unwrap().to_string();
        assert!(error.contains("a state of 4 tokens has a cache of 0"), "{error}");
    }
}
