//! Curves and bars as inline SVG, drawn here so that the page needs no script.
//!
//! A plot is stretched to the width of the page (`preserveAspectRatio="none"`); lines keep their
//! width (`non-scaling-stroke`) and words stand around it as HTML, placed in percent, so that they
//! stay legible on a telephone and on paper. Lines differ by width and dashes, not by colour alone.
//!
//! Points of a plot lie in a box of `WIDE` x `HIGH`, y downward.
//!
//! Not here: what is drawn, and the colours (`page.css`).

use crate::run_report::text::escape;
use std::fmt::Write;

const WIDE: f64 = 1000.0;
const HIGH: f64 = 400.0;
/// A screen has no more columns to show; extremes survive.
const N_POINTS_MAX: usize = 600;

/// A point of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
}

/// A curve and how it is drawn: a class of `page.css`.
pub struct Series {
    pub class: &'static str,
    pub points: Vec<Point>,
}

/// A line across the plot, with its name: at a height, or at a place along x.
pub struct Mark {
    pub class: &'static str,
    pub at: f64,
    pub name: String,
}

/// A plot with axes.
#[derive(Default)]
pub struct Chart {
    /// Unique on the page.
    pub id: &'static str,
    /// What it is, for people who do not see it.
    pub title: String,
    /// What it shows, for the same.
    pub desc: String,
    pub x_name: String,
    pub y_name: String,
    pub x: (f64, f64),
    pub y: (f64, f64),
    pub series: Vec<Series>,
    pub across: Vec<Mark>,
    pub along: Vec<Mark>,
}

/// At most about `N_POINTS_MAX` of the points, which are in order of x: the lowest and the highest
/// of each stretch, and both ends. What is not finite is left out.
pub fn thin(points: &[Point]) -> Vec<Point> {
    let finite = |point: &&Point| point.x.is_finite() && point.y.is_finite();
    let points: Vec<Point> = points.iter().filter(finite).copied().collect();
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
    let finite = |point: &&Point| point.x.is_finite() && point.y.is_finite();
    let points: Vec<Point> = points.iter().filter(finite).copied().collect();
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
    finite.fold(None, |range, y| match range {
        None => Some((y, y)),
        Some((low, high)) => Some((y.min(low), y.max(high))),
    })
}

fn fraction(value: f64, (low, high): (f64, f64)) -> f64 {
    (value - low) / (high - low)
}

impl Chart {
    /// As a `<div>` for a `<figure>`.
    pub fn draw(&self) -> String {
        let Chart { id, title, desc, x_name, y_name, .. } = self;
        let (title, desc) = (escape(title), escape(desc));
        let mut html = format!(
            "<div class=\"chart {id}\"><p class=\"y-name\">{}</p><div class=\"frame\">\n\
             <svg viewBox=\"0 0 {WIDE} {HIGH}\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-labelledby=\"{id}-t {id}-d\"><title id=\"{id}-t\">{title}</title>\
             <desc id=\"{id}-d\">{desc}</desc>\n",
            escape(y_name),
        );
        html.push_str(&self.lines());
        html.push_str("</svg>\n<div aria-hidden=\"true\">");
        html.push_str(&self.labels());
        let _ = writeln!(html, "</div></div><p class=\"x-name\">{}</p></div>", escape(x_name));
        html
    }

    fn place(&self, point: &Point) -> (f64, f64) {
        // What lies far outside stays outside, but not so far that a renderer overflows.
        let x = fraction(point.x, self.x).clamp(-1.0, 2.0) * WIDE;
        let y = (1.0 - fraction(point.y, self.y).clamp(-1.0, 2.0)) * HIGH;
        (x, y)
    }

