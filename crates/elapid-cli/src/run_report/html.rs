//! `report.html`: one file that needs no network and no script, reads on a telephone and on paper.
//!
//! Every word that comes from outside goes through `escape`. A policy in the page forbids loading
//! anything and running anything, should that ever fail.
//!
//! Not here: how curves are drawn (`chart.rs`); where numbers come from (`data.rs`).

use crate::run_report::chart::{Chart, Mark, Point, Series, bar, extent, nice_range, smooth};
use crate::run_report::data::{
    Completion, Fact, HeldOut, LanguageRow, LeftOut, PlanRow, ReportData, Unit,
};
use crate::run_report::metrics::{EvalRecord, StepRecord};
use crate::run_report::text::{bytes, duration_exact, escape, grouped, rate, shortened};
use std::fmt::Write;

/// Its name in a run directory.
pub const FILE: &str = "report.html";

const CSS: &str = include_str!("page.css");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; \
    form-action 'none'";
const N_SAMPLES_MAX: usize = 12;
const N_SAMPLE_CHARS_MAX: usize = 1500;
const N_ROWS_MAX: usize = 40;
const N_NOTES_MAX: usize = 50;
const GZIP: &str = "gzip -9";
const ZSTD: &str = "zstd -19 + dictionary";

/// The whole page.
pub fn html(data: &ReportData) -> String {
    let summary = &data.summary;
    let title = escape(&summary.title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n\
         <title>{title}: training report</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n\
         <header>\n<h1>{title}</h1>\n<p class=\"lead\">{}</p>\n{}{}</header>\n<main>\n",
        escape(&summary.outcome),
        facts(&summary.facts, "facts"),
        verdict(data),
    );
    let sections = [
        ("Loss", loss_section(data)),
        ("Held-out bits per byte over time", time_section(data)),
        ("By language", languages(&summary.languages)),
        ("Completions before and after", completions(&data.completions())),
        ("Left out of the data", left_out(&summary.left_out)),
        ("Plan and measurement", plan(&summary.plan)),
        ("What happened", notes(data)),
        ("Configuration", config(&summary.config)),
        ("Machine", facts(&summary.machine, "facts")),
    ];
    for (name, body) in sections {
        if !body.is_empty() {
            let _ = write!(page, "<section>\n<h2>{name}</h2>\n{body}</section>\n");
        }
    }
    page.push_str(
        "</main>\n<footer>Made by elapid. This page is complete in itself: it loads nothing and \
         runs nothing.</footer>\n</body>\n</html>\n",
    );
    page
}

fn facts(list: &[Fact], class: &str) -> String {
    if list.is_empty() {
        return String::new();
    }
    let mut html = format!("<dl class=\"{class}\">\n");
    for Fact { name, value } in list {
        let _ = writeln!(html, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(value));
    }
    html.push_str("</dl>\n");
    html
}

fn verdict(data: &ReportData) -> String {
    let held_out = &data.summary.held_out;
    let (before, after) = data.before_after();
    let mut html = String::from("<div class=\"verdict\">\n");
    if let Some(after) = after {
        html.push_str("<p class=\"numbers\">");
        if let Some(before) = before {
            let _ = write!(html, "<span class=\"from\">{before:.2} →</span> ");
        }
        let _ = writeln!(html, "{after:.2} <span class=\"unit\">held-out bits per byte</span></p>");
    }
    let words = verdict_words(held_out, before, after);
    let _ = writeln!(html, "<p class=\"words\">{}</p>", escape(&words));
    html.push_str(&verdict_bars(held_out, before, after));
    let HeldOut { n_files, n_bytes, split, .. } = held_out;
    if *n_files > 0 {
        let files = if *n_files == 1 { "file" } else { "files" };
        let (n_files, n_bytes) = (grouped(*n_files), bytes(*n_bytes as f64));
        let mut text = format!("Measured on {n_files} {files}, {n_bytes}, never learned from");
        if !split.is_empty() {
            let _ = write!(text, ": {split}");
        }
        text.push('.');
        if let Some((low, high)) = held_out.after_interval {
            let _ = write!(text, " 95% interval after training: {low:.3} to {high:.3}.");
        }
        let _ = writeln!(html, "<p class=\"soft small\">{}</p>", escape(&text));
    }
    html.push_str("</div>\n");
    html
}

