//! What commands say while they work.
//!
//!     model   hybrid, 12 layers, d_model 384, 21.4 M parameters
//!     step    100/2000   loss 3.2134  lr 1.5e-4  grad 0.91  412 ms  4.9 k tok/s ...
//!     eval    100        loss 3.4418  1.313 bits per byte
//!     save    runs/a1/step-100
//!     note    130        loss 41.2: back to step 120, rate halved
//!
//! | output     | steps                                                   | everything to |
//! |------------|---------------------------------------------------------|---------------|
//! | `Terminal` | a bar below the lines, drawn about five times a second  | stderr        |
//! | `Plain`    | a line at first, then every 5 s to 60 s, and at last    | stderr        |
//! | `Json`     | an object for every step, with the fields of metrics    | stdout        |
//!
//! Time comes in from outside, so that the same calls give the same lines.
//!
//! Not here: the clock; where the numbers come from.

use crate::report::metrics::{EvalRecord, NoteRecord, Record, SaveRecord, StepRecord};
use crate::report::text::{duration, rate};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde::Serialize;
use serde_json::json;
use std::io::Write;
use std::time::Duration;

const LINE_EVERY_MIN: Duration = Duration::from_secs(5);
const LINE_EVERY_MAX: Duration = Duration::from_secs(60);

pub(super) fn bar(target: ProgressDrawTarget, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("templates are ours and parse");
    ProgressBar::with_draw_target(None, target)
        .with_style(style.progress_chars("█▉▊▋▌▍▎▏░"))
        .with_finish(ProgressFinish::AndClear)
}

/// How far long work is, told how many units of how many are done: a line that is gone when this is
/// dropped. Nothing where stderr is no terminal.
pub fn progress<N: TryInto<u64>>(kind: &str, amounts: &str) -> impl FnMut(N, N) {
    let template = format!("{kind:<8}{amounts}  {{percent}}%  eta {{eta}}");
    let bar = bar(ProgressDrawTarget::stderr_with_hz(5), &template);
    move |n_done, n| {
        bar.set_length(n.try_into().unwrap_or(u64::MAX));
        bar.set_position(n_done.try_into().unwrap_or(u64::MAX));
    }
}

/// How and where a run is shown.
pub enum Output {
    /// Lines that stay above one bar.
    Terminal(ProgressBar),
    /// A line now and then, for logs.
    Plain(Box<dyn Write>),
    /// Objects.
    Json(Box<dyn Write>),
}

impl Output {
    /// A bar where stderr is a terminal, else plain lines.
    pub fn for_people() -> Output {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        match target.is_hidden() {
            true => Output::Plain(Box::new(std::io::stderr())),
            false => Output::terminal(target),
        }
    }

    pub fn json() -> Output {
        Output::Json(Box::new(std::io::stdout()))
    }

    fn terminal(target: ProgressDrawTarget) -> Output {
        // A message too long for the terminal is cut at its end.
        let bar = bar(target, "{prefix} {bar:24}  {wide_msg}");
        // Not seen before the first step.
        bar.finish_and_clear();
        Output::Terminal(bar)
    }
}

/// A step, and what is known around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment<'a> {
    /// Time since any fixed moment.
    pub now: Duration,
    pub step: &'a StepRecord,
    /// Steps of the whole run.
    pub n_steps: u64,
    /// How much of what the machine could do at best was used, 1 is all.
    pub limit_share: Option<f64>,
}

/// A step as a JSON line.
#[derive(Serialize)]
struct StepLine<'a> {
    #[serde(flatten)]
    record: &'a Record,
    n_steps: u64,
    limit_share: Option<f64>,
    eta_s: f64,
}

/// Shows progress. Where its reader has gone away it falls silent: hours of training are not to be
/// lost because someone closed a pager.
pub struct Live {
    output: Output,
    /// When the first step of this process began.
    begin: Option<Duration>,
    /// Steps of this process, those undone by a rollback too.
    n_done: u64,
    /// When a step was last shown as a line that stays.
    shown: Option<Duration>,
    /// The newest step, where it was not shown so.
    last: Option<String>,
    bits_per_byte: Option<f64>,
    /// Of several, said in every object.
    rank: Option<usize>,
}

