//! One answer from beginning to end: tokens as they come, Ctrl-C, how long it took; and text on
//! its way to stdout.

use crate::report::{Done, Failure};
use elapid::{Engine, Event, Finish, Reason, Refusal, Request, RequestId, Token};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What came of a request.
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Why it ended, and counts.
    pub finish: Finish,
    /// How long it took.
    pub timings: Timings,
}

/// How long an answer took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timings {
    /// Tokens of the prompt that were computed.
    pub n_prompt: usize,
    /// Those that came from a snapshot.
    pub n_cached: usize,
    /// Tokens of the answer.
    pub n_tok: usize,
    /// From the request to its first token, or to its end if it has none.
    pub first: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

impl Timings {
    /// Prompt tokens per second.
    pub fn prompt_speed(&self) -> Option<f64> {
        speed(self.n_prompt, self.first)
    }

    /// Answer tokens per second; the first belongs to the prompt.
    pub fn answer_speed(&self) -> Option<f64> {
        speed(self.n_tok.saturating_sub(1), self.rest)
    }

    /// `prompt 12 tokens, 345.0 tok/s; answer ...`.
    pub fn sentence(&self) -> String {
        let speed =
            |speed: Option<f64>| speed.map_or(String::new(), |speed| format!(", {speed:.1} tok/s"));
        let cached = match self.n_cached {
            0 => String::new(),
            n => format!(" + {n} kept"),
        };
        let tokens = |n: usize| if n == 1 { "token" } else { "tokens" };
        let (n_prompt, n_tok) = (self.n_prompt, self.n_tok);
        format!(
            "prompt {n_prompt}{cached} {}{}; answer {n_tok} {}{}; first token after {:.0} ms",
            tokens(n_prompt + self.n_cached),
            speed(self.prompt_speed()),
            tokens(n_tok),
            speed(self.answer_speed()),
            1e3 * self.first.as_secs_f64()
        )
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({
            "n_prompt": self.n_prompt, "n_cached": self.n_cached, "n_tok": self.n_tok,
            "first_ms": 1e3 * self.first.as_secs_f64(), "rest_ms": 1e3 * self.rest.as_secs_f64(),
            "prompt_tok_s": self.prompt_speed(), "answer_tok_s": self.answer_speed(),
        })
    }
}

fn speed(n: usize, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (n > 0 && seconds > 0.0).then(|| n as f64 / seconds)
}

/// One word for why an answer ended, and the text that ended it.
pub fn reason_word(reason: &Reason) -> (&'static str, Option<&str>) {
    match reason {
        Reason::End => ("end", None),
        Reason::StopText(text) => ("stop", Some(text)),
        Reason::Length => ("length", None),
        Reason::Cancelled => ("interrupted", None),
        Reason::Failed(_) => ("failed", None),
    }
}

/// Asks, and hands out each token as it comes. Ctrl-C ends the answer with what there is.
pub fn answer(
    engine: &mut Engine,
    request: Request,
    on_token: &mut dyn FnMut(&Token),
) -> Done<Answer> {
    N_INTERRUPTS.store(0, Ordering::SeqCst);
    let n_prompt = request.prompt.len();
    let begin = Instant::now();
    let id = engine.submit(request).map_err(|refusal| match refusal {
        Refusal::Bad(error) => Failure::from(error),
        Refusal::Full => Failure::new("the engine takes no more requests", "try again"),
    })?;
    let mut growing = Growing { text: String::new(), ids: Vec::new(), n_cached: 0, first: None };
    let finish = loop {
        if is_interrupted() {
            engine.cancel(id);
            break growing.cancelled(n_prompt);
        }
        if let Some(finish) = growing.take(id, engine.step(), on_token) {
            break finish;
        }
        if engine.is_idle() {
            // The engine owes every request an end.
            return Err(Failure::new("the answer broke off", "this is a defect of Elapid"));
        }
    };
    if let Reason::Failed(error) = &finish.reason {
        let hint = "the weights may be damaged; `elapid check` and `elapid info` look at them";
        return Err(Failure::new(format!("the model failed: {error}"), hint));
    }
    let end = Instant::now();
    let first = growing.first.unwrap_or(end);
    let timings = Timings {
        n_prompt: finish.n_prompt.saturating_sub(finish.n_cached),
        n_cached: finish.n_cached,
        n_tok: growing.ids.len(),
        first: first - begin,
        rest: end - first,
    };
    Ok(Answer { text: growing.text, ids: growing.ids, finish, timings })
}

