//! What a run says while it goes.
//!
//!     model   hybrid, 12 layers, d_model 384, 21.4 M parameters
//!     step    100/2000   loss 3.2134  lr 1.5e-4  grad 0.91  412 ms  4.9 k tok/s ...
//!     eval    100        loss 3.4418  1.313 bits per byte
//!     save    runs/a1/step-100
//!     note    130        loss 41.2: back to step 120, rate halved
//!
//! | mode       | steps                                                   | everything to |
//! |------------|---------------------------------------------------------|---------------|
//! | `Terminal` | one line, drawn again at most five times a second       | stderr        |
//! | `Plain`    | a line at first, then every 5 s to 60 s, and at last    | stderr        |
//! | `Json`     | an object for every step, with the fields of metrics    | stdout        |
//!
//! Time comes in from outside, so that the same calls give the same bytes.
//!
//! Not here: the clock; where the numbers come from.

use crate::run_report::metrics::{EvalRecord, NoteRecord, Record, SaveRecord, StepRecord};
use crate::run_report::text::{duration, rate};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::Duration;

const REDRAW_EVERY: Duration = Duration::from_millis(200);
const LINE_EVERY_MIN: Duration = Duration::from_secs(5);
const LINE_EVERY_MAX: Duration = Duration::from_secs(60);

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One live line of at most so many columns.
    Terminal {
        /// Columns of the terminal.
        width: usize,
    },
    /// A line now and then, for logs.
    Plain,
    /// Objects on stdout.
    Json,
}

impl Mode {
    /// A live line where stderr is a terminal, else plain lines.
    pub fn for_people() -> Mode {
        if !std::io::stderr().is_terminal() || std::env::var_os("TERM").is_some_and(|t| t == "dumb")
        {
            return Mode::Plain;
        }
        // Without either, or where the window changes, what is too long is not wrapped: see `draw`.
        let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let columns = columns.or_else(columns_of_terminal);
        Mode::Terminal { width: columns.unwrap_or(80).clamp(20, 400) }
    }
}

/// Columns of the terminal. Shells seldom pass `COLUMNS` on and the standard library cannot ask;
/// `stty` can, wherever there is a `/dev/tty`.
fn columns_of_terminal() -> Option<usize> {
    let tty = std::fs::File::open("/dev/tty").ok()?;
    let asked = std::process::Command::new("stty").arg("size").stdin(tty).output().ok()?;
    let columns = std::str::from_utf8(&asked.stdout).ok()?.split_whitespace().nth(1)?.parse();
    columns.ok().filter(|columns| *columns > 0)
}

/// A step, and what is known around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment<'a> {
    /// Time since any fixed moment.
    pub now: Duration,
    /// What the step found.
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
    eta_s: Option<f64>,
}

/// A line of words as a JSON line.
#[derive(Serialize)]
struct TextLine<'a> {
    kind: &'a str,
    text: &'a str,
}

/// Shows progress. Where its reader has gone away it falls silent: hours of training are not to be
/// lost because someone closed a pager.
pub struct Live {
    mode: Mode,
    talk: Box<dyn Write>,
    data: Box<dyn Write>,
    /// When the first step of this process began.
    begin: Option<Duration>,
    /// Steps of this process, those undone by a rollback too.
    n_done: u64,
    /// When a step was last shown.
    shown: Option<Duration>,
    /// The newest step, where it was not shown as a line that stays.
    last: Option<String>,
    bits_per_byte: Option<f64>,
    is_drawn: bool,
}

impl Live {
    /// On stderr and stdout.
    pub fn new(mode: Mode) -> Live {
        Live::to(mode, Box::new(std::io::stderr()), Box::new(std::io::stdout()))
    }

    /// Words to `talk`, JSON to `data`.
    pub fn to(mode: Mode, talk: Box<dyn Write>, data: Box<dyn Write>) -> Live {
        let (begin, shown, last, bits_per_byte) = (None, None, None, None);
        Live { mode, talk, data, begin, n_done: 0, shown, last, bits_per_byte, is_drawn: false }
    }

