//! A checkpoint of a run, as one package: what is trained, the optimizer's moments, and where the
//! run is.
//!
//! ```text
//! state.json          {"progress": {...}, "extra": {...}}, `extra` for the caller
//! state.safetensors   `p.<name>` for every trained parameter, and what the optimizer keeps
//! ```
//!
//! Numbers are f32 as they are in memory: what is read is what was written, to the bit. The
//! package's manifest comes last and holds a hash of each file, so that a checkpoint that was cut
//! short is known.

use super::{Progress, Training};
use crate::error::{Error, Result};
use crate::files::package::{self, OutFile, Package};
use crate::files::safetensors::{self, SafeTensors};
use crate::files::{Outgoing, Sink, TensorFile};
use crate::model::weights::Weights;
use crate::tensor::device::Device;
#[cfg(not(target_family = "wasm"))]
use crate::tensor::gpu::later::wait;
use crate::tensor::{DType, SharedBytes, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;

const JSON: &str = "state.json";
const TENSORS: &str = "state.safetensors";
const HINT: &str = "the checkpoint belongs to another run, or to another version of Elapid";

#[derive(Serialize, Deserialize)]
struct State {
    progress: Progress,
    extra: Value,
}

/// A copy of what a checkpoint holds, to be written, perhaps by another thread.
pub struct Capture {
    /// Steps that were made.
    pub step: u64,
    state: State,
    tensors: Vec<Captured>,
}

/// Name, shape and the bytes of f32.
type Captured = (String, Vec<usize>, Vec<u8>);

/// How much of a run is captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All that a resume needs.
    Run,
    /// The trained parameters.
    Weights,
}

impl Training {
    /// A copy of what a checkpoint of this moment holds; `extra` comes back with [`Saved`]. Fails
    /// where there are several ranks and one does not answer. Awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn capture(&self, extent: Extent, extra: &Value) -> Result<Capture> {
        wait(self.capture_later(extent, extra))
    }

    pub(crate) async fn capture_later(&self, extent: Extent, extra: &Value) -> Result<Capture> {
        let weights = &self.trainer.weights;
        let trained = weights.trained().into_iter();
        let trained = trained.map(|id| (format!("p.{}", weights.name(id)), weights.tensor(id)));
        let (kept, team) = match (extent, &self.trainer.team) {
            (Extent::Weights, _) => (Vec::new(), None),
            (Extent::Run, None) => (self.trainer.optimizer.state(), None),
            (Extent::Run, Some(team)) => (Vec::new(), Some(team)),
        };
        let mut tensors: Vec<Captured> = Vec::new();
        for (name, tensor) in trained.chain(kept) {
            let bytes = tensor.read_bytes().await.into_owned();
            tensors.push((name, tensor.shape().to_vec(), bytes));
        }
        if let Some(team) = team {
            let mut take = |name, shape, bytes| tensors.push((name, shape, bytes));
            team.collect(&self.trainer.optimizer, &mut take)?;
        }
        let state = State { progress: self.progress().clone(), extra: extra.clone() };
        Ok(Capture { step: state.progress.step, state, tensors })
    }
}

fn outgoing((name, shape, bytes): &Captured) -> Outgoing<'_> {
    let (name, shape) = (name.clone(), shape.clone());
    let bytes = Box::new(|| Ok(Cow::Borrowed(&bytes[..])));
    Outgoing { name, shape, dtype: DType::F32, bytes }
}

impl Capture {
    pub(crate) fn write_to(&self, sink: &mut Sink) -> Result<()> {
        let json = serde_json::to_vec_pretty(&self.state).map_err(|error| {
            Error::input(format!("the state of the run: {error}"), "this is a defect of Elapid")
        })?;
        let json: OutFile = Box::new(|sink| sink(&json));
        let tensors: OutFile = Box::new(|sink| {
            let list: Vec<Outgoing> = self.tensors.iter().map(outgoing).collect();
            safetensors::write(&[("format", "elapid run")], &list, sink)
        });
        let files = [(JSON.into(), json), (TENSORS.into(), tensors)];
        package::write(&format!("step {}", self.step), &files, sink)
    }
}

/// A checkpoint whose every byte is as it was written.
pub struct Saved {
    /// Steps that were made.
    pub step: u64,
    /// What the caller of [`Training::capture`] gave.
    pub extra: Value,
    progress: Progress,
    tensors: SafeTensors,
}

impl Saved {
    /// Reads and verifies one; `file` is its name for messages.
    pub(crate) fn parse(file: &str, bytes: SharedBytes) -> Result<Saved> {
        let package = Package::parse(file, bytes)?;
        package.verify()?;
        let part = |name: &str| {
            let missing = || Error::format(file, format!("there is no `{name}` in it"), HINT);
            package.get(name).ok_or_else(missing)
        };
        let State { progress, extra } = serde_json::from_slice((*part(JSON)?).as_ref())
            .map_err(|error| Error::format(file, format!("{JSON}: {error}"), HINT))?;
        let tensors = SafeTensors::parse(file, part(TENSORS)?)?;
        Ok(Saved { step: progress.step, extra, progress, tensors })
    }

    /// Puts the run back to where it was.
    pub fn restore(&self, training: &mut Training) -> Result<()> {
        self.restore_weights(training)?;
        let file = &self.tensors;
        let trainer = &mut training.trainer;
        let host = trainer.weights.device().host_device();
        let mut get = |name: &str| self.tensor(&host, name);
        trainer.optimizer.restore(self.step, &mut get)?;
        let want = trainer.weights.trained().len() + trainer.optimizer.names().len();
        let got = file.names().len();
        if want != got {
            let problem = format!("holds {got} tensors, the run has {want}");
            return Err(Error::format(file.file(), problem, HINT));
        }
        training.set_progress(self.progress.clone())
    }

    /// Puts back the trained parameters alone.
    pub fn restore_weights(&self, training: &mut Training) -> Result<()> {
        self.write_weights(&mut training.trainer.weights, 1.0)?;
        training.trainer.refresh();
        Ok(())
    }

    /// Moves the trained parameters of `weights` by this share of the way to those that are saved.
    pub(crate) fn write_weights(&self, weights: &mut Weights, share: f32) -> Result<()> {
        let host = weights.device().host_device();
        for id in weights.trained() {
            let name = format!("p.{}", weights.name(id));
            let saved = self.tensor(&host, &name)?;
            let want = weights.tensor(id).shape();
            if saved.shape() != want {
                let (file, name) = (self.tensors.file().to_string(), name);
                let (got, want) = (saved.shape().to_vec(), want.to_vec());
                return Err(Error::WrongShape { name, file, got, want });
            }
            let mut numbers = saved.to_vec();
            if share != 1.0 {
                let old = weights.tensor(id).to_f32().to_vec();
                let pairs = numbers.iter_mut().zip(old);
                pairs.for_each(|(new, old)| *new = old + share * (*new - old));
            }
            weights.tensor_mut(id).write_f32(&numbers);
        }
        Ok(())
    }

    fn tensor(&self, device: &Device, name: &str) -> Result<Tensor> {
        let found = self.tensors.tensor(device, name)?;
        let missing = || Error::format(self.tensors.file(), format!("holds no `{name}`"), HINT);
        let tensor = found.ok_or_else(missing)?;
        match tensor.dtype() {
            DType::F32 => Ok(tensor),
            other => {
                let problem = format!("`{name}` is {}, not f32", other.name());
                Err(Error::format(self.tensors.file(), problem, HINT))
            }
        }
    }
}
