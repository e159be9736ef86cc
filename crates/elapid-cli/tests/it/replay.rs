//! The editing of a long file, replayed against `/infill` as an editor would ask.
//!
//! What was read before is not read again, whatever the model is made of; and what comes out is
//! what a server says that keeps nothing.

use crate::common::Scratch;
use crate::common::rng::Rng;
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny, lines};
use serde_json::{Value, json};

const N_LINES: usize = 2000;
const N_EVENTS: u64 = 200;

/// Events before the cursor goes elsewhere.
const N_AT_PLACE: u64 = 10;

/// A server that keeps nothing is asked at one event in this many.
const COLD_EVERY: u64 = 5;

/// A file with a cursor.
struct Editing {
    lines: Vec<String>,
    row: usize,
    column: usize,
    /// What is left of the line that is being typed.
    to_type: String,
    rng: Rng,
}

impl Editing {
    fn new(seed: u64) -> Editing {
        let lines = lines(N_LINES, seed);
        let (row, column, to_type) = (N_LINES / 2, 0, String::new());
        Editing { lines, row, column, to_type, rng: Rng::new(seed, 77) }
    }

    /// A number below `n`, of this event.
    fn draw(&self, event: u64, idx: u64, n: usize) -> usize {
        self.rng.below(8 * event + idx, n as u64) as usize
    }

    fn event(&mut self, event: u64) {
        match self.draw(event, 0, 100) {
            _ if event.is_multiple_of(N_AT_PLACE) => self.go(event),
            0..75 => self.go_on_typing(event),
            75..90 => self.take_back(event),
            _ => self.change(event),
        }
    }

    /// To the end of a line: one place in four is anywhere, the others are near.
    fn go(&mut self, event: u64) {
        let is_far = self.draw(event, 1, 4) == 0;
        let near = (self.row + self.draw(event, 2, 51)).saturating_sub(25);
        let far = self.draw(event, 3, self.lines.len());
        self.row = if is_far { far } else { near.min(self.lines.len() - 1) };
        self.column = self.lines[self.row].len();
        self.to_type.clear();
    }

    fn go_on_typing(&mut self, event: u64) {
        if self.to_type.is_empty() {
            self.to_type = lines(8, event)[self.draw(event, 4, 8)].clone();
            self.row += 1;
            self.lines.insert(self.row, String::new());
            self.column = 0;
        }
        let n = (3 + self.draw(event, 5, 6)).min(self.to_type.len());
        let rest = self.to_type.split_off(n);
        let typed = std::mem::replace(&mut self.to_type, rest);
        self.put(&typed);
    }

    fn put(&mut self, text: &str) {
        self.lines[self.row].insert_str(self.column, text);
        self.column += text.len();
    }

    fn take_back(&mut self, event: u64) {
        let from = self.column.saturating_sub(1 + self.draw(event, 6, 4));
        self.lines[self.row].replace_range(from..self.column, "");
        self.column = from;
    }

    /// Something in the middle of the line.
    fn change(&mut self, event: u64) {
        self.column = self.draw(event, 7, self.lines[self.row].len() + 1);
        self.put("other");
    }

    /// What an editor sends. Drawn, not greedy: a draw hangs on every digit of the logits.
    fn request(&self, event: u64) -> Value {
        let (before, behind) = self.lines[self.row].split_at(self.column);
        let prefix = [self.lines[..self.row].join("\n"), before.to_string()].join("\n");
        let suffix = [behind.to_string(), self.lines[self.row + 1..].join("\n")].join("\n");
        json!({
            "input_prefix": prefix, "input_suffix": suffix, "n_predict": 8,
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": event,
            "cache_prompt": true, "return_tokens": true,
        })
    }
}

fn n_of(answer: &Value, key: &str) -> u64 {
    answer["timings"][key].as_u64().unwrap_or_else(|| panic!("`{key}` in {answer}"))
}

fn ask(server: &Server, body: &Value) -> Value {
    let answer = Client::new(server).post("/infill", body);
    let (status, value) = (answer.status, answer.json());
    assert_eq!(status, 200, "{value}\n{}", server.said());
    value
}

fn replay(kind: Kind) {
    let dir = Scratch::new(&format!("replay-{kind:?}"));
    Tiny::new(kind).write(&dir.0.join("model"));
    let start = |mib: usize| {
        let flags = format!("--context 65536 --parallel 1 --snapshot-mib {mib}");
        Server::start(&dir.0.join("model"), &flags)
    };
    let (warm, cold) = (start(512), start(0));
    let mut editing = Editing::new(1);
    let (mut n_prompt, mut n_computed, mut n_compared) = (0, 0, 0);
    for event in 0..N_EVENTS {
        editing.event(event);
        let body = editing.request(event);
        let answer = ask(&warm, &body);
        let computed = n_of(&answer, "prompt_n");
        n_computed += computed;
        n_prompt += computed + n_of(&answer, "cache_n");
        if event.is_multiple_of(COLD_EVERY) {
            let want = ask(&cold, &body);
            assert_eq!(n_of(&want, "cache_n"), 0, "{kind:?}: a server that keeps nothing");
            assert!(n_of(&answer, "cache_n") > 0 || event == 0, "{kind:?}: {event}");
            for key in ["content", "tokens", "tokens_evaluated", "stop_type"] {
                assert_eq!(answer[key], want[key], "{kind:?}: `{key}` of event {event}");
            }
            n_compared += 1;
        }
    }
    assert_eq!(n_compared, N_EVENTS / COLD_EVERY);
    let times = n_prompt as f64 / n_computed as f64;
    assert!(times >= 10.0, "{kind:?}: {n_computed} of {n_prompt} computed, {times:.1} times fewer");
    for said in [warm.end(), cold.end()] {
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_model_of_attention_reads_only_what_was_edited() {
    replay(Kind::Attention);
}

#[test]
fn a_mamba_reads_only_what_was_edited() {
    replay(Kind::Mamba);
}

#[test]
fn a_hybrid_reads_only_what_was_edited() {
    replay(Kind::Hybrid);
}