    /// A line of its own: `model`, `device`, `data`, `report` ...
    pub fn line(&mut self, kind: &str, text: &str) {
        match self.mode {
            Mode::Json => self.object(&TextLine { kind, text }),
            _ => self.put(&format!("{kind:<8}{text}")),
        }
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
        let is_due = |every| self.shown.is_none_or(|shown| now.saturating_sub(shown) >= every);
        match self.mode {
            Mode::Json => {
                let record = &Record::Step(*step);
                self.object(&StepLine { record, n_steps, limit_share, eta_s: Some(eta_s) });
            }
            // The last one stays in any case, before what is measured after it.
            _ if step.step >= n_steps => self.stay(now, step_line(moment, eta_s)),
            Mode::Plain => {
                // The log of a night is to be read in a minute too.
                let every = now.saturating_sub(begin) / 60;
                let text = step_line(moment, eta_s);
                match is_due(every.clamp(LINE_EVERY_MIN, LINE_EVERY_MAX)) {
                    true => self.stay(now, text),
                    false => self.last = Some(text),
                }
            }
            Mode::Terminal { width } => {
                let is_due = is_due(REDRAW_EVERY);
                self.last = Some(step_line(moment, eta_s));
                if is_due {
                    self.draw(&bar_line(moment, eta_s, self.bits_per_byte, width));
                    self.shown = Some(now);
                }
            }
        }
    }

    /// Shows a step as a line that stays.
    fn stay(&mut self, now: Duration, text: String) {
        self.put(&text);
        (self.shown, self.last) = (Some(now), None);
    }

    /// After a measurement on held-out files.
    pub fn eval(&mut self, record: &EvalRecord, n_steps: u64) {
        self.bits_per_byte = Some(record.bits_per_byte);
        if self.mode == Mode::Json {
            return self.object(&Record::Eval(*record));
        }
        let EvalRecord { step, loss, bits_per_byte, .. } = record;
        let step = step_column(&step.to_string(), n_steps);
        self.put(&format!("eval    {step}  loss {loss:.4}  {bits_per_byte:.3} bits per byte"));
    }

    /// After a checkpoint.
    pub fn save(&mut self, record: &SaveRecord) {
        match self.mode {
            Mode::Json => self.object(&Record::Save(record.clone())),
            _ => self.put(&format!("save    {}", record.path)),
        }
    }

    /// When something happened that a person should know.
    pub fn note(&mut self, record: &NoteRecord, n_steps: u64) {
        if self.mode == Mode::Json {
            return self.object(&Record::Note(record.clone()));
        }
        let step = step_column(&record.step.to_string(), n_steps);
        self.put(&format!("note    {step}  {}", record.text));
    }

    /// At the end of the steps, whatever ended them: clears the live line and leaves the last step
    /// as a line that stays.
    pub fn finish(&mut self) {
        match self.last.take() {
            Some(text) => self.put(&text),
            None => self.clear(),
        }
    }

    fn put(&mut self, text: &str) {
        self.clear();
        let _ = writeln!(self.talk, "{text}");
        let _ = self.talk.flush();
    }

    fn object(&mut self, line: &impl Serialize) {
        let text = serde_json::to_string(line).expect("lines hold numbers and text only");
        let _ = writeln!(self.data, "{text}");
        let _ = self.data.flush();
    }

    /// Draws the live line over the old one. Wrapping is switched off around it, so that a
    /// terminal narrower than believed cuts the line instead of filling with pieces of it.
    fn draw(&mut self, text: &str) {
        let _ = write!(self.talk, "\r\x1b[?7l{text}\x1b[K\x1b[?7h");
        let _ = self.talk.flush();
        self.is_drawn = true;
    }

