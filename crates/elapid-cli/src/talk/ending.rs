//! Endings of code in the middle of a file that a model does not find by itself.
//!
//! | rule   | the answer ends                                                                 |
//! |--------|---------------------------------------------------------------------------------|
//! | indent | before a line that is indented less than asked (`n_indent`)                     |
//! | repeat | before a line that is the next line of the file anyway                          |
//! | time   | at the first end of a line after the time is over (`t_max_predict_ms`)          |
//!
//! Lines are judged as soon as they can be. Until then a line break and the white space behind it
//! are held back, so that nothing is given out that a rule would have taken away.
//!
//! The time is counted from the end of the prompt, and a first line is always given whole, as
//! llama.cpp does it: half a line is of no use to anybody.

use elapid::Reason;
use std::time::Duration;

/// The rules, and the text so far.
#[derive(Default)]
pub struct Ending {
    /// White space that lines have at least.
    pub n_indent: usize,
    /// After this the answer ends with its line.
    pub time_max: Option<Duration>,
    /// The next whole line of the file that is not blank, without white space at its end.
    next_line: Option<String>,
    /// The line the answer begins in, up to where it begins.
    line: String,
    held: String,
    n_lines: usize,
}

impl Ending {
    /// Rules for an answer between `before` and `after`.
    pub fn between(before: &str, after: &str) -> Ending {
        let line = before.rsplit('\n').next().unwrap_or("").to_string();
        // What is left of the present line is no whole line.
        let mut lines = after.split('\n').skip(1);
        let next_line = lines.find(|line| !line.trim().is_empty());
        let next_line = next_line.map(|line| line.trim_end().to_string());
        Ending { line, next_line, ..Ending::default() }
    }

    /// Takes new text, `time` after the prompt was read: what may be given out, and why nothing
    /// more comes.
    pub fn push(&mut self, text: &str, time: Duration) -> (String, Option<Reason>) {
        if self.n_indent == 0 && self.next_line.is_none() && self.time_max.is_none() {
            return (text.to_string(), None);
        }
        let mut given = String::new();
        for ch in text.chars() {
            let stop = match ch {
                '\n' => self.end_of_line(time, &mut given),
                _ => {
                    self.line.push(ch);
                    self.held.push(ch);
                    self.is_short().then_some(Reason::Length)
                }
            };
            if stop.is_some() {
                return (given, stop);
            }
            if !self.is_undecided() {
                given.push_str(&std::mem::take(&mut self.held));
            }
        }
        (given, None)
    }

    pub fn finish(&mut self, text: &str) -> (String, Option<Reason>) {
        let (mut given, stop) = self.push(text, Duration::ZERO);
        let stop = stop.or_else(|| self.repeats().then_some(Reason::End));
        if stop.is_none() {
            given.push_str(&self.held);
        }
        (given, stop)
    }

    /// A line is over. What is held is this line, and blank ones before it.
    fn end_of_line(&mut self, time: Duration, given: &mut String) -> Option<Reason> {
        if self.repeats() {
            return Some(Reason::End);
        }
        if !self.line.trim().is_empty() {
            given.push_str(&std::mem::take(&mut self.held));
        }
        if self.time_max.is_some_and(|time_max| time > time_max) {
            return Some(Reason::Length);
        }
        self.held.push('\n');
        self.line.clear();
        self.n_lines += 1;
        None
    }

    /// Whether the present line is the next line of the file.
    fn repeats(&self) -> bool {
        self.next_line.as_deref() == Some(self.line.trim_end())
    }

    /// Whether the present line is indented too little. The first one was begun by somebody else.
    fn is_short(&self) -> bool {
        let text = self.line.trim_start();
        self.n_lines > 0 && !text.is_empty() && self.line.len() - text.len() < self.n_indent
    }

    /// Whether a rule may yet take away what is held.
    fn is_undecided(&self) -> bool {
        // A blank line has the empty text in common with every next line.
        let may_repeat = |next: &String| next.starts_with(self.line.trim_end());
        let may_be_short = self.n_lines > 0 && self.n_indent > 0 && self.line.trim().is_empty();
        self.next_line.as_ref().is_some_and(may_repeat) || may_be_short
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text given out for tokens of `n` characters, and the end.
    fn run(mut ending: Ending, text: &str, n: usize) -> (String, Option<Reason>) {
        let chars: Vec<char> = text.chars().collect();
        let mut all = String::new();
        for (idx, token) in chars.chunks(n).enumerate() {
            let token: String = token.iter().collect();
            let (text, stop) = ending.push(&token, Duration::from_millis(idx as u64));
            all += &text;
            if stop.is_some() {
                return (all, stop);
            }
        }
        let (text, stop) = ending.finish("");
        (all + &text, stop)
    }

    /// The same for tokens of every size.
    fn check(make: impl Fn() -> Ending, text: &str, want: &str, stop: Option<Reason>) {
        for n in 1..=text.chars().count() {
            assert_eq!(run(make(), text, n), (want.to_string(), stop.clone()), "{text:?} by {n}");
        }
    }

    #[test]
    fn an_answer_ends_before_the_next_line_of_the_file() {
        let make = || Ending::between("fn f() {\n    let a", ";\n\n    return a;\n}\n");
        let stop = Some(Reason::End);
        check(make, " = 1;\n    return a;\n}\n", " = 1;", stop.clone());
        check(make, " = 1;\n\n    return a;", " = 1;", stop.clone());
        check(make, " = 1;\n    return a;  \nx", " = 1;", stop);
        check(make, " = 1;\n    return b;\n", " = 1;\n    return b;\n", None);
        check(make, " = 1;\n    return a; // x\n", " = 1;\n    return a; // x\n", None);
        check(make, " = 1;\n    ret", " = 1;\n    ret", None);
    }

    #[test]
    fn the_first_line_counts_with_what_was_there_before_it() {
        let make = || Ending::between("x\n    ", "\n    done();\n");
        check(make, "done();\nmore", "", Some(Reason::End));
        check(make, "undone();\nmore", "undone();\nmore", None);
    }

    #[test]
    fn an_answer_ends_before_a_line_that_is_indented_too_little() {
        let make = || Ending { n_indent: 4, ..Ending::default() };
        check(make, "a\n    b\n  c\n", "a\n    b", Some(Reason::Length));
        check(make, "a\n\n    b\n\n}\n", "a\n\n    b", Some(Reason::Length));
        check(make, "a\n        b\n", "a\n        b\n", None);
    }

    #[test]
    fn time_ends_an_answer_at_the_end_of_a_line() {
        let make = || Ending { time_max: Some(Duration::from_millis(2)), ..Ending::default() };
        assert_eq!(run(make(), "abcdef\nghi", 1), ("abcdef".into(), Some(Reason::Length)));
        assert_eq!(run(make(), "a\nbcdef\ngh", 1), ("a\nbcdef".into(), Some(Reason::Length)));
        assert_eq!(run(make(), "abcdef", 1), ("abcdef".into(), None));
    }

    #[test]
    fn without_rules_text_passes_as_it_is() {
        check(Ending::default, "a\n\n  b\n", "a\n\n  b\n", None);
    }
}