/// An answer while it grows.
struct Growing {
    text: String,
    ids: Vec<u32>,
    n_cached: usize,
    first: Option<Instant>,
}

impl Growing {
    /// Takes what happened; its end, when it has come.
    fn take(
        &mut self,
        id: RequestId,
        events: Vec<(RequestId, Event)>,
        on_token: &mut dyn FnMut(&Token),
    ) -> Option<Finish> {
        for (of, event) in events {
            match event {
                _ if of != id => {}
                Event::Prompt { n_cached, .. } => self.n_cached = n_cached,
                Event::Token(token) => {
                    self.first.get_or_insert_with(Instant::now);
                    self.ids.push(token.id);
                    self.text.push_str(&token.text);
                    on_token(&token);
                }
                Event::Done(finish) => {
                    self.text.push_str(&finish.text);
                    return Some(finish);
                }
            }
        }
        None
    }

    fn cancelled(&self, n_prompt: usize) -> Finish {
        Finish {
            reason: Reason::Cancelled,
            text: String::new(),
            n_prompt,
            n_cached: self.n_cached,
            n_tok: self.ids.len(),
            n_guessed: 0,
            n_accepted: 0,
        }
    }
}

/// Signals since the last answer began.
static N_INTERRUPTS: AtomicUsize = AtomicUsize::new(0);

/// The first Ctrl-C ends the answer, the second the process.
pub fn listen() {
    // A handler may be there already; then it is ours.
    let _ = ctrlc::set_handler(|| {
        if N_INTERRUPTS.fetch_add(1, Ordering::SeqCst) > 0 {
            std::process::exit(INTERRUPTED.into());
        }
    });
}

/// The exit code of a program that Ctrl-C ended.
pub const INTERRUPTED: u8 = 130;

fn is_interrupted() -> bool {
    N_INTERRUPTS.load(Ordering::SeqCst) > 0
}

/// Stdout for text that comes in pieces.
pub struct Out {
    is_terminal: bool,
    ends_line: bool,
}

impl Out {
    pub fn new() -> Out {
        Out { is_terminal: std::io::stdout().is_terminal(), ends_line: true }
    }

    /// Writes and flushes. A reader that has gone away ends the program quietly.
    pub fn write(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.ends_line = text.ends_with('\n');
        let text = if self.is_terminal { visible(text) } else { Cow::from(text) };
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            let code = if error.kind() == ErrorKind::BrokenPipe { 0 } else { 1 };
            std::process::exit(code);
        }
    }

    /// Begins a new line, unless one has just begun.
    pub fn end_line(&mut self) {
        if !self.ends_line {
            self.write("\n");
        }
    }

    /// The same where a person looks: a file or a pipe gets the text alone.
    pub fn end_line_on_terminal(&mut self) {
        if self.is_terminal {
            self.end_line();
        }
    }
}

/// Control characters as pictures: what a model says must not move the cursor or set the title.
fn visible(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_control) {
        return Cow::from(text);
    }
    let picture = |c: char| match u32::from(c) {
        0..0x20 if is_control(c) => char::from_u32(0x2400 + u32::from(c)).unwrap_or(' '),
        0x7f => '\u{2421}',
        _ if is_control(c) => '\u{fffd}',
        _ => c,
    };
    Cow::from(text.chars().map(picture).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_become_visible() {
        assert_eq!(visible("a\tb\nc é"), "a\tb\nc é");
        assert_eq!(visible("\x1b[2J\x07\x7f\u{9b}"), "␛[2J␇␡\u{fffd}");
    }

    #[test]
    fn speeds_are_said_where_there_are_any() {
        let timings = Timings {
            n_prompt: 10,
            n_cached: 0,
            n_tok: 5,
            first: Duration::from_millis(20),
            rest: Duration::from_millis(100),
        };
        let text = timings.sentence();
        assert_eq!(
            text,
            "prompt 10 tokens, 500.0 tok/s; answer 5 tokens, 40.0 tok/s; first token after 20 ms"
        );
        let none = Timings { n_tok: 0, rest: Duration::ZERO, ..timings };
        assert_eq!(none.answer_speed(), None);
    }
}
