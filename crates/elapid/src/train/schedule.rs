//! The learning rate over a run, as a share of its largest value.
//!
//! Every schedule warms up linearly from `1 / n_warmup` to 1, then
//!
//! | schedule   |                                                                              |
//! |------------|------------------------------------------------------------------------------|
//! | `Constant` | stays at 1                                                                   |
//! | `Cosine`   | falls to the minimum along half a cosine                                     |
//! | `Wsd`      | stays at 1, then falls to the minimum in a line over the last share of steps |
//!
//! The fall of warm-up, stable, decay (Hu et al., MiniCPM, 2024) is a line: the shape that theory
//! favours and that does best across tasks in Defazio et al., "Optimal Linear Decay Learning Rate
//! Schedules and Further Refinements", 2023. The minimum is what the step after the last would
//! get, so that no step is spent at a rate of zero.
//!
//! A rate depends on the step alone: a run that is resumed continues where it was.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// What the learning rate does after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays where it is.
    Constant,
    /// Half a cosine.
    Cosine,
    /// Stays where it is, then falls in a line.
    Wsd {
        /// Share of all steps in which it falls, from 0 to 1.
        decay: f64,
    },
}

impl Schedule {
    /// The share, from 0 to 1, of the largest rate that step `step` (from 0) of `n_steps` gets.
    pub(crate) fn rate(&self, step: u64, n_steps: u64, n_warmup: u64, lr_min_ratio: f64) -> f64 {
        if step < n_warmup {
            return (step + 1) as f64 / n_warmup as f64;
        }
        let minimum = lr_min_ratio.clamp(0.0, 1.0);
        let start = match *self {
            Schedule::Constant => return 1.0,
            Schedule::Cosine => n_warmup,
            Schedule::Wsd { decay } => {
                let n_decay = (n_steps as f64 * decay.clamp(0.0, 1.0)).round() as u64;
                n_warmup.max(n_steps - n_decay.min(n_steps))
            }
        };
        if step < start {
            return 1.0;
        }
        // A run without steps to fall in is at its end.
        let n_fall = n_steps.saturating_sub(start) as f64;
        let progress = if n_fall > 0.0 { ((step - start) as f64 / n_fall).min(1.0) } else { 1.0 };
        let height = match self {
            Schedule::Cosine => (1.0 + (PI * progress).cos()) / 2.0,
            Schedule::Constant | Schedule::Wsd { .. } => 1.0 - progress,
        };
        minimum + (1.0 - minimum) * height
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Schedule; 4] = [
        Schedule::Constant,
        Schedule::Cosine,
        Schedule::Wsd { decay: 0.2 },
        Schedule::Wsd { decay: 1.0 },
    ];

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-12, "{got} is not {want}");
    }

    #[test]
    fn every_schedule_warms_up_in_equal_steps_to_one() {
        for schedule in ALL {
            let rates: Vec<f64> = (0..5).map(|step| schedule.rate(step, 1000, 5, 0.1)).collect();
            assert_eq!(rates, [0.2, 0.4, 0.6, 0.8, 1.0], "{schedule:?}");
            near(schedule.rate(5, 1000, 5, 0.1), 1.0);
            near(schedule.rate(0, 1000, 0, 0.1), 1.0);
        }
    }

    #[test]
    fn each_falls_along_its_own_line() {
        for step in [10, 60, 109] {
            near(Schedule::Constant.rate(step, 110, 10, 0.1), 1.0);
        }
        let cosine = |step| Schedule::Cosine.rate(step, 110, 10, 0.1);
        near(cosine(60), 0.55);
        near(cosine(35), 0.1 + 0.9 * (1.0 + (PI / 4.0).cos()) / 2.0);
        near(cosine(110), 0.1);
        let wsd = |step| Schedule::Wsd { decay: 0.2 }.rate(step, 110, 10, 0.1);
        // The last 22 steps: from 88 on.
        near(wsd(87), 1.0);
        near(wsd(88), 1.0);
        near(wsd(99), 0.55);
        near(wsd(109), 0.1 + 0.9 / 22.0);
        near(wsd(110), 0.1);
    }

    #[test]
    fn rates_stay_between_zero_and_one_and_never_rise_after_the_warm_up() {
        for schedule in ALL {
            for (n_steps, n_warmup) in [(0, 0), (1, 0), (1, 5), (7, 7), (50, 3)] {
                let mut last = 1.0;
                for step in 0..n_steps + 60 {
                    let rate = schedule.rate(step, n_steps, n_warmup, 0.0);
                    assert!((0.0..=1.0).contains(&rate), "{schedule:?} {step}: {rate}");
                    assert!(step < n_warmup || rate <= last, "{schedule:?} {step}: {rate}");
                    last = if step < n_warmup { 1.0 } else { rate };
                }
                // Every step of the run itself moves.
                let rates = (0..n_steps).map(|step| schedule.rate(step, n_steps, n_warmup, 0.0));
                assert!(rates.min_by(f64::total_cmp).is_none_or(|rate| rate > 0.0));
            }
        }
    }

    #[test]
    fn a_schedule_is_written_and_read_back() {
        for schedule in ALL {
            let text = serde_json::to_string(&schedule).unwrap();
            assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule, "{text}");
        }
        let text = serde_json::to_string(&Schedule::Wsd { decay: 0.5 }).unwrap();
        assert_eq!(text, r#"{"wsd":{"decay":0.5}}"#);
    }
}
