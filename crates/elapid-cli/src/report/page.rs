//! `report.html`: one file that needs no network and no script, reads on a telephone and on paper.
//!
//! `page.html` is a template that escapes every value it writes; here is what it cannot work out
//! itself, and numbers as people write them.
//!
//! Not here: how curves are placed (`chart.rs`); where numbers come from (`data.rs`).

use crate::report::chart::{Frame, Point, extent, nice_range, smooth};
use crate::report::data::{Fact, HeldOut, ReportData};
use crate::report::metrics::{EvalRecord, NoteRecord, StepRecord};
use crate::report::text::{bytes, duration_exact, grouped, rate, shortened, visible};
use crate::report::{Done, Failure};
use minijinja::value::Value;
use minijinja::{Environment, UndefinedBehavior, context, escape_formatter};
use serde::Serialize;

/// Its name in a run directory.
pub const FILE: &str = "report.html";

const N_ROWS_MAX: usize = 40;
const N_NOTES_MAX: usize = 50;

/// What a compressor reached, in bits per byte.
#[derive(Serialize)]
struct Mark {
    class: &'static str,
    name: &'static str,
    value: f64,
    /// Where it lies in the plot over time.
    at: String,
}

pub fn html(data: &ReportData) -> Done<String> {
    let (summary, (before, after)) = (&data.summary, data.before_after());
    let marks = marks(&summary.held_out);
    let values = marks.iter().map(|mark| mark.value).chain(before).chain(after);
    let mut config = Vec::new();
    flatten("", &summary.config, &mut config);
    let scale = values.fold(0.0, f64::max);
    let page = context! {
        css => include_str!("page.css"), summary, before, after, marks, scale, config,
        loss => loss(data), time => time(data), completions => data.completions(),
        notes => data.notes(), n_notes_max => N_NOTES_MAX,
    };
    render(page).map_err(|error| Failure::new(error, "this is a bug in Elapid"))
}

fn render(page: Value) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(text) if !value.is_safe() => escape_formatter(out, state, &visible(text).into()),
        _ => escape_formatter(out, state, value),
    });
    environment.add_filter("amount", amount);
    environment.add_filter("bytes", bytes);
    environment.add_filter("change", change);
    environment.add_filter("cut", |text: &str, n: usize, more: &str| shortened(text, n, more));
    environment.add_filter("duration", duration_exact);
    environment.add_filter("fixed", fixed);
    environment.add_filter("grouped", grouped);
    environment.add_filter("power", |value: f64, digits: usize| format!("{value:.digits$e}"));
    environment.add_filter("rate", rate);
    // Its name says how values are escaped.
    environment.add_template(FILE, include_str!("page.html"))?;
    environment.get_template(FILE)?.render(page)
}

/// A number with so many digits behind the point, or a dash.
fn fixed(value: Option<f64>, digits: usize) -> String {
    let value = value.filter(|value| value.is_finite());
    value.map_or("–".to_string(), |value| format!("{value:.digits$}"))
}

/// How far `new` is from `old`, in percent with a true minus.
fn change(new: Option<f64>, old: Option<f64>, digits: usize) -> String {
    let share = new.zip(old).map(|(new, old)| new / old - 1.0).filter(|share| share.is_finite());
    let text = share.map(|share| format!("{:+.digits$}%", 100.0 * share));
    text.map_or("–".to_string(), |text| text.replace('-', "−"))
}

fn amount(value: Option<f64>, unit: &str) -> String {
    match (value.filter(|value| value.is_finite()), unit) {
        (None, _) => "–".to_string(),
        (Some(n), "count") => grouped(n.max(0.0).round() as u64),
        (Some(n), "bytes") => bytes(n),
        (Some(n), "share") => format!("{:.1}%", 100.0 * n),
        (Some(s), _) if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        (Some(s), _) => duration_exact(s),
    }
}

fn marks(held_out: &HeldOut) -> Vec<Mark> {
    let list =
        [("gzip", "gzip -9", held_out.gzip), ("zstd", "zstd -19 + dictionary", held_out.zstd)];
    let mark = |(class, name, value): (&'static str, &'static str, Option<f64>)| {
        let value = value.filter(|value| value.is_finite())?;
        Some(Mark { class, name, value, at: String::new() })
    };
    list.into_iter().filter_map(mark).collect()
}

