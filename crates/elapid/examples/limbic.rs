//! Trains a recurrent head to be startled by the first of its inputs, and lets it move a state.

use elapid::{Device, Limbic, LimbicSample, LimbicSettings, LimbicState, Result};
use std::ops::ControlFlow;

/// Runs it.
pub fn main() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut samples = Vec::new();
    for number in 0..64 {
        let noise = if number % 3 == 0 { 1 } else { 0 };
        let sample: LimbicSample = format!(
            r#"{{"input": [{noise}, 0.5], "state": {{}}, "reward": {}, "sequence": {},
                "target": {{"arousal": {}, "valence": {}}}}}"#,
            -noise,
            number / 8,
            0.4 * noise as f32,
            -0.2 * noise as f32,
        )
        .parse()?;
        samples.push(sample);
    }
    let mut limbic = Limbic::new(2, 8, 0, &device)?;
    let settings = LimbicSettings { n_epochs: 40, ..LimbicSettings::default() };
    limbic.train(&samples, &settings, |_, _| ControlFlow::Continue(()))?;

    let limbic = Limbic::from_bytes("head", &limbic.to_bytes()?, &device)?;
    let mut state = LimbicState::set_point([("openness", 80.0), ("risk", 30.0)])?;
    let mut hidden = Vec::new();
    for noise in [0.0, 1.0, 0.0] {
        let reward = limbic.step(&mut state, &mut hidden, &[noise, 0.5])?;
        println!("noise {noise}: arousal {:.2}, expected reward {reward:.2}", state.arousal);
    }
    Ok(())
}
