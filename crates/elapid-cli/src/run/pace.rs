//! A run whose budget is time: when the learning rate begins to fall, and which step is the last.
//!
//! The rate stays up until a share of the time is left. Then the number of steps that still fit is
//! decided, and the rate falls in a line to its end. Should the machine become slower or faster
//! meanwhile, the end is moved. Time for measuring and saving afterwards is set aside: what the
//! same took before the first step.
//!
//! The clock decides here and nowhere else. Each decision becomes a `Turn` of the settings and is
//! written into the run before it takes effect: a run that is resumed reads it there, and steps
//! before it are made as they were.

use std::collections::VecDeque;

/// Share of the time in which the rate falls, where nobody says.
pub const DECAY: f64 = 0.2;
/// Share of the time that a prediction of the end may be off before the end is moved.
const TOLERANCE: f64 = 0.01;
/// Share of the time that the pace is measured over.
const WINDOW: f64 = 0.1;

/// The pace of a run: seconds of the run at which steps were finished.
pub struct Pace {
    /// Seconds in all.
    budget_s: f64,
    /// When the last step has to be finished.
    target_s: f64,
    /// Share of the time in which the rate falls.
    decay: f64,
    /// (seconds, step), the oldest just before the window.
    marks: VecDeque<(f64, u64)>,
    /// When the end was last decided.
    decided_s: f64,
}

impl Pace {
    /// For a run that has so many seconds, about `after_s` of them for what comes after its last
    /// step, and whose rate falls in the share `decay` of the time.
    pub fn new(budget_s: f64, after_s: f64, decay: f64) -> Pace {
        let target_s = (0.99 * budget_s - 1.1 * after_s).max(0.1 * budget_s);
        Pace { budget_s, target_s, decay, marks: VecDeque::new(), decided_s: 0.0 }
    }

    /// Hears that `step` steps are made after `now_s` seconds of the run.
    pub fn hear(&mut self, now_s: f64, step: u64) {
        self.marks.push_back((now_s, step));
        let window_s = WINDOW * self.budget_s;
        while self.marks.get(1).is_some_and(|mark| mark.0 <= now_s - window_s) {
            self.marks.pop_front();
        }
    }

    /// Seconds of a step with everything between steps, once there were two.
    pub fn step_s(&self) -> Option<f64> {
        let (first, last) = (self.marks.front()?, self.marks.back()?);
        let n_steps = last.1.checked_sub(first.1).filter(|n| *n > 0)?;
        Some((last.0 - first.0) / n_steps as f64)
    }

    /// Steps in all that fit at this pace.
    pub fn n_fitting(&self) -> Option<u64> {
        let (now_s, step) = *self.marks.back()?;
        Some(step + ((self.target_s - now_s) / self.step_s()?).max(0.0).round() as u64)
    }

    /// A new number of steps where one has to be decided now. `end` is what was decided before.
    pub fn decide(&mut self, end: Option<u64>) -> Option<u64> {
        let (now_s, step) = *self.marks.back()?;
        if now_s >= self.target_s {
            return (end != Some(step)).then_some(step);
        }
        let n_fitting = self.n_fitting()?;
        let tolerance_s = TOLERANCE * self.budget_s;
        let is_due = match end {
            None => self.target_s - now_s <= self.decay * self.target_s,
            Some(end) => {
                let off_s = n_fitting.abs_diff(end) as f64 * self.step_s()?;
                off_s > tolerance_s && now_s - self.decided_s > tolerance_s
            }
        };
        is_due.then(|| {
            self.decided_s = now_s;
            n_fitting.max(step + 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drives a run whose step k takes `step_s(k)`; when it ends, and how often it was decided.
    fn drive(budget_s: f64, after_s: f64, step_s: impl Fn(u64, f64) -> f64) -> (f64, u64, u32) {
        let mut pace = Pace::new(budget_s, after_s, 0.2);
        let (mut now_s, mut step, mut end, mut n_decided) = (0.0, 0, None, 0);
        pace.hear(now_s, step);
        while end.is_none_or(|end| step < end) {
            now_s += step_s(step, now_s);
            step += 1;
            pace.hear(now_s, step);
            if let Some(new) = pace.decide(end) {
                assert!(new >= step, "{new} at {step}");
                end = Some(new);
                n_decided += 1;
            }
        }
        (now_s + after_s, step, n_decided)
    }

    #[test]
    fn a_run_ends_on_time_at_any_steady_pace() {
        for step_s in [0.001, 0.05, 1.0, 3.3] {
            let (end_s, n_steps, n_decided) = drive(100.0, 6.0, |_, _| step_s);
            assert!((95.0..=102.0f64.max(100.0 + step_s)).contains(&end_s), "{step_s}: {end_s}");
            assert_eq!(n_decided, 1, "{step_s}");
            assert!((n_steps as f64 * step_s - 92.4).abs() <= 1.0 + step_s);
        }
    }

    #[test]
    fn the_end_is_moved_when_the_machine_becomes_slower_or_faster() {
        for factor in [0.2, 0.5, 2.0, 5.0] {
            for change_s in [10.0, 50.0, 80.0, 88.0] {
                let step_s = |_, now_s| if now_s < change_s { 0.1 } else { 0.1 * factor };
                let (end_s, _, n_decided) = drive(100.0, 2.0, step_s);
                assert!((95.0..=102.0).contains(&end_s), "x{factor} at {change_s}: {end_s}");
                assert!(n_decided <= 25, "x{factor} at {change_s}: {n_decided}");
            }
        }
    }

    #[test]
    fn one_step_longer_than_all_the_time_is_the_only_one() {
        let (_, n_steps, _) = drive(10.0, 1.0, |_, _| 60.0);
        assert_eq!(n_steps, 1);
        let mut late = Pace::new(10.0, 1.0, 0.2);
        late.hear(30.0, 7);
        assert_eq!(late.decide(None), Some(7));
        assert_eq!(late.decide(Some(7)), None);
    }
}
