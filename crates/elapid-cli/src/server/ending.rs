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

use super::answer::Stop;
use std::time::Duration;

/// The rules, and the text so far.
#[derive(Default)]
pub struct Ending {
    n_indent: usize,
    time_max: Option<Duration>,
    /// The next whole line of the file that is not blank, without white space at its end.
    next_line: Option<String>,
    /// The line the answer begins in, up to where it begins.
    line: String,
    /// Text that is held back.
    held: String,
    n_lines: usize,
}

/// What may be given out now.
#[derive(Debug, Default, PartialEq)]
pub struct Given {
    /// Text.
    pub text: String,
    /// Why nothing more comes.
    pub stop: Option<Stop>,
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

    /// The same with lines indented by at least this much white space.
    pub fn with_indent(self, n_indent: usize) -> Ending {
        Ending { n_indent, ..self }
    }

    /// The same with an end of line after this time.
    pub fn with_time(self, time_max: Option<Duration>) -> Ending {
        Ending { time_max, ..self }
    }

    /// Takes new text, `time` after the prompt was read.
    pub fn push(&mut self, text: &str, time: Duration) -> Given {
        if self.n_indent == 0 && self.next_line.is_none() && self.time_max.is_none() {
            return Given { text: text.to_string(), stop: None };
        }
        let mut given = Given::default();
        for ch in text.chars() {
            match ch {
                '\n' => self.end_of_line(time, &mut given),
                _ => {
                    self.line.push(ch);
                    self.held.push(ch);
                    if self.is_short() {
                        given.stop = Some(Stop::Limit);
                    }
                }
            }
            if given.stop.is_some() {
                return given;
            }
            if !self.is_undecided() {
                given.text.push_str(&std::mem::take(&mut self.held));
            }
        }
        given
    }

    /// Takes the last text.
    pub fn finish(&mut self, text: &str) -> Given {
        let mut given = self.push(text, Duration::ZERO);
        match given.stop {
            Some(_) => {}
            None if self.repeats() => given.stop = Some(Stop::End),
            None => given.text.push_str(&std::mem::take(&mut self.held)),
        }
        given
    }

    /// A line is over. What is held is this line, and blank ones before it.
    fn end_of_line(&mut self, time: Duration, given: &mut Given) {
        if self.repeats() {
            given.stop = Some(Stop::End);
            return;
        }
        if !self.line.trim().is_empty() {
            given.text.push_str(&std::mem::take(&mut self.held));
        }
        if self.time_max.is_some_and(|time_max| time > time_max) {
            given.stop = Some(Stop::Limit);
            return;
        }
        self.held.push('\n');
        self.line.clear();
        self.n_lines += 1;
    }

    /// Whether the present line is the next line of the file.
    fn repeats(&self) -> bool {
        self.next_line.as_deref().is_some_and(|next| next == self.line.trim_end())
    }

    /// Whether the present line is indented too little. The first one was begun by somebody else.
    fn is_short(&self) -> bool {
        let is_blank = self.line.trim_start().is_empty();
        let n_white = self.line.len() - self.line.trim_start().len();
        self.n_lines > 0 && !is_blank && n_white < self.n_indent
    }

    /// Whether a rule may yet take away what is held.
    fn is_undecided(&self) -> bool {
        let is_blank = self.line.trim_start().is_empty();
        let may_repeat = self
            .next_line
            .as_deref()
            .is_some_and(|next| next.starts_with(self.line.trim_end()) || is_blank);
        let may_be_short = self.n_lines > 0 && self.n_indent > 0 && is_blank;
        may_repeat || may_be_short
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text given out for tokens of `n` characters, and the end.
    fn run(mut ending: Ending, text: &str, n: usize) -> (String, Option<Stop>) {
        let chars: Vec<char> = text.chars().collect();
        let mut all = String::new();
        for (idx, token) in chars.chunks(n).enumerate() {
            let token: String = token.iter().collect();
            let given = ending.push(&token, Duration::from_millis(idx as u64));
            all += &given.text;
            if given.stop.is_some() {
                return (all, given.stop);
            }
        }
        let given = ending.finish("");
        (all + &given.text, given.stop)
    }

    /// The same for tokens of every size.
    fn check(make: impl Fn() -> Ending, text: &str, want: &str, stop: Option<Stop>) {
        for n in 1..=text.chars().count() {
            assert_eq!(run(make(), text, n), (want.to_string(), stop.clone()), "{text:?} by {n}");
        }
    }

    #[test]
    fn an_answer_ends_before_the_next_line_of_the_file() {
        let make = || Ending::between("fn f() {\n    let a", ";\n\n    return a;\n}\n");
        let stop = Some(Stop::End);
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
        check(make, "done();\nmore", "", Some(Stop::End));
        check(make, "undone();\nmore", "undone();\nmore", None);
    }

    #[test]
    fn an_answer_ends_before_a_line_that_is_indented_too_little() {
        let make = || Ending::default().with_indent(4);
        check(make, "a\n    b\n  c\n", "a\n    b", Some(Stop::Limit));
        check(make, "a\n\n    b\n\n}\n", "a\n\n    b", Some(Stop::Limit));
        check(make, "a\n        b\n", "a\n        b\n", None);
    }

    #[test]
    fn time_ends_an_answer_at_the_end_of_a_line() {
        let make = || Ending::default().with_time(Some(Duration::from_millis(2)));
        assert_eq!(run(make(), "abcdef\nghi", 1), ("abcdef".into(), Some(Stop::Limit)));
        assert_eq!(run(make(), "a\nbcdef\ngh", 1), ("a\nbcdef".into(), Some(Stop::Limit)));
        assert_eq!(run(make(), "abcdef", 1), ("abcdef".into(), None));
    }

    #[test]
    fn without_rules_text_passes_as_it_is() {
        check(Ending::default, "a\n\n  b\n", "a\n\n  b\n", None);
    }
}