impl Live {
    pub fn new(output: Output) -> Live {
        let (shown, last, bits_per_byte, rank) = (None, None, None, None);
        Live { output, begin: None, n_done: 0, shown, last, bits_per_byte, rank }
    }

    /// The same of one of several ranks.
    pub fn of_rank(self, rank: usize) -> Live {
        Live { rank: Some(rank), ..self }
    }

    /// A line of its own: `model`, `device`, `data`, `report` ...
    pub fn line(&mut self, kind: &str, text: &str) {
        self.put(&json!({"kind": kind, "text": text}), &format!("{kind:<8}{text}"));
    }

    /// After every step.
    pub fn step(&mut self, moment: &Moment) {
        let Moment { now, step, n_steps, limit_share } = *moment;
        let ms = if step.ms.is_finite() { step.ms.clamp(0.0, 1e12) } else { 0.0 };
        let began = now.saturating_sub(Duration::from_secs_f64(ms / 1e3));
        let begin = *self.begin.get_or_insert(began);
        self.n_done += 1;
        // Evaluations and checkpoints in between take their part of the time that is left.
        let pace = now.saturating_sub(begin).as_secs_f64() / self.n_done as f64;
        let eta_s = n_steps.saturating_sub(step.step) as f64 * pace;
        // The log of a night is to be read in a minute too.
        let every = (now.saturating_sub(begin) / 60).clamp(LINE_EVERY_MIN, LINE_EVERY_MAX);
        let is_due = self.shown.is_none_or(|shown| now.saturating_sub(shown) >= every);
        if matches!(self.output, Output::Json(_)) {
            let record = &Record::Step(*step);
            return self.put(&StepLine { record, n_steps, limit_share, eta_s }, "");
        }
        self.last = Some(step_line(moment, eta_s));
        match &self.output {
            // The last one stays in any case, before what is measured after it.
            _ if step.step >= n_steps => self.finish(),
            Output::Plain(_) if is_due => {
                self.finish();
                self.shown = Some(now);
            }
            Output::Plain(_) | Output::Json(_) => {}
            Output::Terminal(bar) => {
                let n_digits = n_steps.to_string().len();
                bar.set_length(n_steps);
                bar.set_prefix(format!("step    {:>n_digits$}/{n_steps}", step.step));
                bar.set_message(bar_message(moment, eta_s, self.bits_per_byte));
                if bar.is_finished() {
                    bar.reset();
                }
                bar.set_position(step.step);
            }
        }
    }

    /// After a measurement on held-out files.
    pub fn eval(&mut self, record: &EvalRecord, n_steps: u64) {
        let EvalRecord { set, step, loss, bits_per_byte, .. } = record;
        if set.is_none() {
            self.bits_per_byte = Some(*bits_per_byte);
        }
        let step = step_column(&step.to_string(), n_steps);
        let on = set.as_ref().map_or(String::new(), |set| format!(" on {set}"));
        let text = format!("eval    {step}  loss {loss:.4}  {bits_per_byte:.3} bits per byte{on}");
        self.put(&Record::Eval(record.clone()), &text);
    }

    /// After a checkpoint.
    pub fn save(&mut self, record: &SaveRecord) {
        self.put(&Record::Save(record.clone()), &format!("save    {}", record.path));
    }

    /// When something happened that a person should know.
    pub fn note(&mut self, record: &NoteRecord, n_steps: u64) {
        let step = step_column(&record.step.to_string(), n_steps);
        self.put(&Record::Note(record.clone()), &format!("note    {step}  {}", record.text));
    }

    /// At the end of the steps, whatever ended them: clears the bar and leaves the last step as a
    /// line that stays.
    pub fn finish(&mut self) {
        if let Output::Terminal(bar) = &self.output {
            bar.finish_and_clear();
        }
        if let Some(text) = self.last.take() {
            self.put(&(), &text);
        }
    }

