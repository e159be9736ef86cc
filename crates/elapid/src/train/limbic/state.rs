//! The eight numbers: names, bounds, neutral values, and the set-point of a personality.

use crate::error::{Error, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Numbers of a state.
pub(super) const N_DIM: usize = 8;

/// Name, lower bound, upper bound and neutral value of each.
const DIMENSIONS: [(&str, f32, f32, f32); N_DIM] = [
    ("valence", -1.0, 1.0, 0.0),
    ("arousal", 0.0, 1.0, 0.2),
    ("curiosity", 0.0, 1.0, 0.5),
    ("caution", 0.0, 1.0, 0.5),
    ("effort", 0.0, 1.0, 0.8),
    ("social", 0.0, 1.0, 0.5),
    ("attention", 0.0, 1.0, 0.7),
    ("exploration", 0.0, 1.0, 0.5),
];

/// What a set-point adds up: the dimension, its base, and the share of each trait.
const SET_POINTS: [(f32, &[(&str, f32)]); N_DIM] = [
    (0.0, &[("regulation", 0.1), ("emotionality", -0.1)]),
    (0.2, &[("emotionality", 0.2), ("extraversion", 0.1)]),
    (0.5, &[("openness", 0.35), ("stimulation", 0.15)]),
    (
        0.5,
        &[("conscientiousness", 0.3), ("risk", -0.3), ("regulation", -0.2), ("emotionality", 0.15)],
    ),
    (0.8, &[("grit", 0.15), ("conscientiousness", 0.1)]),
    (0.5, &[("extraversion", 0.35)]),
    (0.7, &[("conscientiousness", 0.1)]),
    (0.4, &[("openness", 0.3), ("risk", 0.25), ("regulation", 0.15)]),
];

const TRAITS: [&str; 8] = [
    "openness",
    "conscientiousness",
    "extraversion",
    "emotionality",
    "stimulation",
    "risk",
    "regulation",
    "grit",
];

/// The state that a [`Limbic`](crate::Limbic) moves. The default is neutral. In JSON it is an
/// object with names, where those left out are neutral, or a list of eight in this order; `null`,
/// which is how some programs write a NaN, counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LimbicState {
    /// -1 to 1; neutral 0.
    pub valence: f32,
    /// 0 to 1, as all that follow; neutral 0.2.
    pub arousal: f32,
    /// Neutral 0.5.
    pub curiosity: f32,
    /// Neutral 0.5.
    pub caution: f32,
    /// Neutral 0.8.
    pub effort: f32,
    /// Neutral 0.5.
    pub social: f32,
    /// Neutral 0.7.
    pub attention: f32,
    /// Neutral 0.5.
    pub exploration: f32,
}

impl From<[f32; N_DIM]> for LimbicState {
    fn from(x: [f32; N_DIM]) -> LimbicState {
        let [valence, arousal, curiosity, caution, effort, social, attention, exploration] = x;
        LimbicState { valence, arousal, curiosity, caution, effort, social, attention, exploration }
    }
}

impl Default for LimbicState {
    fn default() -> LimbicState {
        DIMENSIONS.map(|dim| dim.3).into()
    }
}

impl std::fmt::Display for LimbicState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = DIMENSIONS.iter().zip(self.numbers());
        let words: Vec<String> = each.map(|(dim, x)| format!("{} {x:.3}", dim.0)).collect();
        f.write_str(&words.join(", "))
    }
}

impl LimbicState {
    /// Where a personality rests. Traits are 0 to 100 and 50 where they are not given: openness,
    /// conscientiousness, extraversion, emotionality, stimulation, risk, regulation, grit.
    pub fn set_point<'a>(
        personality: impl IntoIterator<Item = (&'a str, f32)>,
    ) -> Result<LimbicState> {
        let mut traits = TRAITS.map(|name| (name, 0.0));
        for (name, value) in personality {
            let Some(known) = traits.iter_mut().find(|known| known.0 == name) else {
                let hint = format!("the traits are {}", TRAITS.join(", "));
                return Err(Error::input(format!("there is no trait `{name}`"), &hint));
            };
            if !(0.0..=100.0).contains(&value) {
                let problem = format!("the trait `{name}` is {value}");
                return Err(Error::input(problem, "traits are between 0 and 100"));
            }
            known.1 = (value - 50.0) / 50.0;
        }
        let of = |name: &str| traits.iter().find(|known| known.0 == name).map_or(0.0, |it| it.1);
        let point = |(base, shares): (f32, &[(&str, f32)])| {
            shares.iter().fold(base, |sum, (name, share)| sum + share * of(name))
        };
        Ok(clamped(SET_POINTS.map(point)).into())
    }

    fn numbers(&self) -> [f32; N_DIM] {
        let LimbicState { valence, arousal, curiosity, caution, .. } = *self;
        let LimbicState { effort, social, attention, exploration, .. } = *self;
        [valence, arousal, curiosity, caution, effort, social, attention, exploration]
    }

    /// Each number within its bounds.
    pub(super) fn clamped(&self) -> [f32; N_DIM] {
        clamped(self.numbers())
    }
}

