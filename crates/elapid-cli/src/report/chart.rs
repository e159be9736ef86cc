//! Curves for inline SVG, drawn here so that the page needs no script.
//!
//! A plot is stretched to the width of the page (`preserveAspectRatio="none"`); lines keep their
//! width (`non-scaling-stroke`) and words stand around it as HTML, so that they stay legible on a
//! telephone and on paper. Lines differ by width and dashes, not by colour alone.
//!
//! Places are in percent of the frame, y downward: the same numbers for lines and words.
//!
//! Not here: what is drawn (`page.rs`), the markup (`page.html`), the colours (`page.css`).

use serde::Serialize;
use std::fmt::Write;

/// A screen has no more columns to show; extremes survive.
const N_POINTS_MAX: usize = 600;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
}

/// A plot with axes, ready to be written.
#[derive(Serialize)]
pub struct Plot {
    /// Places and their names.
    x_ticks: Vec<(String, String)>,
    y_ticks: Vec<(String, String)>,
    /// Classes of `page.css` and paths.
    curves: Vec<(&'static str, String)>,
}

/// What lies inside of a plot, from low to high.
pub struct Frame {
    pub x: (f64, f64),
    pub y: (f64, f64),
}

fn finite(points: &[Point]) -> Vec<Point> {
    points.iter().filter(|point| point.x.is_finite() && point.y.is_finite()).copied().collect()
}

/// At most about `N_POINTS_MAX` of the points, which are in order of x: the lowest and the highest
/// of each stretch, and both ends. What is not finite is omitted.
fn thin(points: &[Point]) -> Vec<Point> {
    let points = finite(points);
    if points.len() <= N_POINTS_MAX {
        return points;
    }
    let n_stretches = N_POINTS_MAX / 2 - 1;
    let mut kept = vec![points[0]];
    for idx in 0..n_stretches {
        let edge = |idx: usize| 1 + (points.len() - 2) * idx / n_stretches;
        let stretch = &points[edge(idx)..edge(idx + 1)];
        let by_y = |a: &usize, b: &usize| stretch[*a].y.total_cmp(&stretch[*b].y);
        let low = (0..stretch.len()).min_by(by_y);
        let high = (0..stretch.len()).max_by(by_y);
        let (Some(low), Some(high)) = (low, high) else { continue };
        kept.push(stretch[low.min(high)]);
        if low != high {
            kept.push(stretch[low.max(high)]);
        }
    }
    kept.push(points[points.len() - 1]);
    kept
}

/// The mean of each point and `reach` neighbours on both sides; fewer near the ends, as many on
/// one side as on the other, so that a slope is not bent.
pub fn smooth(points: &[Point], reach: usize) -> Vec<Point> {
    let points = finite(points);
    let mut sums = vec![0.0];
    for point in &points {
        sums.push(sums[sums.len() - 1] + point.y);
    }
    let mean = |(idx, point): (usize, &Point)| {
        let reach = reach.min(idx).min(points.len() - 1 - idx);
        let sum = sums[idx + reach + 1] - sums[idx - reach];
        Point { x: point.x, y: sum / (2 * reach + 1) as f64 }
    };
    points.iter().enumerate().map(mean).collect()
}

/// The distance of ticks: 1, 2 or 5 times a power of ten, for about `n` of them.
fn tick_step(low: f64, high: f64, n: usize) -> f64 {
    let rough = (high - low) / n as f64;
    let power = 10f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| rough <= times * power * 1.0001);
    times.unwrap_or(10.0) * power
}

fn ticks(low: f64, high: f64, n: usize) -> Vec<(f64, String)> {
    let step = tick_step(low, high, n);
    let (first, last) = ((low / step - 1e-6).ceil() as i64, (high / step + 1e-6).floor() as i64);
    let tick = |k: i64| (k as f64 * step, tick_text(k as f64 * step, step));
    (first..=last).map(tick).collect()
}

/// A number of an axis, with as many digits as neighbours need to differ.
fn tick_text(value: f64, step: f64) -> String {
    if value.abs() < step / 2.0 {
        return "0".to_string();
    }
    if step < 0.9e-3 || value.abs() >= 1e7 {
        return format!("{value:.1e}").replace(".0e", "e");
    }
    if step >= 999.0 {
        let n_digits = if step % 1000.0 < 1.0 { 0 } else { 1 };
        return format!("{:.n_digits$} k", value / 1e3);
    }
    let n_digits = (-step.log10()).ceil().max(0.0) as usize;
    format!("{value:.n_digits$}")
}

/// A range that begins and ends at round numbers and is not empty.
pub fn nice_range(low: f64, high: f64) -> (f64, f64) {
    let is_flat = high - low <= high.abs().max(low.abs()) * 1e-9;
    let room = if is_flat { (high.abs() * 0.1).max(1e-12) } else { 0.0 };
    let (low, high) = (low - room, high + room);
    let step = tick_step(low, high, 10);
    ((low / step + 1e-6).floor() * step, (high / step - 1e-6).ceil() * step)
}

