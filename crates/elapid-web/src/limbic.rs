//! The recurrent head over a state of eight numbers.

use crate::failure::{Done, options};
use elapid::{Device, Limbic, LimbicSample, LimbicSettings, LimbicState};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use wasm_bindgen::prelude::*;

/// A head. It is so small that the CPU is the fastest device.
#[wasm_bindgen]
pub struct WebLimbic(Limbic);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainOptions {
    epochs: Option<usize>,
    length: Option<usize>,
    lr: Option<f64>,
    seed: Option<u64>,
}

#[wasm_bindgen]
impl WebLimbic {
    /// A new head.
    pub fn create(inputs: usize, hidden: usize, seed: u32) -> Done<WebLimbic> {
        Ok(WebLimbic(Limbic::new(inputs, hidden, u64::from(seed), &Device::cpu(1)?)?))
    }

    /// One that was saved.
    pub fn load(bytes: Vec<u8>) -> Done<WebLimbic> {
        Ok(WebLimbic(Limbic::from_bytes("head", &bytes, &Device::cpu(1)?)?))
    }

    /// Learns from samples, each as JSON; the loss of every epoch.
    pub fn train(&mut self, samples: Vec<String>, json: String) -> Done<Vec<f64>> {
        let options: TrainOptions = options(&json)?;
        let samples = samples.iter().map(|it| it.parse::<LimbicSample>());
        let samples = samples.collect::<Result<Vec<_>, _>>()?;
        let default = LimbicSettings::default();
        let settings = LimbicSettings {
            n_epochs: options.epochs.unwrap_or(default.n_epochs),
            length: options.length.unwrap_or(default.length),
            lr: options.lr.unwrap_or(default.lr),
            seed: options.seed.unwrap_or(default.seed),
            ..default
        };
        let mut losses = Vec::new();
        self.0.train(&samples, &settings, |_, loss| {
            losses.push(loss);
            ControlFlow::Continue(())
        })?;
        Ok(losses)
    }

    /// The next state, as JSON; `hidden` is the memory of the head, none at first.
    pub fn step(&self, state: String, input: Vec<f32>, hidden: Vec<f32>) -> Done<String> {
        let mut state: LimbicState = options(&state)?;
        let mut hidden = hidden;
        let reward = self.0.step(&mut state, &mut hidden, &input)?;
        Ok(json!({ "state": state, "reward": reward, "hidden": hidden }).to_string())
    }

    /// As a file.
    pub fn save(&self) -> Done<Vec<u8>> {
        Ok(self.0.to_bytes()?)
    }
}

/// Where a personality rests: names and 0 to 100 as JSON, to a state as JSON.
#[wasm_bindgen(js_name = setPoint)]
pub fn set_point(personality: &str) -> Done<String> {
    let traits: BTreeMap<String, f32> = options(personality)?;
    let state = LimbicState::set_point(traits.iter().map(|(name, x)| (name.as_str(), *x)))?;
    Ok(serde_json::to_value(state).unwrap_or(Value::Null).to_string())
}
