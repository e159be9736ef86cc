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
use crate::tensor::{DType, SharedBytes, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

const JSON: &str = "state.json";
const TENSORS: &str = "state.safetensors";
const HINT: &str = "the checkpoint belongs to another run, or to another version of Elapid";

#[derive(Serialize, Deserialize)]
struct State {
    progress: Progress,
    extra: Value,
}

/// Writes a checkpoint of `training`; `extra` comes back from `restore`.
pub fn write(training: &Training, extra: &Value, sink: &mut Sink) -> Result<()> {
    let state = State { progress: training.progress().clone(), extra: extra.clone() };
    let json = serde_json::to_vec_pretty(&state).map_err(|error| {
        Error::input(format!("the state of the run: {error}"), "this is a defect of Elapid")
    })?;
    let json: OutFile = Box::new(|sink| sink(&json));
    let tensors: OutFile = Box::new(|sink| {
        let weights = &training.trainer.weights;
        let trained = weights.trained();
        let trained =
            trained.iter().map(|&id| (format!("p.{}", weights.name(id)), weights.tensor(id)));
        let kept = training.trainer.optimizer.state();
        let list: Vec<Outgoing> =
            trained.chain(kept).map(|(name, tensor)| outgoing(name, tensor)).collect();
        safetensors::write("elapid run", &list, sink)
    });
    let step = training.progress().step;
    package::write(&format!("step {step}"), &[(JSON.into(), json), (TENSORS.into(), tensors)], sink)
}

fn outgoing(name: String, tensor: &Tensor) -> Outgoing<'_> {
    let bytes = move || Ok(tensor.to_bytes());
    Outgoing { name, shape: tensor.shape().to_vec(), dtype: DType::F32, bytes: Box::new(bytes) }
}

/// A checkpoint whose every byte is as it was written.
pub struct Saved {
    state: State,
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
        let state = serde_json::from_slice((*part(JSON)?).as_ref())
            .map_err(|error| Error::format(file, format!("{JSON}: {error}"), HINT))?;
        let tensors = SafeTensors::parse(file, part(TENSORS)?)?;
        Ok(Saved { state, tensors })
    }

    /// Steps that were made.
    pub fn step(&self) -> u64 {
        self.state.progress.step
    }

    /// What the caller gave to `write`.
    pub fn extra(&self) -> &Value {
        &self.state.extra
    }

    /// Puts the run back to where it was.
    pub fn restore(&self, training: &mut Training) -> Result<()> {
        self.restore_weights(training)?;
        let file = &self.tensors;
        let trainer = &mut training.trainer;
        let mut get = |name: &str| self.tensor(&trainer.weights, name);
        trainer.optimizer.restore(self.state.progress.step, &mut get)?;
        let want = trainer.weights.trained().len() + trainer.optimizer.state().len();
        let got = file.names().len();
        if want != got {
            let problem = format!("holds {got} tensors, the run has {want}");
            return Err(Error::format(file.file(), problem, HINT));
        }
        training.set_progress(self.state.progress.clone())
    }

    /// Puts back the trained parameters alone.
    pub fn restore_weights(&self, training: &mut Training) -> Result<()> {
        let weights = &mut training.trainer.weights;
        for id in weights.trained() {
            let name = format!("p.{}", weights.name(id));
            let saved = self.tensor(weights, &name)?;
            let want = weights.tensor(id).shape();
            if saved.shape() != want {
                let (file, name) = (self.tensors.file().to_string(), name);
                let (got, want) = (saved.shape().to_vec(), want.to_vec());
                return Err(Error::WrongShape { name, file, got, want });
            }
            weights.tensor_mut(id).write_f32(&saved.to_vec());
        }
        training.trainer.refresh();
        Ok(())
    }

    fn tensor(&self, weights: &crate::model::weights::Weights, name: &str) -> Result<Tensor> {
        let device = weights.device();
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