/// Loss and learning rate over steps.
fn loss(data: &ReportData) -> Option<Value> {
    let steps = data.steps();
    let (first, last) = (*steps.first()?, *steps.last()?);
    let points = |y: fn(&StepRecord) -> f64| -> Vec<Point> {
        steps.iter().map(|step| Point { x: step.step as f64, y: y(step) }).collect()
    };
    let (raw, rates) = (points(|step| f64::from(step.loss)), points(|step| step.lr));
    let (low, high) = extent(&raw)?;
    let x = (0.0, last.step.max(1) as f64);
    let frame = Frame { x, y: loss_range(&raw, low, high) };
    // A spike out of the frame is not to lift the mean of all its neighbours.
    let usual: Vec<Point> = raw.iter().filter(|point| point.y <= frame.y.1).copied().collect();
    let line = smooth(&usual, steps.len() / 120);
    let notes = data.notes().into_iter().take(N_NOTES_MAX).enumerate();
    let inside = notes.filter(|(_, note)| (1..=last.step).contains(&note.step));
    let flag = |(idx, note): (usize, &NoteRecord)| (frame.left(note.step as f64), idx + 1);
    let rate = |(low, high): (f64, f64)| {
        let frame = Frame { x, y: (0.0, nice_range(0.0, 1.05 * high).1) };
        context! { plot => frame.plot(&[("line", &rates)]), low, high }
    };
    Some(context! {
        plot => frame.plot(&[("raw", &raw), ("line", &line)]),
        // Where the notes belong, with their number.
        flags => inside.map(flag).collect::<Vec<_>>(),
        first, last, low, high,
        end => line.last().map_or(f64::NAN, |point| point.y),
        n_above => raw.iter().filter(|point| point.y > frame.y.1).count(),
        rows => some(&steps),
        rate => extent(&rates).map(rate),
    })
}

/// Up to the first loss or the 99th percentile, whichever is higher, with some room: one spike is
/// not to flatten the curve.
fn loss_range(raw: &[Point], low: f64, high: f64) -> (f64, f64) {
    let mut sorted: Vec<f64> = raw.iter().map(|p| p.y).filter(|y| y.is_finite()).collect();
    let first = sorted[0];
    sorted.sort_by(f64::total_cmp);
    let usual = sorted[(sorted.len() - 1) * 99 / 100].max(first);
    nice_range(low, high.min(usual + 0.1 * (usual - low)))
}

/// At most `N_ROWS_MAX` of a list, evenly, with both ends.
fn some<T: Clone>(list: &[T]) -> Vec<T> {
    if list.len() <= N_ROWS_MAX {
        return list.to_vec();
    }
    (0..N_ROWS_MAX).map(|idx| list[idx * (list.len() - 1) / (N_ROWS_MAX - 1)].clone()).collect()
}

/// Bits per byte over time.
fn time(data: &ReportData) -> Option<Value> {
    let evals = data.evals();
    let (first, last) = (evals.first()?, evals.last()?);
    let (unit, seconds) = match last.elapsed_s {
        s if s > 3.0 * 3600.0 => ("hours", 3600.0),
        s if s > 150.0 => ("minutes", 60.0),
        _ => ("seconds", 1.0),
    };
    let place = |eval: &EvalRecord| Point { x: eval.elapsed_s / seconds, y: eval.bits_per_byte };
    let points: Vec<Point> = evals.iter().map(place).collect();
    let mut across = marks(&data.summary.held_out);
    let levels: Vec<Point> = across.iter().map(|mark| Point { x: 0.0, y: mark.value }).collect();
    let (low, high) = extent(points.iter().chain(&levels))?;
    // A model from scratch begins far above; what matters happens near the marks.
    let near = levels.iter().map(|mark| mark.y).fold(last.bits_per_byte, f64::max);
    let top = if high > 2.5 * near { 2.0 * near } else { high };
    let end = points.iter().map(|point| point.x).filter(|x| x.is_finite()).fold(0.0, f64::max);
    // The last dot stands whole inside.
    let x = (0.0, 1.01 * end.max(1e-3));
    let frame = Frame { x, y: nice_range(low - 0.04 * (top - low), top) };
    across.iter_mut().for_each(|mark| mark.at = frame.top(mark.value));
    let plot = frame.plot(&[("line", &points), ("dots", &points)]);
    Some(context! { plot, across, unit, first, last, top => frame.y.1, rows => some(&evals) })
}