/// The verdict in a sentence or two.
fn verdict_words(held_out: &HeldOut, before: Option<f64>, after: Option<f64>) -> String {
    let Some(after) = after else {
        return "No held-out text was measured after training.".to_string();
    };
    let mut text = match before {
        None => format!("A byte of held-out text costs {after:.3} bits."),
        Some(before) => {
            let change = 100.0 * (after - before) / before;
            let (went, sign) = if after <= before { ("down", "−") } else { ("up", "+") };
            format!(
                "A byte of held-out text now costs {after:.3} bits, {went} from {before:.3} \
                 ({sign}{:.0}%).",
                change.abs()
            )
        }
    };
    let marks = [(GZIP, held_out.gzip), (ZSTD, held_out.zstd)];
    let marks = marks.iter().filter_map(|(name, value)| Some((*name, (*value)?)));
    let (passed, ahead): (Vec<_>, Vec<_>) = marks.partition(|mark| after < mark.1);
    let list = |marks: &[(&str, f64)]| {
        let texts: Vec<String> =
            marks.iter().map(|(name, value)| format!("{name} ({value:.3})")).collect();
        texts.join(" and ")
    };
    if !passed.is_empty() {
        let _ = write!(text, " That is below {}.", list(&passed));
    }
    match (passed.is_empty(), ahead.is_empty()) {
        (_, true) => {}
        (true, false) => {
            let _ = write!(text, " That is not yet below {}.", list(&ahead));
        }
        (false, false) => {
            let _ = write!(text, " The next mark is {}.", list(&ahead));
        }
    }
    text
}

fn marks(held_out: &HeldOut) -> Vec<Mark> {
    let list = [("gzip", GZIP, held_out.gzip), ("zstd", ZSTD, held_out.zstd)];
    let mark = |(class, name, value): (&'static str, &str, Option<f64>)| {
        let at = value.filter(|value| value.is_finite())?;
        Some(Mark { class, at, name: format!("{name}: {at:.2}") })
    };
    list.into_iter().filter_map(mark).collect()
}

fn verdict_bars(held_out: &HeldOut, before: Option<f64>, after: Option<f64>) -> String {
    let rows = [
        ("before training", "before", before),
        (GZIP, "other", held_out.gzip),
        (ZSTD, "other", held_out.zstd),
        ("after training", "after", after),
    ];
    let rows: Vec<_> = rows
        .into_iter()
        .filter_map(|(name, class, value)| Some((name, class, value.filter(|v| v.is_finite())?)))
        .collect();
    let scale = rows.iter().map(|row| row.2).fold(0.0, f64::max);
    if rows.is_empty() || scale <= 0.0 {
        return String::new();
    }
    let marks = marks(held_out);
    let mut html = String::from("<dl class=\"bars\">\n");
    for (name, class, value) in rows {
        let drawn = bar(value, class, &marks, scale);
        let _ = writeln!(
            html,
            "<div><dt>{name}</dt><dd class=\"drawn\">{drawn}</dd>\
             <dd class=\"value\">{value:.3}</dd></div>"
        );
    }
    html.push_str("</dl>\n");
    html
}

