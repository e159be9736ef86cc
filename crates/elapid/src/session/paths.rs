//! What a session opens and writes by its path.

use super::Session;
use crate::error::Result;
use crate::files::disk;
use crate::model::checkpoint::Checkpoint;
use crate::model::save::{Form, Save};
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use crate::tensor::gpu::later::wait;
use crate::train::state::{Capture, Extent, Saved};
use crate::train::{Training, method};
use serde_json::Value;
use std::path::Path;

impl Session {
    /// Opens a model by its path; see `Model::open`.
    pub fn open(path: impl AsRef<Path>, device: &Device) -> Result<Session> {
        Session::new(Checkpoint::open(path)?, device)
    }

    /// Writes what was trained: an adapter as a PEFT directory (or `.gguf`), otherwise the model as
    /// a `.gguf` file, an `.elapid` package, or a directory for transformers.
    /// Awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        wait(self.save_later(path.as_ref()))
    }

    /// The same in the middle of a training.
    #[cfg(not(target_family = "wasm"))]
    pub fn save_from(&self, training: &Training, path: impl AsRef<Path>) -> Result<()> {
        wait(self.save_weights(&training.trainer.weights, path.as_ref()))
    }

    /// Writes what was trained.
    #[cfg(target_family = "wasm")]
    pub async fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.save_later(path.as_ref()).await
    }

    /// The same in the middle of a training.
    #[cfg(target_family = "wasm")]
    pub async fn save_from(&self, training: &Training, path: impl AsRef<Path>) -> Result<()> {
        self.save_weights(&training.trainer.weights, path.as_ref()).await
    }

    async fn save_later(&mut self, path: &Path) -> Result<()> {
        self.learner(0)?;
        let learner = self.learner.as_ref().expect("it was just made");
        self.save_weights(&learner.weights, path).await
    }

    async fn save_weights(&self, weights: &Weights, path: &Path) -> Result<()> {
        let device = weights.device();
        if let Some(mut lora) = self.method.as_ref().and_then(|it| method::adapter(it, weights)) {
            let host = device.host_device();
            for module in &mut lora.modules {
                let tensors = [&mut module.a, &mut module.b].into_iter();
                for tensor in tensors.chain(&mut module.magnitude) {
                    *tensor = tensor.read_to(&host).await;
                }
            }
            device.check()?;
            lora.base = lora.base.or(self.model.is_stored().then(|| self.model.name().to_string()));
            lora.save(path, Some(&self.model))?;
            return Ok(());
        }
        let weights = weights.read_to_host().await;
        device.check()?;
        let (form, on_bytes) = (Form::from(path), &mut |_, _| {});
        Save { path, form, mix: None, on_bytes }.write(&self.model, &weights)?;
        Ok(())
    }
}

impl Training {
    /// Writes a checkpoint that [`Training::resume`] continues from to the bit; `extra` is the
    /// caller's and comes back with it.
    #[cfg(not(target_family = "wasm"))]
    pub fn save(&self, path: impl AsRef<Path>, extra: &Value) -> Result<()> {
        self.capture(Extent::Run, extra).save(path)
    }

    /// Writes a checkpoint.
    #[cfg(target_family = "wasm")]
    pub async fn save(&self, path: impl AsRef<Path>, extra: &Value) -> Result<()> {
        self.capture(Extent::Run, extra).await?.save(path)
    }

    /// Continues from a checkpoint that the same model, data and settings wrote.
    pub fn resume(&mut self, path: impl AsRef<Path>) -> Result<Saved> {
        let saved = Saved::open(path)?;
        saved.restore(self)?;
        Ok(saved)
    }
}

impl Capture {
    /// Writes it as a checkpoint.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        disk::write(path.as_ref(), |sink| self.write_to(sink))?;
        Ok(())
    }
}

impl Saved {
    /// Reads and verifies a checkpoint.
    pub fn open(path: impl AsRef<Path>) -> Result<Saved> {
        let path = path.as_ref();
        Saved::parse(&path.display().to_string(), disk::map(path)?)
    }
}