/// Objects become dotted names; lists stay in one piece.
fn flatten(name: &str, value: &serde_json::Value, list: &mut Vec<Fact>) {
    match value {
        serde_json::Value::Null if name.is_empty() => {}
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                let dot = if name.is_empty() { "" } else { "." };
                flatten(&format!("{name}{dot}{key}"), value, list);
            }
        }
        _ => {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            list.push(Fact { name: name.to_string(), value: shortened(&text, 400, "…") });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::data::{LanguageRow, PlanRow, Summary, Unit};
    use crate::report::metrics::{NoteRecord, Record};
    use crate::report::samples::Sample;
    use serde_json::json;

    const HOSTILE: &str = "</pre></style><script>alert(1)</script><img src=x onerror='a'>\"&\
        \0\u{1b}[2J\u{202e}";

    fn step(step: u64) -> Record {
        Record::Step(StepRecord {
            step,
            loss: 2.0 + 6.0 / step as f32 + (step % 7) as f32 * 0.123,
            divergence: None,
            lr: 1e-3 / step as f64,
            grad_norm: 0.5,
            ms: 400.0,
            tok_per_s: 5000.0,
            n_tok: step * 1000,
            elapsed_s: step as f64 * 0.4,
        })
    }

    fn eval(step: u64, bits_per_byte: f64) -> Record {
        Record::Eval(EvalRecord {
            set: None,
            step,
            loss: 3.0,
            bits_per_byte,
            elapsed_s: step as f64 * 0.4,
        })
    }

    fn page_of(data: &ReportData) -> String {
        html(data).unwrap()
    }

    fn words(text: &str) -> String {
        text.to_string()
    }

    /// A report in which every text is `text`.
    fn data(n_steps: u64, text: &str) -> ReportData {
        let mut data = ReportData::default();
        data.records.push(eval(0, 8.1));
        for n in 1..=n_steps {
            data.records.push(step(n));
            if n % 100 == 0 {
                data.records.push(eval(n, 2.0 + 100.0 / n as f64));
            }
        }
        data.records.push(Record::Note(NoteRecord { step: 5, text: words(text) }));
        let sample = |step| Sample {
            step,
            name: words(text),
            prompt: words(text),
            text: words(text),
            truth: words(text),
        };
        data.samples = vec![sample(0), sample(n_steps)];
        let summary = &mut data.summary;
        (summary.title, summary.outcome) = (words(text), words(text));
        summary.facts = vec![Fact { name: words(text), value: words(text) }];
        summary.machine.clone_from(&summary.facts);
        summary.held_out = HeldOut {
            n_files: 41,
            n_bytes: 1 << 20,
            split: words(text),
            verdict: words(text),
            gzip: Some(2.4),
            zstd: Some(1.9),
            ..HeldOut::default()
        };
        let language = words(text);
        summary.languages = vec![LanguageRow { language, n_files: 1, ..LanguageRow::default() }];
        let (reason, examples) = (words(text), vec![words(text); 9]);
        summary.left_out =
            json!([{"reason": reason, "n_files": 1, "n_bytes": 10, "examples": examples}]);
        let (unit, planned, measured) = (Unit::Bytes, Some(1e6), Some(1.031e6));
        summary.plan = vec![PlanRow { name: words(text), unit, planned, measured }];
        summary.config = json!({ text: { text: [text] } });
        data
    }

    /// Every section of a page, its text alone.
    fn text_of(page: &str) -> String {
        let body = page.split("<body>").nth(1).unwrap();
        let mut text = String::new();
        for piece in body.split('<').skip(1) {
            let (tag, after) = piece.split_once('>').unwrap();
            let is_block = ["/tr", "/p", "/dd", "/h2", "/li", "/pre"].contains(&tag);
            text.push_str(if is_block { "\n" } else { " " });
            text.push_str(after.trim_matches('\n'));
        }
        let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn hostile_words_stay_words() {
        let page = page_of(&data(300, HOSTILE));
        // Each `<` is one of ours: nothing from outside begins a tag.
        let ours = [
            "!doctype",
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "header",
            "h1",
            "h2",
            "h3",
            "h4",
            "p",
            "dl",
            "dt",
            "dd",
            "div",
            "span",
            "main",
            "section",
            "figure",
            "figcaption",
            "svg",
            "desc",
            "path",
            "rect",
            "details",
            "summary",
            "table",
            "thead",
            "tbody",
            "tfoot",
            "tr",
            "th",
            "td",
            "article",
            "pre",
            "ol",
            "li",
            "footer",
        ];
        for piece in page.split('<').skip(1) {
            let name = piece.trim_start_matches('/');
            let name = name.split(|c: char| c.is_whitespace() || "/>".contains(c)).next();
            assert!(ours.contains(&name.unwrap()), "<{}", &piece[..piece.len().min(40)]);
            let tag = piece.split('>').next().unwrap();
            assert!(!tag.contains("onerror"), "<{tag}");
        }
        assert!(!page.contains(['\0', '\u{1b}', '\u{202e}']));
        let shown = "&lt;script&gt;alert(1)&lt;&#x2f;script&gt;";
        assert!(page.matches(shown).count() > 20, "{}", page.matches(shown).count());
    }

    #[test]
    fn nothing_is_loaded_and_nothing_runs() {
        let page = page_of(&data(300, "calm"));
        let policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';";
        assert!(page.contains(policy));
        for word in ["http://", "https://", "<script", "src=", "href=", "url(", "@import", "//"] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn ten_thousand_steps_fit_in_150_kilobytes() {
        let page = page_of(&data(10_000, "calm"));
        assert!(page.len() < 150_000, "{} bytes", page.len());
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn a_report_of_nothing_is_a_page() {
        let text = text_of(&page_of(&ReportData::default()));
        let want = "No held-out text was measured after training.\nMade by elapid. This page is \
            complete in itself: it loads nothing and runs nothing.";
        assert_eq!(text, want);
    }

    #[test]
    fn numbers_that_are_not_numbers_leave_no_holes() {
        let mut odd = data(3, "calm");
        let Record::Step(mut broken) = step(4) else { unreachable!() };
        (broken.loss, broken.lr) = (f32::NAN, f64::INFINITY);
        odd.records.push(Record::Step(broken));
        odd.records.push(eval(4, f64::NAN));
        odd.summary.held_out.gzip = Some(f64::INFINITY);
        odd.summary.plan[0].planned = Some(0.0);
        let page = page_of(&odd);
        let plots = page.split("<table").next().unwrap();
        assert!(!plots.contains("NaN") && !plots.contains("inf%"), "{plots}");
    }

    #[test]
    fn the_page_says_what_was_found() {
        let mut data = data(200, "calm");
        data.samples[1].text = "longer".repeat(400);
        data.summary.languages[0].before = Some(8.0);
        data.summary.languages[0].after = Some(2.0);
        data.summary.languages[0].top1 = Some(0.5);
        let text = text_of(&page_of(&data));
        let wanted = [
            "8.10 → 2.50 held-out bits per byte",
            "A byte of held-out text now costs 2.500 bits, down from 8.100 (−69%). That is not yet \
             below gzip -9 (2.400) and zstd -19 + dictionary (1.900).",
            "Measured on 41 files, 1.0 MiB, never learned from: calm.",
            "calm 1 0 B 8.000 2.000 −75.0% 50.0%",
            "calm 1 10 B calm, calm, calm",
            "calm 976.6 KiB 1006.8 KiB +3.1%",
            "step 5: calm",
            "[…]",
            "calm.calm [&quot;calm&quot;]",
        ];
        for want in wanted {
            assert!(text.contains(want), "no {want:?} in\n{text}");
        }
    }

    /// The words of the verdict on a page.
    fn verdict(held_out: HeldOut) -> String {
        let summary = Summary { held_out, ..Summary::default() };
        let text = text_of(&page_of(&ReportData { summary, ..ReportData::default() }));
        let line = text
            .lines()
            .skip_while(|line| !line.starts_with("A byte"))
            .take_while(|line| !line.starts_with("before training"));
        line.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_verdict_names_what_is_passed_and_what_is_next() {
        let words = |gzip, zstd| {
            let (before, after) = (Some(8.0), Some(2.0));
            verdict(HeldOut { before, after, gzip, zstd, ..HeldOut::default() })
        };
        let head = "A byte of held-out text now costs 2.000 bits, down from 8.000 (−75%).";
        assert_eq!(words(None, None), head);
        let want =
            " That is below gzip -9 (2.500). The next mark is zstd -19 + dictionary (1.500).";
        assert_eq!(words(Some(2.5), Some(1.5)), format!("{head}{want}"));
        let want = " That is below gzip -9 (2.500) and zstd -19 + dictionary (2.100).";
        assert_eq!(words(Some(2.5), Some(2.1)), format!("{head}{want}"));
        // Equal is not below.
        let want = " That is not yet below gzip -9 (2.000).";
        assert_eq!(words(Some(2.0), None), format!("{head}{want}"));
        let (before, after) = (Some(2.0), Some(3.0));
        let worse = verdict(HeldOut { before, after, ..HeldOut::default() });
        assert!(worse.contains("up from 2.000 (+50%)"), "{worse}");
        let told = "too little to tell: 1.000 more bits per byte than before (and why)";
        let words = verdict(HeldOut { before, after, verdict: told.into(), ..HeldOut::default() });
        assert!(words.ends_with(&format!("Verdict: {told}.")), "{words}");
    }

    #[test]
    fn a_spike_neither_flattens_nor_bends_the_curve() {
        let mut data = data(1000, "calm");
        for record in &mut data.records {
            if let Record::Step(step) = record
                && step.step == 500
            {
                step.loss = 1e6;
            }
        }
        let page = page_of(&data);
        assert!(page.contains("1 step lies above the frame, the highest at 1000000.00."));
        let line = page.split("<path class=\"line\" d=\"").nth(1).unwrap();
        let line = line.split('"').next().unwrap();
        let heights = line[1..].split('L').map(|point| point.split_once(' ').unwrap().1);
        let heights: Vec<f64> = heights.map(|y| y.parse().unwrap()).collect();
        assert!(heights.len() > 300 && heights.iter().all(|y| *y > 0.0), "{line}");
    }
}