fn loss_section(data: &ReportData) -> String {
    let steps = data.steps();
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else {
        return String::new();
    };
    let points = |y: fn(&StepRecord) -> f64| -> Vec<Point> {
        steps.iter().map(|step| Point { x: step.step as f64, y: y(step) }).collect()
    };
    let raw = points(|step| f64::from(step.loss));
    let Some((low, high)) = extent(&raw) else { return String::new() };
    let (x, y) = ((0.0, last.step.max(1) as f64), loss_range(&raw, low, high));
    // A spike out of the frame is not to lift the mean of all its neighbours.
    let usual: Vec<Point> = raw.iter().filter(|point| point.y <= y.1).copied().collect();
    let line = smooth(&usual, steps.len() / 120);
    let n_above = raw.iter().filter(|point| point.y > y.1).count();
    let end = line.last().map_or(f64::NAN, |point| point.y);
    let mut caption = String::from(
        "Nats per token of each batch before its update: thin as measured, thick the mean of \
         neighbouring steps.",
    );
    if n_above > 0 {
        let lie = if n_above == 1 { "step lies" } else { "steps lie" };
        let _ = write!(caption, " {n_above} {lie} above the frame, the highest at {high:.2}.");
    }
    let flag = |(idx, step): (usize, u64)| Mark {
        class: "back",
        at: step as f64,
        name: (idx + 1).to_string(),
    };
    let along: Vec<Mark> = data
        .notes()
        .iter()
        .map(|note| note.step)
        .take(N_NOTES_MAX)
        .enumerate()
        .filter(|(_, step)| (1..=last.step).contains(step))
        .map(flag)
        .collect();
    if !along.is_empty() {
        caption.push_str(" Numbers at the top: see What happened.");
    }
    let desc = format!(
        "From {:.3} at step {} to about {end:.3} at step {}; lowest {low:.3}, highest {high:.3}.",
        first.loss, first.step, last.step
    );
    let (title, x_name) = ("Loss over steps".to_string(), "step".to_string());
    let series = vec![Series { class: "raw", points: raw }, Series { class: "line", points: line }];
    let y_name = "loss, nats per token".to_string();
    let across = Vec::new();
    let chart = Chart { id: "loss", title, desc, x_name, y_name, x, y, series, across, along };
    let rate = rate_chart(points(|step| step.lr), x);
    format!(
        "<figure>\n{}<figcaption>{}</figcaption>\n{}</figure>\n{rate}",
        chart.draw(),
        escape(&caption),
        step_table(&steps)
    )
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

fn rate_chart(points: Vec<Point>, x: (f64, f64)) -> String {
    let Some((low, high)) = extent(&points) else { return String::new() };
    let chart = Chart {
        id: "lr",
        title: "Learning rate over steps".to_string(),
        desc: format!("Between {low:.1e} and {high:.1e}."),
        x_name: "step".to_string(),
        y_name: "learning rate".to_string(),
        x,
        y: (0.0, nice_range(0.0, 1.05 * high).1),
        series: vec![Series { class: "line", points }],
        ..Chart::default()
    };
    format!("<figure>\n{}</figure>\n", chart.draw())
}

/// At most `N_ROWS_MAX` of a list, evenly, with both ends.
fn some<T>(list: &[T]) -> Vec<&T> {
    if list.len() <= N_ROWS_MAX {
        return list.iter().collect();
    }
    (0..N_ROWS_MAX).map(|idx| &list[idx * (list.len() - 1) / (N_ROWS_MAX - 1)]).collect()
}

fn step_table(steps: &[StepRecord]) -> String {
    let row = |step: &&StepRecord| {
        vec![
            grouped(step.step),
            format!("{:.4}", step.loss),
            format!("{:.2e}", step.lr),
            format!("{:.2}", step.grad_norm),
            format!("{:.0}", step.ms),
            rate(step.tok_per_s),
        ]
    };
    let head = ["step", "loss", "learning rate", "gradient norm", "ms", "tokens/s"];
    numbers(&head, some(steps).iter().map(row).collect())
}

/// A folded table for those who do not see the plot or want its numbers.
fn numbers(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let columns: Vec<(&str, Align)> = head.iter().map(|name| (*name, Align::Number)).collect();
    let table = table(&columns, &rows, None);
    format!("<details><summary>Numbers of this plot</summary>\n{table}</details>\n")
}

fn time_section(data: &ReportData) -> String {
    let evals = data.evals();
    let (Some(first), Some(last)) = (evals.first(), evals.last()) else {
        return String::new();
    };
    let (unit, seconds) = match last.elapsed_s {
        s if s > 3.0 * 3600.0 => ("hours", 3600.0),
        s if s > 150.0 => ("minutes", 60.0),
        _ => ("seconds", 1.0),
    };
    let place = |eval: &EvalRecord| Point { x: eval.elapsed_s / seconds, y: eval.bits_per_byte };
    let points: Vec<Point> = evals.iter().map(place).collect();
    let across = marks(&data.summary.held_out);
    let levels: Vec<Point> = across.iter().map(|mark| Point { x: 0.0, y: mark.at }).collect();
    let Some((low, high)) = extent(points.iter().chain(&levels)) else { return String::new() };
    // A model from scratch begins far above; what matters happens near the marks.
    let near = levels.iter().map(|mark| mark.y).fold(last.bits_per_byte, f64::max);
    let top = if high > 2.5 * near { 2.0 * near } else { high };
    let y = nice_range(low - 0.04 * (top - low), top);
    let above = match first.bits_per_byte {
        bits if bits > y.1 => {
            format!("<figcaption>The curve begins at {bits:.2}, above the frame.</figcaption>\n")
        }
        _ => String::new(),
    };
    let desc = format!(
        "From {:.3} at step {} to {:.3} at step {}, after {}.",
        first.bits_per_byte,
        first.step,
        last.bits_per_byte,
        last.step,
        duration_exact(last.elapsed_s)
    );
    let end = points.iter().map(|point| point.x).filter(|x| x.is_finite()).fold(0.0, f64::max);
    let series =
        vec![Series { class: "line", points: points.clone() }, Series { class: "dots", points }];
    let chart = Chart {
        id: "time",
        title: "Held-out bits per byte over time".to_string(),
        desc,
        x_name: format!("{unit} of training"),
        y_name: "bits per byte, less is better".to_string(),
        // The last dot stands whole inside.
        x: (0.0, 1.01 * end.max(1e-3)),
        y,
        series,
        across,
        along: Vec::new(),
    };
    let row = |eval: &&EvalRecord| {
        vec![
            grouped(eval.step),
            duration_exact(eval.elapsed_s),
            format!("{:.4}", eval.loss),
            format!("{:.4}", eval.bits_per_byte),
        ]
    };
    let head = ["step", "time", "loss", "bits per byte"];
    let numbers = numbers(&head, some(&evals).iter().map(row).collect());
    format!("<figure>\n{}{above}{numbers}</figure>\n", chart.draw())
}

/// How a column is set.
#[derive(Clone, Copy, PartialEq)]
enum Align {
    Name,
    Number,
    Names,
}

/// Rows of text; the first column names its row. The last line is set apart as a total.
fn table(head: &[(&str, Align)], rows: &[Vec<String>], total: Option<Vec<String>>) -> String {
    let class = |align: Align| match align {
        Align::Name => "",
        Align::Number => " class=\"n\"",
        Align::Names => " class=\"names\"",
    };
    let line = |cells: &[String]| {
        let mut html = String::from("<tr>");
        for (idx, (cell, (_, align))) in cells.iter().zip(head).enumerate() {
            let (tag, scope) = if idx == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
            let _ = write!(html, "<{tag}{scope}{}>{}</{tag}>", class(*align), escape(cell));
        }
        html.push_str("</tr>\n");
        html
    };
    let mut html = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for (name, align) in head {
        let _ = write!(html, "<th scope=\"col\"{}>{}</th>", class(*align), escape(name));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    rows.iter().for_each(|row| html.push_str(&line(row)));
    html.push_str("</tbody>\n");
    if let Some(total) = total {
        let _ = writeln!(html, "<tfoot>{}</tfoot>", line(&total).trim_end());
    }
    html.push_str("</table></div>\n");
    html
}

fn or_dash(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.filter(|value| value.is_finite()).map_or("–".to_string(), write)
}

fn languages(list: &[LanguageRow]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let head = [
        ("language", Align::Name),
        ("files", Align::Number),
        ("size", Align::Number),
        ("bits/byte before", Align::Number),
        ("after", Align::Number),
        ("change", Align::Number),
        ("right at first guess", Align::Number),
    ];
    let row = |row: &LanguageRow| {
        let change = row.before.zip(row.after).map(|(before, after)| after / before - 1.0);
        vec![
            row.language.clone(),
            grouped(row.n_files),
            bytes(row.n_bytes as f64),
            or_dash(row.before, |bits| format!("{bits:.3}")),
            or_dash(row.after, |bits| format!("{bits:.3}")),
            or_dash(change, percent),
            or_dash(row.top1, |share| format!("{:.1}%", 100.0 * share)),
        ]
    };
    let rows: Vec<Vec<String>> = list.iter().map(row).collect();
    let note = "<p class=\"soft small\">Held-out files. The first guess is the model's likeliest \
        next token.</p>\n";
    format!("{}{note}", table(&head, &rows, None))
}

/// A difference as a share, with a true minus.
fn percent(share: f64) -> String {
    let percent = (1000.0 * share).round() / 10.0;
    let sign = match percent {
        p if p > 0.0 => "+",
        p if p < 0.0 => "−",
        _ => "",
    };
    format!("{sign}{:.1}%", percent.abs())
}

fn completions(list: &[Completion]) -> String {
    let mut html = String::new();
    for Completion { first, last } in list.iter().take(N_SAMPLES_MAX) {
        let _ = write!(html, "<article class=\"sample\">\n<h3>{}</h3>\n", escape(&first.name));
        let _ = write!(html, "<h4>given</h4>\n{}", block(&first.prompt));
        html.push_str("<div class=\"sides\">\n");
        let mut side = |class: &str, name: &str, text: &str| {
            let _ = write!(html, "<div class=\"{class}\"><h4>{name}</h4>\n{}</div>\n", block(text));
        };
        if first.step != last.step {
            let name = if first.step == 0 { "before".to_string() } else { at_step(first.step) };
            side("before", &name, &first.text);
        }
        let name = if last.step == 0 { "before".to_string() } else { at_step(last.step) };
        side("after", &name, &last.text);
        side("truth", "what stands there", &last.truth);
        html.push_str("</div>\n</article>\n");
    }
    if list.len() > N_SAMPLES_MAX {
        let n_more = list.len() - N_SAMPLES_MAX;
        let _ = writeln!(html, "<p class=\"soft\">{n_more} more are in samples.jsonl.</p>");
    }
    html
}

fn at_step(step: u64) -> String {
    format!("after {} steps", grouped(step))
}

fn block(text: &str) -> String {
    // A first line end inside `pre` is dropped by readers of HTML; this one is, instead of ours.
    format!("<pre>\n{}</pre>\n", escape(&shortened(text, N_SAMPLE_CHARS_MAX, "\n[…]")))
}

fn left_out(list: &[LeftOut]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let head = [
        ("reason", Align::Name),
        ("files", Align::Number),
        ("size", Align::Number),
        ("such as", Align::Names),
    ];
    let row = |row: &LeftOut| {
        let short = |name: &String| shortened(name, 60, "…");
        let names: Vec<String> = row.examples.iter().take(3).map(short).collect();
        let size = bytes(row.n_bytes as f64);
        vec![row.reason.clone(), grouped(row.n_files), size, names.join(", ")]
    };
    let rows: Vec<Vec<String>> = list.iter().map(row).collect();
    let n_files = list.iter().map(|row| row.n_files).sum();
    let n_bytes: u64 = list.iter().map(|row| row.n_bytes).sum();
    let all = vec!["in all".to_string(), grouped(n_files), bytes(n_bytes as f64), String::new()];
    table(&head, &rows, (list.len() > 1).then_some(all))
}

fn plan(list: &[PlanRow]) -> String {
    if list.is_empty() {
        return String::new();
    }
    let head = [
        ("", Align::Name),
        ("planned", Align::Number),
        ("measured", Align::Number),
        ("difference", Align::Number),
    ];
    let row = |row: &PlanRow| {
        let text = |value: f64| match row.unit {
            Unit::Count => grouped(value.max(0.0).round() as u64),
            Unit::Bytes => bytes(value),
            Unit::Seconds if value < 1.0 => format!("{:.0} ms", 1e3 * value),
            Unit::Seconds => duration_exact(value),
        };
        let difference = row.planned.zip(row.measured).map(|(plan, found)| found / plan - 1.0);
        let (planned, measured) = (or_dash(row.planned, text), or_dash(row.measured, text));
        vec![row.name.clone(), planned, measured, or_dash(difference, percent)]
    };
    let rows: Vec<Vec<String>> = list.iter().map(row).collect();
    table(&head, &rows, None)
}

fn notes(data: &ReportData) -> String {
    let notes = data.notes();
    if notes.is_empty() {
        return String::new();
    }
    let mut html = String::from("<ol class=\"notes\">\n");
    for note in notes.iter().take(N_NOTES_MAX) {
        let (text, step) = (escape(&shortened(&note.text, 500, "…")), grouped(note.step));
        let _ = writeln!(html, "<li>step {step}: {text}</li>");
    }
    html.push_str("</ol>\n");
    if notes.len() > N_NOTES_MAX {
        let n_more = notes.len() - N_NOTES_MAX;
        let _ = writeln!(html, "<p class=\"soft\">{n_more} more are in metrics.jsonl.</p>");
    }
    html
}

fn config(value: &serde_json::Value) -> String {
    let mut list = Vec::new();
    flatten("", value, &mut list);
    facts(&list, "facts config")
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
            let text = match value {
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let value = shortened(&text, 400, "…");
            list.push(Fact { name: name.to_string(), value });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_report::metrics::{NoteRecord, Record};
    use crate::run_report::samples::Sample;
    use serde_json::json;

    const HOSTILE: &str = "</pre></style><script>alert(1)</script><img src=x onerror='a'>\"&\
        \0\u{1b}[2J\u{202e}";

    fn step(step: u64) -> Record {
        Record::Step(StepRecord {
            step,
            loss: 2.0 + 6.0 / step as f32 + (step % 7) as f32 * 0.123,
            lr: 1e-3 / step as f64,
            grad_norm: 0.5,
            ms: 400.0,
            tok_per_s: 5000.0,
            n_tok: step * 1000,
            elapsed_s: step as f64 * 0.4,
        })
    }

    fn eval(step: u64, bits_per_byte: f64) -> Record {
        Record::Eval(EvalRecord { step, loss: 3.0, bits_per_byte, elapsed_s: step as f64 * 0.4 })
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
            gzip: Some(2.4),
            zstd: Some(1.9),
            ..HeldOut::default()
        };
        let language = words(text);
        summary.languages = vec![LanguageRow { language, n_files: 1, ..LanguageRow::default() }];
        let (reason, examples) = (words(text), vec![words(text); 9]);
        summary.left_out = vec![LeftOut { reason, n_files: 1, n_bytes: 10, examples }];
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
        let page = html(&data(300, HOSTILE));
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
        let shown = "&lt;script&gt;alert(1)&lt;/script&gt;";
        assert!(page.matches(shown).count() > 20, "{}", page.matches(shown).count());
    }

    #[test]
    fn nothing_is_loaded_and_nothing_runs() {
        let page = html(&data(300, "calm"));
        let policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';";
        assert!(page.contains(policy));
        for word in ["http://", "https://", "<script", "src=", "href=", "url(", "@import", "//"] {
            assert!(!page.contains(word), "{word}");
        }
    }

    #[test]
    fn ten_thousand_steps_fit_in_150_kilobytes() {
        let page = html(&data(10_000, "calm"));
        assert!(page.len() < 150_000, "{} bytes", page.len());
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn a_report_of_nothing_is_a_page() {
        let text = text_of(&html(&ReportData::default()));
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
        let page = html(&odd);
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
        let text = text_of(&html(&data));
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

    #[test]
    fn the_verdict_names_what_is_passed_and_what_is_next() {
        let held_out = |gzip, zstd| HeldOut { gzip, zstd, ..HeldOut::default() };
        let words = |gzip, zstd| verdict_words(&held_out(gzip, zstd), Some(8.0), Some(2.0));
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
        let worse = verdict_words(&HeldOut::default(), Some(2.0), Some(3.0));
        assert!(worse.contains("up from 2.000 (+50%)"), "{worse}");
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
        let page = html(&data);
        assert!(page.contains("1 step lies above the frame, the highest at 1000000.00."));
        let line = page.split("<path class=\"line\" d=\"").nth(1).unwrap();
        let line = line.split('"').next().unwrap();
        let heights = line[1..].split('L').map(|point| point.split_once(' ').unwrap().1);
        let heights: Vec<f64> = heights.map(|y| y.parse().unwrap()).collect();
        assert!(heights.len() > 300 && heights.iter().all(|y| *y > 0.0), "{line}");
    }
}
