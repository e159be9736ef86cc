//! One answer from beginning to end: tokens as they come, Ctrl-C, how long it took; and text on
//! its way to stdout.

use crate::report::text::bytes;
use crate::report::{Done, Failure, print};
use elapid::{Engine, Event, Finish, Reason, Refusal, Request, Token};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub struct Answer {
    pub text: String,
    pub ids: Vec<u32>,
    pub finish: Finish,
    /// From the request to its first token, or to its end if it has none.
    pub first: Duration,
    /// From the first token to the last.
    pub rest: Duration,
}

/// The end of a request that is cut off before anything came of it.
pub fn unfinished(n_prompt: usize) -> Finish {
    Finish {
        reason: Reason::Cancelled,
        text: String::new(),
        n_prompt,
        n_cached: 0,
        n_tok: 0,
        n_guessed: 0,
        n_accepted: 0,
    }
}

impl Answer {
    fn n_read(&self) -> usize {
        self.finish.n_prompt.saturating_sub(self.finish.n_cached)
    }

    /// Tokens per second of prompt and answer; the first of the answer belongs to the prompt.
    fn speeds(&self) -> [Option<f64>; 2] {
        let list = [(self.n_read(), self.first), (self.ids.len().saturating_sub(1), self.rest)];
        list.map(|(n, time)| {
            let seconds = time.as_secs_f64();
            (n > 0 && seconds > 0.0).then(|| n as f64 / seconds)
        })
    }

    /// `prompt 12 tokens, 345.0 tok/s; answer ...`.
    pub fn timings(&self) -> String {
        let speed = |speed: Option<f64>| speed.map(|speed| format!(", {speed:.1} tok/s"));
        let [prompt_speed, answer_speed] = self.speeds().map(|it| speed(it).unwrap_or_default());
        let (n_cached, n_tok) = (self.finish.n_cached, self.ids.len());
        let cached = if n_cached > 0 { format!(" + {n_cached} cached") } else { String::new() };
        let tokens = |n: usize| if n == 1 { "token" } else { "tokens" };
        format!(
            "prompt {}{cached} {}{prompt_speed}; answer {n_tok} {}{answer_speed}; first token \
             after {:.0} ms",
            self.n_read(),
            tokens(self.n_read() + n_cached),
            tokens(n_tok),
            1e3 * self.first.as_secs_f64()
        )
    }

    pub fn timings_json(&self) -> Value {
        let [prompt_tok_s, answer_tok_s] = self.speeds();
        json!({
            "n_prompt": self.n_read(), "n_cached": self.finish.n_cached, "n_tok": self.ids.len(),
            "first_ms": 1e3 * self.first.as_secs_f64(), "rest_ms": 1e3 * self.rest.as_secs_f64(),
            "prompt_tok_s": prompt_tok_s, "answer_tok_s": answer_tok_s,
        })
    }
}

/// `; experts 91.2% resident, ...` since the start, where they are loaded when they are chosen.
pub fn experts(engine: &Engine) -> String {
    let stats = engine.stats();
    let n_chosen = stats.n_expert_hits + stats.n_expert_loads;
    if n_chosen == 0 {
        return String::new();
    }
    let (read, held) = (bytes(stats.expert_bytes_read as f64), bytes(stats.expert_bytes as f64));
    let percent = 100.0 * stats.n_expert_hits as f64 / n_chosen as f64;
    let n_loads = stats.n_expert_loads;
    format!("; experts {percent:.1}% hits, {n_loads} loaded, {read} read, {held} resident")
}

/// The same for programs; null where all are loaded from the start.
pub fn experts_json(engine: &Engine) -> Value {
    let stats = engine.stats();
    let n_chosen = stats.n_expert_hits + stats.n_expert_loads;
    if n_chosen == 0 {
        return Value::Null;
    }
    json!({
        "hit_rate": stats.n_expert_hits as f64 / n_chosen as f64, "n_hits": stats.n_expert_hits,
        "n_loads": stats.n_expert_loads, "bytes_read": stats.expert_bytes_read,
        "bytes_resident": stats.expert_bytes,
    })
}

/// Asks, and hands out each token as it comes. Ctrl-C ends the answer with what there is.
pub fn answer(
    engine: &mut Engine,
    request: Request,
    on_token: &mut dyn FnMut(&Token),
) -> Done<Answer> {
    let mut on_token = |token: &Token| {
        on_token(token);
        ControlFlow::Continue(())
    };
    answer_until(engine, request, &mut on_token)
}

/// The same; whoever takes the tokens may end it.
pub fn answer_until(
    engine: &mut Engine,
    request: Request,
    on_token: &mut dyn FnMut(&Token) -> ControlFlow<()>,
) -> Done<Answer> {
    N_INTERRUPTS.store(0, Ordering::SeqCst);
    let (mut text, mut ids) = (String::new(), Vec::new());
    let (mut finish, mut is_over) = (unfinished(request.prompt.len()), false);
    let (begin, mut first) = (Instant::now(), None);
    let id = engine.submit(request).map_err(|refusal| match refusal {
        Refusal::Bad(error) => Failure::from(error),
        Refusal::Full => Failure::new("the request queue is full", "try again"),
    })?;
    let mut is_enough = false;
    while !is_over {
        if is_enough || N_INTERRUPTS.load(Ordering::SeqCst) > 0 {
            engine.cancel(id);
            break;
        }
        for (_, event) in engine.step() {
            match event {
                Event::Prompt { n_cached, .. } => finish.n_cached = n_cached,
                Event::Token(token) => {
                    first.get_or_insert_with(Instant::now);
                    finish.n_tok += 1;
                    ids.push(token.id);
                    text.push_str(&token.text);
                    is_enough |= on_token(&token).is_break();
                }
                Event::Done(end) => {
                    text.push_str(&end.text);
                    (finish, is_over) = (end, true);
                }
            }
        }
        assert!(is_over || !engine.is_idle(), "the engine owes every request an end");
    }
    if let Reason::Failed(error) = &finish.reason {
        let hint = "the weights may be damaged; inspect them with `elapid info`";
        return Err(Failure::new(format!("the model failed: {error}"), hint));
    }
    let end = Instant::now();
    let first = first.unwrap_or(end);
    Ok(Answer { text, ids, finish, first: first - begin, rest: end - first })
}

/// Signals since the last answer began.
static N_INTERRUPTS: AtomicUsize = AtomicUsize::new(0);

/// Whether Ctrl-C ended the last answer.
pub fn is_interrupted() -> bool {
    N_INTERRUPTS.load(Ordering::SeqCst) > 0
}

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

/// Stdout for text that comes in pieces.
pub struct Out {
    is_terminal: bool,
    ends_line: bool,
}

impl Out {
    pub fn new() -> Out {
        Out { is_terminal: std::io::stdout().is_terminal(), ends_line: true }
    }

    pub fn write(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.ends_line = text.ends_with('\n');
        print(if self.is_terminal { visible(text) } else { Cow::from(text) });
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
        let mut answer = Answer {
            text: String::new(),
            ids: vec![7; 5],
            finish: unfinished(10),
            first: Duration::from_millis(20),
            rest: Duration::from_millis(100),
        };
        assert_eq!(
            answer.timings(),
            "prompt 10 tokens, 500.0 tok/s; answer 5 tokens, 40.0 tok/s; first token after 20 ms"
        );
        (answer.ids, answer.rest) = (Vec::new(), Duration::ZERO);
        assert_eq!(answer.speeds(), [Some(500.0), None]);
    }
}