    fn lines(&self) -> String {
        let mut svg = String::from("<path class=\"grid\" d=\"");
        for (value, _) in ticks(self.y.0, self.y.1, 5) {
            let _ = write!(svg, "M0 {}H{WIDE}", short((1.0 - fraction(value, self.y)) * HIGH));
        }
        svg.push_str("\"/>\n");
        for Mark { class, at, .. } in &self.across {
            let y = short((1.0 - fraction(*at, self.y)) * HIGH);
            let _ = writeln!(svg, "<path class=\"{class}\" d=\"M0 {y}H{WIDE}\"/>");
        }
        for Mark { class, at, .. } in &self.along {
            let x = short(fraction(*at, self.x) * WIDE);
            let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{x} 0V{HIGH}\"/>");
        }
        for Series { class, points } in &self.series {
            let _ = write!(svg, "<path class=\"{class}\" d=\"");
            for (idx, point) in thin(points).iter().enumerate() {
                let (x, y) = self.place(point);
                // A dot is a line of no length with round ends: a circle would be stretched.
                let (pen, dot) = match (idx, *class) {
                    (_, "dots") => ("M", "h0"),
                    (0, _) => ("M", ""),
                    _ => ("L", ""),
                };
                let _ = write!(svg, "{pen}{} {}{dot}", short(x), short(y));
            }
            svg.push_str("\"/>\n");
        }
        svg
    }

    fn labels(&self) -> String {
        let mut html = String::new();
        for (value, text) in ticks(self.y.0, self.y.1, 5) {
            let top = short(100.0 * (1.0 - fraction(value, self.y)));
            let _ = write!(html, "<span class=\"y\" style=\"top:{top}%\">{text}</span>");
        }
        for (idx, (value, text)) in ticks(self.x.0, self.x.1, 7).into_iter().enumerate() {
            let left = short(100.0 * fraction(value, self.x));
            // Every other one makes way where the page is narrow.
            let class = if idx % 2 == 1 { "x minor" } else { "x" };
            let _ = write!(html, "<span class=\"{class}\" style=\"left:{left}%\">{text}</span>");
        }
        // The highest line has its name above it and the others below, so that two lines close to
        // each other keep their names apart.
        let highest = self.across.iter().map(|mark| mark.at).fold(f64::NEG_INFINITY, f64::max);
        for Mark { at, name, .. } in &self.across {
            let top = short(100.0 * (1.0 - fraction(*at, self.y)));
            let side = if *at == highest { "above" } else { "below" };
            let name = escape(name);
            let _ = write!(html, "<span class=\"mark {side}\" style=\"top:{top}%\">{name}</span>");
        }
        for Mark { at, name, .. } in &self.along {
            let left = short(100.0 * fraction(*at, self.x));
            let name = escape(name);
            let _ = write!(html, "<span class=\"flag\" style=\"left:{left}%\">{name}</span>");
        }
        html
    }
}

/// One decimal is a quarter of a pixel.
fn short(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map(str::to_string).unwrap_or(text)
}

/// One bar of a group that shares a scale from 0 to `scale`, with the marks that all bars show.
pub fn bar(value: f64, class: &str, marks: &[Mark], scale: f64) -> String {
    let at = |value: f64| short((value / scale).clamp(0.0, 1.0) * WIDE);
    let mut svg = format!(
        "<svg class=\"bar\" viewBox=\"0 0 {WIDE} 10\" preserveAspectRatio=\"none\" \
         aria-hidden=\"true\"><rect class=\"{class}\" y=\"2\" width=\"{}\" height=\"6\"/>",
        at(value)
    );
    for Mark { class, at: value, .. } in marks {
        let _ = write!(svg, "<path class=\"{class}\" d=\"M{} 0V10\"/>", at(*value));
    }
    svg.push_str("</svg>");
    svg
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
        let points = vec![Point { x: 5.0, y: 2.0 }];
        let series = vec![Series { class: "raw", points }];
        let chart =
            Chart { id: "a", x: (0.0, 5.0), y: nice_range(2.0, 2.0), series, ..Chart::default() };
        assert!(!chart.draw().contains("NaN"));
    }
}
