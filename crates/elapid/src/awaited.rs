//! The same calls where nobody can wait, as in a browser: they are awaited there. Each is the code
//! that the plain call of the same name waits for. Those of paths are in `session/paths.rs`.

use crate::data::{Document, Encoded};
use crate::error::Result;
use crate::eval::{DocScore, EvalSettings};
use crate::generate::engine::{Engine, Event, RequestId};
use crate::session::Session;
use crate::tensor::device::Device;
use crate::tensor::devices::DeviceInfo;
use crate::tensor::gpu::Precision;
use crate::train::state::{Capture, Extent};
use crate::train::{Outcome, Training};
use serde_json::Value;

impl Device {
    /// Device by its name: `auto`, `cpu`, `wgpu`.
    pub async fn by_name(name: &str, precision: Precision, n_threads: usize) -> Result<Device> {
        Device::open(name, precision, n_threads).await
    }

    /// The devices of this machine.
    pub async fn list(n_threads: usize) -> Result<Vec<DeviceInfo>> {
        Device::listed(n_threads).await
    }
}

impl Training {
    /// The next step.
    pub async fn step(&mut self) -> Result<Outcome> {
        self.step_later().await
    }

    /// How well the model of a training predicts these documents.
    pub async fn score(&self, docs: &[Encoded], settings: &EvalSettings) -> Result<Vec<DocScore>> {
        self.score_later(docs, settings).await
    }

    /// A copy of what a checkpoint of this moment holds; `extra` comes back with it.
    pub async fn capture(&self, extent: Extent, extra: &Value) -> Result<Capture> {
        let capture = self.capture_later(extent, extra).await;
        self.trainer.weights.device().check()?;
        Ok(capture)
    }
}

impl Engine {
    /// Advances everything that runs by a little.
    pub async fn step(&mut self) -> Vec<(RequestId, Event)> {
        self.step_later().await
    }

    /// One vector of length one for a text.
    pub async fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        self.embed_later(ids).await
    }
}

impl Session {
    /// One vector of length one for a text.
    pub async fn embed(&mut self, text: &str) -> Result<Vec<f32>> {
        self.embed_later(text).await
    }

    /// How well the model predicts each of these documents.
    pub async fn score(
        &mut self,
        documents: &[Document],
        settings: &EvalSettings,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<DocScore>> {
        self.score_later(documents, settings, on_progress).await
    }
}
