//! Samples: what a head is trained on, and the sequences they form.

use super::state::{LimbicState, N_DIM, numbers};
use crate::error::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::str::FromStr;

/// What was seen, where the state was, and how it should have moved. Read from a line of JSON:
///
/// ```
/// # use elapid::LimbicSample;
/// let line = r#"{"input": [0.5, -1], "state": {"valence": 0.2},
///     "target": [0.1, 0, 0, 0, 0, 0, 0, 0], "reward": 1, "sequence": "monday"}"#;
/// let sample: LimbicSample = line.parse()?;
/// assert_eq!(sample.state.valence, 0.2);
/// # Ok::<(), elapid::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LimbicSample {
    /// As many numbers as the head takes.
    pub input: Vec<f32>,
    /// The state before.
    pub state: LimbicState,
    /// The change of each number, -1 to 1, in the order of the state.
    pub target: [f32; 8],
    /// What came of it.
    pub reward: f32,
    /// Samples of one name follow each other in time.
    pub sequence: String,
}

const HINT: &str = "a sample is {\"input\": [..], \"state\": {\"valence\": 0.1, ..} or 8 numbers, \
                    \"target\": 8 numbers or named, \"reward\": 0.5, \"sequence\": \"a\"}";

#[derive(Deserialize)]
struct Line {
    input: Vec<f32>,
    state: LimbicState,
    target: Value,
    reward: f32,
    #[serde(default)]
    sequence: Value,
}

impl FromStr for LimbicSample {
    type Err = Error;

    fn from_str(line: &str) -> Result<LimbicSample> {
        let bad = |problem: String| Error::input(problem, HINT);
        let line: Line = serde_json::from_str(line).map_err(|error| {
            // serde_json counts from the first line of what it is given, which is always 1.
            bad(error.to_string().replace(" at line 1 column ", ", at column "))
        })?;
        let Line { input, state, target, reward, sequence } = line;
        let target = numbers(&target, [0.0; N_DIM]).map_err(|it| bad(format!("target: {it}")))?;
        let sequence = match sequence {
            Value::Null => String::new(),
            Value::String(name) => name,
            Value::Number(number) => number.to_string(),
            other => return Err(bad(format!("sequence: {other} is neither text nor a number"))),
        };
        let sample = LimbicSample { input, state, target, reward, sequence };
        sample.check().map_err(bad)?;
        Ok(sample)
    }
}

impl LimbicSample {
    /// What is wrong with it, the length of its input aside.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        if let Some(x) = self.input.iter().find(|x| !x.is_finite()) {
            return Err(format!("input: {x} is not finite"));
        }
        if let Some(x) = self.target.iter().find(|x| !(-1.0..=1.0).contains(*x)) {
            return Err(format!(
                "target: {x} is not between -1 and 1, which is as far as a step goes"
            ));
        }
        match self.reward.is_finite() {
            true => Ok(()),
            false => Err(format!("reward: {} is not finite", self.reward)),
        }
    }
}

/// Samples by their sequence, in the order in which sequences appear.
pub(super) fn sequences(samples: &[LimbicSample]) -> Vec<Vec<&LimbicSample>> {
    let mut list: Vec<Vec<&LimbicSample>> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for sample in samples {
        let place = *places.entry(&sample.sequence).or_insert(list.len());
        if place == list.len() {
            list.push(Vec::new());
        }
        list[place].push(sample);
    }
    list
}
