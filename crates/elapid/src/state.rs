//! What a sequence carries between tokens: per layer a key-value cache, or a window and a state.
//!
//! A clone is a snapshot: it shares nothing with the original, so a sequence can be forked.

use crate::config::{AttentionConfig, Config, Mamba1Config, Mamba2Config, MixerConfig};
use crate::device::Device;
use crate::ops::attention::KvCache;
use crate::tensor::Tensor;

/// The state of one sequence in one mixer.
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
}

impl State {
    /// Before the first token.
    pub fn new(device: &Device, config: &Config) -> State {
        let layers = config.layers.iter();
        let layers = layers.map(|layer| MixerState::new(device, &layer.mixer, config.d_model));
        State { layers: layers.collect(), n_tok: 0 }
    }

    /// Bytes it holds.
    pub fn n_bytes(&self) -> usize {
        self.layers.iter().map(MixerState::n_bytes).sum()
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
    fn new(device: &Device, mixer: &MixerConfig, d_model: usize) -> MixerState {
        let zeros = |shape: &[usize]| Tensor::zeros(device, shape);
        let recurrent = |[window, state]: [Vec<usize>; 2]| MixerState::Recurrent {
            window: zeros(&window),
            state: zeros(&state),
        };
        let cache = |c: &AttentionConfig| {
            MixerState::Attention(KvCache::new(device, c.dims.n_kv_head, c.dims.d_head))
        };
        match mixer {
            MixerConfig::Attention(c) => cache(c),
            MixerConfig::Mamba1(c) => recurrent(mamba1_shapes(c)),
            MixerConfig::Mamba2(c) => recurrent(mamba2_shapes(c)),
            MixerConfig::ShortConv(c) => MixerState::Window(zeros(&[c.d_conv - 1, d_model])),
            MixerConfig::Parallel(mamba, attention) => MixerState::Parallel(
                Box::new(recurrent(mamba2_shapes(mamba))),
                Box::new(cache(attention)),
            ),
        }
    }

    fn n_bytes(&self) -> usize {
        match self {
            MixerState::Attention(cache) => cache.n_bytes(),
            MixerState::Recurrent { window, state } => window.n_bytes() + state.n_bytes(),
            MixerState::Window(window) => window.n_bytes(),
            MixerState::Parallel(a, b) => a.n_bytes() + b.n_bytes(),
        }
    }
}

impl Clone for MixerState {
    fn clone(&self) -> MixerState {
        match self {
            MixerState::Attention(cache) => MixerState::Attention(cache.clone()),
            MixerState::Recurrent { window, state } => {
                MixerState::Recurrent { window: window.to_f32(), state: state.to_f32() }
            }
            MixerState::Window(window) => MixerState::Window(window.to_f32()),
            MixerState::Parallel(a, b) => MixerState::Parallel(a.clone(), b.clone()),
        }
    }
}