/// Each number within its bounds; a NaN becomes the lower one.
pub(super) fn clamped(x: [f32; N_DIM]) -> [f32; N_DIM] {
    std::array::from_fn(|dim| {
        let (_, low, high, _) = DIMENSIONS[dim];
        // `max` takes the number where the other is none.
        x[dim].max(low).min(high)
    })
}

impl<'de> Deserialize<'de> for LimbicState {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<LimbicState, D::Error> {
        let value = Value::deserialize(from)?;
        let numbers =
            numbers(&value, LimbicState::default().numbers()).map_err(D::Error::custom)?;
        Ok(clamped(numbers).into())
    }
}

/// A list of eight, or an object with names; what is left out is as in `usual`, and null a NaN.
pub(super) fn numbers(
    value: &Value,
    usual: [f32; N_DIM],
) -> std::result::Result<[f32; N_DIM], String> {
    let number = |value: &Value| match value {
        Value::Null => Ok(f32::NAN),
        _ => value.as_f64().map(|x| x as f32).ok_or_else(|| format!("{value} is not a number")),
    };
    let mut all = usual;
    match value {
        Value::Array(list) if list.len() == N_DIM => {
            for (x, value) in all.iter_mut().zip(list) {
                *x = number(value)?;
            }
        }
        Value::Array(list) => return Err(format!("{} numbers, not {N_DIM}", list.len())),
        Value::Object(named) => {
            for (name, value) in named {
                let dim = DIMENSIONS.iter().position(|dim| dim.0 == name);
                let dim = dim.ok_or_else(|| {
                    let names = DIMENSIONS.map(|dim| dim.0).join(", ");
                    format!("`{name}` is none of {names}")
                })?;
                all[dim] = number(value).map_err(|problem| format!("`{name}`: {problem}"))?;
            }
        }
        other => return Err(format!("{other} is neither a list nor an object")),
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_within_their_bounds_and_a_nan_becomes_the_lower_one() {
        let wild = [f32::NAN, f32::NAN, -7.0, 7.0, f32::INFINITY, f32::NEG_INFINITY, 0.25, 1.0];
        assert_eq!(clamped(wild), [-1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.25, 1.0]);
        assert_eq!(clamped([-0.5; N_DIM])[..2], [-0.5, 0.0]);
        let neutral = [0.0, 0.2, 0.5, 0.5, 0.8, 0.5, 0.7, 0.5];
        assert_eq!(LimbicState::default().numbers(), neutral);
        assert_eq!(LimbicState::from(neutral).clamped(), neutral);
    }

    /// By hand from the formulas.
    #[test]
    fn a_set_point_is_the_sum_of_its_traits() {
        let near = |personality: &[(&str, f32)], want: [f32; N_DIM]| {
            let got = LimbicState::set_point(personality.iter().copied()).unwrap().numbers();
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 1e-6, "{got} {want}");
            }
        };
        near(&[], [0.0, 0.2, 0.5, 0.5, 0.8, 0.5, 0.7, 0.4]);
        near(&[("openness", 100.0)], [0.0, 0.2, 0.85, 0.5, 0.8, 0.5, 0.7, 0.7]);
        near(&[("stimulation", 0.0)], [0.0, 0.2, 0.35, 0.5, 0.8, 0.5, 0.7, 0.4]);
        near(&[("risk", 100.0)], [0.0, 0.2, 0.5, 0.2, 0.8, 0.5, 0.7, 0.65]);
        near(&[("regulation", 100.0)], [0.1, 0.2, 0.5, 0.3, 0.8, 0.5, 0.7, 0.55]);
        near(&[("emotionality", 75.0)], [-0.05, 0.3, 0.5, 0.575, 0.8, 0.5, 0.7, 0.4]);
        near(&[("extraversion", 0.0)], [0.0, 0.1, 0.5, 0.5, 0.8, 0.15, 0.7, 0.4]);
        near(
            &[("grit", 100.0), ("conscientiousness", 100.0)],
            [0.0, 0.2, 0.5, 0.8, 1.0, 0.5, 0.8, 0.4],
        );
        for (name, value) in [("grim", 50.0), ("grit", 101.0), ("grit", f32::NAN)] {
            let error = LimbicState::set_point([(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_state_is_a_list_or_named_and_whatever_else_is_told() {
        let read = |text: &str| serde_json::from_str::<LimbicState>(text);
        let of = |text: &str| read(text).unwrap().numbers();
        assert_eq!(of("[0.5, 2, null, 0, 0, 0, 0, 0.25]")[..4], [0.5, 1.0, 0.0, 0.0]);
        let named = of(r#"{"exploration": 0.25, "valence": null}"#);
        assert_eq!(named, [-1.0, 0.2, 0.5, 0.5, 0.8, 0.5, 0.7, 0.25]);
        let state = LimbicState::default();
        assert_eq!(read(&serde_json::to_string(&state).unwrap()).unwrap(), state);
        for (text, part) in [
            ("[1, 2]", "2 numbers, not 8"),
            ("7", "neither a list nor an object"),
            (r#"{"valance": 1}"#, "`valance` is none of valence, arousal"),
            (r#"{"valence": "x"}"#, "`valence`: \"x\" is not a number"),
            (r#"[0, 0, 0, 0, 0, 0, 0, true]"#, "true is not a number"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