    /// One line: an object for machines, or text for people.
    fn put(&mut self, object: &impl Serialize, text: &str) {
        let (writer, line) = match &mut self.output {
            Output::Terminal(bar) => return bar.println(text),
            Output::Plain(writer) => (writer, text.to_string()),
            Output::Json(writer) => {
                let text = serde_json::to_string(object);
                let mut text = text.expect("lines hold numbers and text only");
                if let (Some(rank), true) = (self.rank, text.starts_with("{\"")) {
                    text.insert_str(1, &format!("\"rank\":{rank},"));
                }
                (writer, text)
            }
        };
        let _ = writeln!(writer, "{line}").and_then(|()| writer.flush());
    }
}

/// `text` as wide as the longest `step/n_steps`, so that what follows is a column.
fn step_column(text: &str, n_steps: u64) -> String {
    let width = 2 * n_steps.to_string().len() + 1;
    format!("{text:<width$}")
}

fn step_line(moment: &Moment, eta_s: f64) -> String {
    let Moment { step, n_steps, limit_share, .. } = moment;
    let StepRecord { loss, lr, grad_norm, ms, tok_per_s, .. } = step;
    let divergence = step.divergence.map(|kl| format!("  kl {kl:.4}")).unwrap_or_default();
    let column = step_column(&format!("{}/{n_steps}", step.step), *n_steps);
    let lr = if *lr == 0.0 { "0".to_string() } else { format!("{lr:.1e}") };
    let ms = if *ms < 9.95 { format!("{ms:.1}") } else { format!("{ms:.0}") };
    let tok_per_s = rate(*tok_per_s);
    let mut text = format!(
        "step    {column}  loss {loss:.4}{divergence}  lr {lr}  grad {grad_norm:.2}  {ms} ms  \
         {tok_per_s} tok/s"
    );
    if let Some(share) = limit_share {
        text += &format!("  {:.0}% of limit", 100.0 * share);
    }
    if step.step < *n_steps {
        text += &format!("  eta {}", duration(eta_s));
    }
    text
}