/// The lowest and the highest y of all curves.
pub fn extent<'a>(points: impl IntoIterator<Item = &'a Point>) -> Option<(f64, f64)> {
    let finite = points.into_iter().map(|point| point.y).filter(|y| y.is_finite());
    finite.map(|y| (y, y)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
}

/// A share as percent with two decimals, a quarter of a pixel.
fn percent(share: f64) -> String {
    let text = format!("{:.2}", 100.0 * share);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

impl Frame {
    pub fn left(&self, x: f64) -> String {
        // What lies far outside stays outside, but not so far that a renderer overflows.
        percent(((x - self.x.0) / (self.x.1 - self.x.0)).clamp(-1.0, 2.0))
    }

    pub fn top(&self, y: f64) -> String {
        percent(1.0 - ((y - self.y.0) / (self.y.1 - self.y.0)).clamp(-1.0, 2.0))
    }

    pub fn plot(&self, curves: &[(&'static str, &[Point])]) -> Plot {
        let x_ticks = ticks(self.x.0, self.x.1, 7).into_iter();
        let y_ticks = ticks(self.y.0, self.y.1, 5).into_iter();
        Plot {
            x_ticks: x_ticks.map(|(x, text)| (self.left(x), text)).collect(),
            y_ticks: y_ticks.map(|(y, text)| (self.top(y), text)).collect(),
            curves: curves.iter().map(|curve| (curve.0, self.path(curve.0, curve.1))).collect(),
        }
    }

    fn path(&self, class: &str, points: &[Point]) -> String {
        let mut path = String::new();
        for (idx, point) in thin(points).iter().enumerate() {
            // A dot is a line of no length with round ends: a circle would be stretched.
            let (pen, dot) = match (idx, class) {
                (_, "dots") => ("M", "h0"),
                (0, _) => ("M", ""),
                _ => ("L", ""),
            };
            let _ = write!(path, "{pen}{} {}{dot}", self.left(point.x), self.top(point.y));
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<Point> {
        let y = |idx: usize| (idx as f64 * 0.01).sin() + 10.0 / (1.0 + idx as f64);
        (0..n).map(|idx| Point { x: idx as f64, y: y(idx) }).collect()
    }

    #[test]
    fn thinning_keeps_ends_extremes_and_order() {
        let mut points = wave(10_000);
        points[1234].y = 50.0;
        points[8765].y = -50.0;
        points[4000].y = f64::NAN;
        points[4001].y = f64::INFINITY;
        let kept = thin(&points);
        assert!(kept.len() <= N_POINTS_MAX, "{}", kept.len());
        assert!(kept.len() > N_POINTS_MAX / 2, "{}", kept.len());
        for want in [0, 1234, 8765, 9999] {
            assert!(kept.contains(&points[want]), "point {want}");
        }
        assert!(kept.windows(2).all(|pair| pair[0].x < pair[1].x));
        assert_eq!(extent(&kept), Some((-50.0, 50.0)));
    }

    #[test]
    fn short_curves_are_not_thinned() {
        assert_eq!(thin(&wave(N_POINTS_MAX)), wave(N_POINTS_MAX));
        assert_eq!(thin(&[]), []);
    }

    #[test]
    fn smoothing_keeps_straight_lines_and_ends() {
        let line: Vec<Point> =
            (0..50).map(|idx| Point { x: idx as f64, y: 3.0 * idx as f64 }).collect();
        for (got, want) in smooth(&line, 7).iter().zip(&line) {
            assert!((got.y - want.y).abs() < 1e-9, "{got:?} {want:?}");
        }
        let zigzag: Vec<Point> =
            (0..51).map(|idx| Point { x: idx as f64, y: (idx % 2) as f64 }).collect();
        assert!((smooth(&zigzag, 10)[25].y - 11.0 / 21.0).abs() < 1e-9);
        assert_eq!(smooth(&[], 3), []);
    }

    #[test]
    fn ticks_are_round_numbers() {
        let texts = |low, high| -> Vec<String> {
            ticks(low, high, 5).into_iter().map(|tick| tick.1).collect()
        };
        assert_eq!(texts(0.0, 10.0), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(texts(1.9, 2.6), ["2.0", "2.2", "2.4", "2.6"]);
        assert_eq!(texts(0.0, 3e-4), ["0", "1e-4", "2e-4", "3e-4"]);
        assert_eq!(texts(0.0, 1.2e-3), ["0", "5e-4", "1e-3"]);
        assert_eq!(texts(0.0, 10_000.0), ["0", "2 k", "4 k", "6 k", "8 k", "10 k"]);
    }

    #[test]
    fn a_range_ends_at_round_numbers_and_is_never_empty() {
        assert_eq!(nice_range(2.13, 7.9), (2.0, 8.0));
        let (low, high) = nice_range(3.0, 3.0);
        assert!(low < 3.0 && high > 3.0);
        let (low, high) = nice_range(0.0, 0.0);
        assert!(low < high && high.is_finite());
    }

    #[test]
    fn a_plot_of_one_point_has_no_nan() {
        let frame = Frame { x: (0.0, 5.0), y: nice_range(2.0, 2.0) };
        let plot = frame.plot(&[("raw", &[Point { x: 5.0, y: 2.0 }])]);
        assert_eq!(plot.curves[0].1, "M100 50");
        assert!(!serde_json::to_string(&plot).unwrap().contains("NaN"));
    }

    #[test]
    fn places_are_percent_and_stay_near_the_frame() {
        let frame = Frame { x: (0.0, 8.0), y: (2.0, 4.0) };
        assert_eq!([0.0, 1.0, 8.0, 1e30].map(|x| frame.left(x)), ["0", "12.5", "100", "200"]);
        assert_eq!([4.0, 3.75, 2.0, -1e30].map(|y| frame.top(y)), ["0", "12.5", "100", "200"]);
        let points = [Point { x: 0.0, y: 4.0 }, Point { x: 4.0, y: 3.0 }];
        assert_eq!(frame.path("line", &points), "M0 0L50 50");
        assert_eq!(frame.path("dots", &points), "M0 0h0M50 50h0");
    }
}
