//! What goes wrong is seen and said: numbers that are not finite, what does not fit together.

use crate::error::Error;
use crate::model::config::Config;
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::train::{StepSettings, Trainer};
use serde_json::json;

const TOKENS: [u32; 6] = [1, 2, 3, 4, 5, 6];

fn model() -> Model {
    let config = json!({
        "model_type": "elapid", "vocab_size": 12, "d_model": 16,
        "layers": ["mamba1", "mamba2", "mamba3", "short_conv",
                   {"mixer": "attention", "feed_forward": "experts"}],
        "mamba2": {"d_head": 8}, "mamba3": {"d_head": 8, "d_state": 8, "rank": 2},
        "attention": {"n_head": 2}, "dense": {"activation": "relu"},
    });
    Model::new(Config::from_json("config.json", &config.to_string()).unwrap())
}

fn targets<'a>() -> Targets<'a> {
    Targets { ids: &[2, 3, 4, 5, 6, 7], weights: &[1.0; 6], norm: 6.0 }
}

/// Every parameter, with one of its numbers made NaN.
#[test]
fn a_nan_in_any_parameter_stops_a_step_and_changes_nothing() {
    let device = Device::cpu(2).unwrap();
    let model = model();
    let n_params = model.specs().len();
    let mut trainer = {
        let weights = Weights::init(&device, model.specs(), 0);
        Trainer::new(model, weights)
    };
    let batch = Batch::from_sequences(&[&TOKENS]);
    for idx in 0..n_params {
        let id = crate::model::weights::ParamId(idx);
        let name = trainer.weights.name(id).to_string();
        // Tokens that are not in the batch and experts that are not chosen are not read.
        if name == "embed.weight" || name.contains("experts.") {
            continue;
        }
        let tensor = trainer.weights.tensor_mut(id).f32_mut();
        let (at, kept) = (tensor.len() / 2, tensor[tensor.len() / 2]);
        tensor[at] = f32::NAN;
        let before: Vec<Vec<u8>> =
            trainer.weights.ids().map(|id| trainer.weights.tensor(id).bytes().to_vec()).collect();
        let result = trainer.step(&batch, &targets(), &StepSettings::default());
        assert!(matches!(result, Err(Error::Diverged { .. })), "{name}: {result:?}");
        for id in trainer.weights.ids() {
            assert!(trainer.weights.tensor(id).bytes() == before[id.0], "{name} changed something");
        }
        trainer.weights.tensor_mut(id).f32_mut()[at] = kept;
    }
    assert!(trainer.step(&batch, &targets(), &StepSettings::default()).is_ok());
}

#[test]
fn targets_that_do_not_fit_are_errors() {
    let device = Device::cpu(1).unwrap();
    let model = model();
    let weights = Weights::init(&device, model.specs(), 0);
    let batch = Batch::from_sequences(&[&TOKENS]);
    let problem = |targets: Targets| {
        let tape = Tape::off();
        let loss = model.loss(&tape, &weights, &batch, &targets, ForwardOptions::default());
        loss.err().unwrap().report()
    };
    let good = targets();
    assert!(problem(Targets { ids: &good.ids[1..], ..good }).contains("5 targets"));
    let outside = [2, 3, 12, 5, 6, 7];
    assert!(problem(Targets { ids: &outside, ..good }).contains("target 12 is outside"));
    assert!(problem(Targets { norm: 0.0, ..good }).contains("sum to 0"));
    // Where the weight is zero the id does not matter.
    let weights_of = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0];
    let masked = Targets { ids: &outside, weights: &weights_of, norm: 5.0 };
    let tape = Tape::off();
    assert!(model.loss(&tape, &weights, &batch, &masked, ForwardOptions::default()).is_ok());
}

#[test]
fn states_that_do_not_fit_are_errors() {
    let device = Device::cpu(1).unwrap();
    let model = model();
    let weights = Weights::init(&device, model.specs(), 0);
    let tape = Tape::off();
    let options = ForwardOptions::default();
    let mut states = [model.state(&device)];
    let two = Batch::from_sequences(&[&TOKENS, &TOKENS]);
    let result = model.forward(&tape, &weights, &two, Some(&mut states), options);
    assert!(result.err().unwrap().report().contains("1 states for 2 sequences"));
    let ahead = Batch::continuing(&[(&TOKENS, 3)]);
    let result = model.forward(&tape, &weights, &ahead, Some(&mut states), options);
    assert!(result.err().unwrap().report().contains("has seen 0 tokens"));
}