/// What stands beside the bar. A narrow terminal cuts its end, so that what matters least is last.
fn bar_message(moment: &Moment, eta_s: f64, bits_per_byte: Option<f64>) -> String {
    let mut text = format!("loss {:.4}  eta {}", moment.step.loss, duration(eta_s));
    if let Some(bits) = bits_per_byte {
        text += &format!("  {bits:.3} bits/byte");
    }
    text += &format!("  {} tok/s", rate(moment.step.tok_per_s));
    if let Some(share) = moment.limit_share {
        text += &format!("  {:.0}% of limit", 100.0 * share);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// What was written, kept for the test.
    #[derive(Clone, Default)]
    struct Sheet(Rc<RefCell<Vec<u8>>>);

    impl Write for Sheet {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sheet {
        fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.borrow_mut())).unwrap()
        }
    }

    fn plain() -> (Live, Sheet) {
        let sheet = Sheet::default();
        (Live::new(Output::Plain(Box::new(sheet.clone()))), sheet)
    }

    fn json() -> (Live, Sheet) {
        let sheet = Sheet::default();
        (Live::new(Output::Json(Box::new(sheet.clone()))), sheet)
    }

    /// A terminal of so many columns that draws whenever it is asked to.
    fn terminal(n_columns: u16) -> (Live, InMemoryTerm) {
        let screen = InMemoryTerm::new(10, n_columns);
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        (Live::new(Output::terminal(target)), screen)
    }

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 3.21344,
            divergence: None,
            lr: 1.5e-4,
            grad_norm: 0.912,
            ms: 412.3,
            tok_per_s: 4912.0,
            n_tok: step * 2048,
            elapsed_s: step as f64 * 0.4123,
        }
    }

    /// Shows `step` of 2000 at its time, at 412 ms each.
    fn show(live: &mut Live, step: u64) {
        let now = Duration::from_micros(412_300 * step);
        live.step(&Moment { now, step: &record(step), n_steps: 2000, limit_share: Some(0.617) });
    }

    const EVAL: EvalRecord =
        EvalRecord { set: None, step: 100, loss: 3.44182, bits_per_byte: 1.31251, elapsed_s: 41.0 };

    #[test]
    fn plain_lines_are_columns_with_the_kind_first() {
        let (mut live, talk) = plain();
        live.line("model", "hybrid, 12 layers");
        show(&mut live, 100);
        live.eval(&EVAL, 2000);
        live.save(&SaveRecord { step: 100, path: "runs/a1/step-100".to_string() });
        live.note(&NoteRecord { step: 1300, text: "back to step 1200".to_string() }, 2000);
        show(&mut live, 2000);
        live.finish();
        let want = "\
model   hybrid, 12 layers
step    100/2000   loss 3.2134  lr 1.5e-4  grad 0.91  412 ms  4.9 k tok/s  62% of limit  eta 13 m
eval    100        loss 3.4418  1.313 bits per byte
save    runs/a1/step-100
note    1300       back to step 1200
step    2000/2000  loss 3.2134  lr 1.5e-4  grad 0.91  412 ms  4.9 k tok/s  62% of limit
";
        assert_eq!(talk.take(), want);
    }

    #[test]
    fn plain_steps_come_at_first_every_five_seconds_and_at_last() {
        let (mut live, talk) = plain();
        (1..=30).for_each(|step| show(&mut live, step));
        live.finish();
        let text = talk.take();
        let steps: Vec<&str> = text.lines().map(|line| &line[8..15]).collect();
        // 5 s are 12.1 steps; the run ended early, at 30.
        assert_eq!(steps, ["1/2000 ", "14/2000", "27/2000", "30/2000"]);
    }

    #[test]
    fn the_last_step_is_not_said_twice() {
        let (mut live, talk) = plain();
        show(&mut live, 2000);
        live.finish();
        live.finish();
        assert_eq!(talk.take().lines().count(), 1);
    }

    #[test]
    fn the_last_step_comes_before_what_is_measured_after_it() {
        let end = |live: &mut Live| {
            show(live, 1999);
            show(live, 2000);
            live.eval(&EVAL, 2000);
            live.finish();
        };
        let ((mut log, talk), (mut live, screen)) = (plain(), terminal(120));
        end(&mut log);
        end(&mut live);
        for text in [talk.take(), screen.contents()] {
            let stays = text.find("step    2000/2000  ").unwrap();
            assert!(stays < text.find("eval").unwrap(), "{text}");
            assert_eq!(text.matches("2000/2000").count(), 1, "{text}");
        }
    }

    #[test]
    fn lines_become_rarer_in_long_runs_but_not_rarer_than_a_minute() {
        let (mut live, talk) = plain();
        for minute in 0..240 {
            for second in 0..60 {
                let now = Duration::from_secs(minute * 60 + second);
                let step = &record(minute * 60 + second);
                live.step(&Moment { now, step, n_steps: 1 << 20, limit_share: None });
            }
            let n_lines = talk.take().lines().count();
            let (least, most) = if minute < 5 { (11, 12) } else { (1, 11) };
            assert!((least..=most).contains(&n_lines), "minute {minute}: {n_lines}");
        }
    }

    #[test]
    fn the_time_left_counts_all_that_was_done_here_and_not_before() {
        let (mut live, data) = json();
        // Resumed at 1001, one second a step; after three steps back to 1000, before the first.
        for (second, step) in [(1, 1001), (2, 1002), (3, 1003), (4, 1000)] {
            let (now, step) = (Duration::from_secs(second), &record(step));
            let step = &StepRecord { ms: 1000.0, ..*step };
            live.step(&Moment { now, step, n_steps: 2000, limit_share: None });
        }
        let text = data.take();
        let eta = |line: &str| line.split("\"eta_s\":").nth(1).map(str::to_string);
        let etas: Vec<Option<String>> = text.lines().map(eta).collect();
        let want = ["999.0}", "998.0}", "997.0}", "1000.0}"];
        assert_eq!(etas, want.map(|eta| Some(eta.to_string())));
    }

    #[test]
    fn json_has_every_step_and_nothing_else() {
        let (mut live, data) = json();
        live.line("data", "412 files");
        show(&mut live, 1);
        show(&mut live, 2);
        live.eval(&EVAL, 2000);
        live.save(&SaveRecord { step: 2, path: "step-2".to_string() });
        live.note(&NoteRecord { step: 3, text: "a \"b\"".to_string() }, 2000);
        live.finish();
        let text = data.take();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "{\"kind\":\"data\",\"text\":\"412 files\"}");
        let (head, tail) = lines[1].split_once(",\"eta_s\":").unwrap();
        let want = "{\"kind\":\"step\",\"step\":1,\"loss\":3.21344,\"lr\":0.00015,\
            \"grad_norm\":0.912,\"ms\":412.3,\"tok_per_s\":4912.0,\"n_tok\":2048,\
            \"elapsed_s\":0.4123,\"n_steps\":2000,\"limit_share\":0.617";
        assert_eq!(head, want);
        assert!((tail.trim_end_matches('}').parse::<f64>().unwrap() - 824.2).abs() < 0.1, "{tail}");
        assert_eq!(lines[3], Record::Eval(EVAL).to_json());
        assert_eq!(lines[4], "{\"kind\":\"save\",\"step\":2,\"path\":\"step-2\"}");
        assert_eq!(lines[5], "{\"kind\":\"note\",\"step\":3,\"text\":\"a \\\"b\\\"\"}");
        assert_eq!(lines.len(), 6);
    }

    #[test]
    fn the_bar_stands_below_the_lines_and_is_gone_at_the_end() {
        let (mut live, screen) = terminal(120);
        live.line("data", "412 files");
        assert_eq!(screen.contents(), "data    412 files");
        show(&mut live, 4);
        let bar = "step       4/2000 ▏░░░░░░░░░░░░░░░░░░░░░░░  loss 3.2134  eta 14 m";
        let want = format!("data    412 files\n{bar}  4.9 k tok/s  62% of limit");
        assert_eq!(screen.contents(), want);
        live.eval(&EVAL, 2000);
        show(&mut live, 500);
        let lines = "data    412 files\neval    100        loss 3.4418  1.313 bits per byte\n";
        let bar = "step     500/2000 ██████▏░░░░░░░░░░░░░░░░░  loss 3.2134  eta";
        assert!(screen.contents().starts_with(&format!("{lines}{bar}")), "{}", screen.contents());
        assert!(screen.contents().ends_with("1.313 bits/byte  4.9 k tok/s  62% of limit"));
        live.finish();
        let text = screen.contents();
        assert!(text.starts_with(&format!("{lines}step    500/2000   loss 3.2134  lr")), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }

    #[test]
    fn a_bar_that_is_dropped_leaves_nothing() {
        let (mut live, screen) = terminal(120);
        show(&mut live, 4);
        drop(live);
        assert_eq!(screen.contents(), "");
    }

    #[test]
    fn the_bar_fits_any_width_and_gives_up_the_least_first() {
        for width in 20..140 {
            let (mut live, screen) = terminal(width);
            show(&mut live, 500);
            show(&mut live, 501);
            assert!(width < 45 || screen.contents().lines().count() == 1, "{}", screen.contents());
        }
        let (mut live, screen) = terminal(70);
        show(&mut live, 500);
        let want = "step     500/2000 ██████▏░░░░░░░░░░░░░░░░░  loss 3.2134  eta 10 m  4.9";
        assert_eq!(screen.contents(), want);
    }

    #[test]
    fn odd_numbers_are_shown_not_feared() {
        let (mut live, screen) = terminal(80);
        let step =
            StepRecord { loss: f32::NAN, ms: f64::NAN, tok_per_s: f64::INFINITY, ..record(9) };
        for n_steps in [0, 10] {
            let now = Duration::ZERO;
            live.step(&Moment { now, step: &step, n_steps, limit_share: None });
            assert!(screen.contents().contains("loss NaN"), "{}", screen.contents());
        }
    }
}