    fn clear(&mut self) {
        if self.is_drawn {
            let _ = write!(self.talk, "\r\x1b[K");
            self.is_drawn = false;
            // What was cleared may be drawn again at once.
            self.shown = None;
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.clear();
        let _ = self.talk.flush();
    }
}

/// `text` as wide as the longest `step/n_steps`, so that what follows is a column.
fn step_column(text: &str, n_steps: u64) -> String {
    let width = 2 * n_steps.to_string().len() + 1;
    format!("{text:<width$}")
}

fn share(limit_share: Option<f64>) -> Option<String> {
    limit_share.map(|share| format!("{:.0}% of limit", 100.0 * share))
}

fn step_line(moment: &Moment, eta_s: f64) -> String {
    let Moment { step, n_steps, limit_share, .. } = moment;
    let StepRecord { loss, lr, grad_norm, ms, tok_per_s, .. } = step;
    let column = step_column(&format!("{}/{n_steps}", step.step), *n_steps);
    let lr = if *lr == 0.0 { "0".to_string() } else { format!("{lr:.1e}") };
    let ms = if *ms < 9.95 { format!("{ms:.1}") } else { format!("{ms:.0}") };
    let tok_per_s = rate(*tok_per_s);
    let mut text = format!(
        "step    {column}  loss {loss:.4}  lr {lr}  grad {grad_norm:.2}  {ms} ms  \
         {tok_per_s} tok/s"
    );
    if let Some(share) = share(*limit_share) {
        text.push_str("  ");
        text.push_str(&share);
    }
    if step.step < *n_steps {
        text.push_str(&format!("  eta {}", duration(eta_s)));
    }
    text
}

/// The live line: as many fields as fit, then the bar in what is left.
fn bar_line(moment: &Moment, eta_s: f64, bits_per_byte: Option<f64>, width: usize) -> String {
    let Moment { step, n_steps, limit_share, .. } = moment;
    let n_digits = n_steps.to_string().len();
    let head = format!("step    {:>n_digits$}/{n_steps}", step.step);
    let fields = [
        // How early a field is given up where there is no room, then the field.
        (5, Some(format!("loss {:.4}", step.loss))),
        (3, bits_per_byte.map(|bits| format!("{bits:.3} bits/byte"))),
        (2, Some(format!("{} tok/s", rate(step.tok_per_s)))),
        (1, share(*limit_share)),
        (4, Some(format!("eta {}", duration(eta_s)))),
    ];
    let mut fields: Vec<(u8, String)> =
        fields.into_iter().filter_map(|(rank, field)| Some((rank, field?))).collect();
    // The last column stays free: some terminals wrap when it is filled.
    let room = width.saturating_sub(1 + head.len());
    let length =
        |fields: &[(u8, String)]| fields.iter().map(|field| 2 + field.1.len()).sum::<usize>();
    const BAR_MIN: usize = 8;
    while length(&fields) + BAR_MIN + 1 > room && fields.len() > 1 {
        let least = fields.iter().map(|field| field.0).min();
        fields.retain(|field| Some(field.0) != least);
    }
    let n_cells = room.saturating_sub(length(&fields) + 1).min(24);
    let mut text = head;
    if n_cells >= 4 {
        text.push(' ');
        text.push_str(&bar(step.step as f64 / (*n_steps).max(1) as f64, n_cells));
    }
    for (_, field) in fields {
        text.push_str("  ");
        text.push_str(&field);
    }
    text.chars().take(width.saturating_sub(1)).collect()
}

/// A bar of `n_cells` columns, to an eighth of a column.
fn bar(done: f64, n_cells: usize) -> String {
    const PARTS: [char; 8] = ['░', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (done.clamp(0.0, 1.0) * 8.0 * n_cells as f64) as usize;
    let mut text: String = "█".repeat(eighths / 8);
    if eighths / 8 < n_cells {
        text.push(PARTS[eighths % 8]);
        text.push_str(&"░".repeat(n_cells - eighths / 8 - 1));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn live(mode: Mode) -> (Live, Sheet, Sheet) {
        let (talk, data) = (Sheet::default(), Sheet::default());
        (Live::to(mode, Box::new(talk.clone()), Box::new(data.clone())), talk, data)
    }

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 3.21344,
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
        EvalRecord { step: 100, loss: 3.44182, bits_per_byte: 1.31251, elapsed_s: 41.0 };

    #[test]
    fn plain_lines_are_columns_with_the_kind_first() {
        let (mut live, talk, data) = live(Mode::Plain);
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
        assert_eq!(data.take(), "");
    }

    #[test]
    fn plain_steps_come_at_first_every_five_seconds_and_at_last() {
        let (mut live, talk, _) = live(Mode::Plain);
        (1..=30).for_each(|step| show(&mut live, step));
        live.finish();
        let text = talk.take();
        let steps: Vec<&str> = text.lines().map(|line| &line[8..15]).collect();
        // 5 s are 12.1 steps; the run ended early, at 30.
        assert_eq!(steps, ["1/2000 ", "14/2000", "27/2000", "30/2000"]);
    }

    #[test]
    fn the_last_step_is_not_said_twice() {
        let (mut live, talk, _) = live(Mode::Plain);
        show(&mut live, 2000);
        live.finish();
        live.finish();
        assert_eq!(talk.take().lines().count(), 1);
    }

    #[test]
    fn the_last_step_comes_before_what_is_measured_after_it() {
        for mode in [Mode::Plain, Mode::Terminal { width: 80 }] {
            let (mut live, talk, _) = live(mode);
            show(&mut live, 1999);
            show(&mut live, 2000);
            live.eval(&EVAL, 2000);
            live.finish();
            let text = talk.take();
            let stays = text.find("step    2000/2000  ").unwrap();
            assert!(stays < text.find("eval").unwrap(), "{text}");
            assert_eq!(text.matches("2000/2000").count(), 1, "{text}");
        }
    }

    #[test]
    fn lines_become_rarer_in_long_runs_but_not_rarer_than_a_minute() {
        let (mut live, talk, _) = live(Mode::Plain);
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
        let (mut live, _, data) = live(Mode::Json);
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
    fn json_has_every_step_and_nothing_is_said_beside_it() {
        let (mut live, talk, data) = live(Mode::Json);
        live.line("data", "412 files");
        show(&mut live, 1);
        show(&mut live, 2);
        live.eval(&EVAL, 2000);
        live.save(&SaveRecord { step: 2, path: "step-2".to_string() });
        live.note(&NoteRecord { step: 3, text: "a \"b\"".to_string() }, 2000);
        live.finish();
        drop(live);
        assert_eq!(talk.take(), "");
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
    fn the_bar_is_drawn_at_most_five_times_a_second_and_makes_way_for_lines() {
        let (mut live, talk, _) = live(Mode::Terminal { width: 120 });
        let mut at = |ms, step| {
            let (now, step) = (Duration::from_millis(ms), &record(step));
            live.step(&Moment { now, step, n_steps: 2000, limit_share: None });
            talk.take()
        };
        assert!(at(1000, 1).starts_with("\r\x1b[?7lstep       1/2000 "));
        assert_eq!(at(1100, 2), "");
        assert_eq!(at(1199, 3), "");
        assert!(at(1200, 4).contains("   4/2000"));
        live.eval(&EVAL, 2000);
        let want = "\r\x1b[Keval    100        loss 3.4418  1.313 bits per byte\n";
        assert_eq!(talk.take(), want);
        let (now, step) = (Duration::from_millis(1201), &record(5));
        live.step(&Moment { now, step, n_steps: 2000, limit_share: None });
        assert!(talk.take().contains("1.313 bits/byte"), "drawn again at once, with the newest");
        live.finish();
        assert!(talk.take().starts_with("\r\x1b[Kstep    5/2000     loss 3.2134"));
    }

    #[test]
    fn the_bar_fits_any_width_and_gives_up_the_least_first() {
        let (now, step) = (Duration::from_secs(41), &record(500));
        let moment = Moment { now, step, n_steps: 2000, limit_share: Some(0.62) };
        let line = |width| bar_line(&moment, 800.0, Some(1.3134), width);
        for width in 20..200 {
            assert!(line(width).chars().count() < width, "{width}: {}", line(width));
        }
        assert_eq!(
            line(120),
            "step     500/2000 ██████░░░░░░░░░░░░░░░░░░  loss 3.2134  1.313 bits/byte  \
             4.9 k tok/s  62% of limit  eta 13 m"
        );
        assert_eq!(
            line(80),
            "step     500/2000 ██░░░░░░  loss 3.2134  1.313 bits/byte  4.9 k tok/s  eta 13 m"
        );
        assert_eq!(
            line(70),
            "step     500/2000 ██▊░░░░░░░░  loss 3.2134  1.313 bits/byte  eta 13 m"
        );
        assert_eq!(line(40), "step     500/2000 ██░░░░░░  loss 3.2134");
        assert_eq!(line(30), "step     500/2000  loss 3.2134".chars().take(29).collect::<String>());
    }

    #[test]
    fn a_bar_grows_by_eighths() {
        assert_eq!([0.0, 0.3, 1.0].map(|done| bar(done, 4)), ["░░░░", "█▏░░", "████"]);
    }

    #[test]
    fn odd_numbers_are_shown_not_feared() {
        let (mut live, talk, _) = live(Mode::Terminal { width: 80 });
        let step =
            StepRecord { loss: f32::NAN, ms: f64::NAN, tok_per_s: f64::INFINITY, ..record(9) };
        live.step(&Moment { now: Duration::ZERO, step: &step, n_steps: 0, limit_share: None });
        assert!(talk.take().contains("loss NaN"));
    }
}
