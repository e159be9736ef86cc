//! `elapid complete`: what would be inserted at a place of a file.

use super::Chosen;
use crate::project::Project;
use crate::report::{Done, Failure, between, line};
use crate::source::index::{Index, Shown};
use crate::talk::answer::{self, Answer, INTERRUPTED, Out, answer_until};
use crate::talk::flags::{ModelFlags, SamplingFlags};
use crate::talk::hole::{self, Hole, Laid, Others};
use crate::talk::insert::{self, Lines, N_LINES};
use elapid::{FimFile, Generator, Request, Sampling};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Complete code at a place of a file.
///
/// Prints what would be inserted there, for scripts and for trying a model. The text before and
/// after the place is the prompt, with the pieces of the project before it that matter there
/// (--no-context omits them). Greedy unless --temperature is given. The file is not changed.
///
/// Inside a project that `elapid adapt` has adapted to, its newest adapter is used.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid complete src/main.rs:42\n  \
    elapid complete src/main.rs:42:17 --lines 1\n  \
    elapid complete app.py:10 --no-context --json\n\n\
    Lines and columns count from 1, columns in characters: at column 1 the text is inserted before \
    the first character. Without a column it is appended to the line.")]
pub struct Complete {
    /// Where: a file, a line, and a column if not at the end of the line
    #[arg(value_name = "FILE:LINE[:COLUMN]")]
    place: Place,
    /// Model [default: the newest adapter of the project with its base, or elapid-code]
    #[arg(long, short = 'm', value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Stop after N lines [default: where the model stops, after 12 at most]
    #[arg(long, value_name = "N", value_parser = between(1, 1000))]
    lines: Option<usize>,
    /// Do not show other files of the project to the model
    #[arg(long)]
    no_context: bool,
    /// Print one JSON object: text, model, adapters, context files with tokens, times
    #[arg(long)]
    json: bool,
    /// Print the completion only
    #[arg(long, short = 'q')]
    quiet: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    source: ModelFlags,
}

/// A place in a file, counted from 1.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    path: PathBuf,
    line: usize,
    column: Option<usize>,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Place, String> {
        let number = |text: &str| text.parse::<usize>().ok();
        let last = text.rsplit_once(':').and_then(|(rest, last)| Some((rest, number(last)?)));
        let (rest, last) = last.ok_or("there is no line: write FILE:LINE, as in src/main.rs:42")?;
        let first = rest.rsplit_once(':').and_then(|(rest, first)| Some((rest, number(first)?)));
        let (path, line, column) = match first {
            Some((path, line)) => (path, line, Some(last)),
            None => (rest, last, None),
        };
        match (path.is_empty(), line, column) {
            (true, ..) => Err("there is no file: write FILE:LINE, as in src/main.rs:42".into()),
            (_, 0, _) | (.., Some(0)) => Err("lines and columns count from 1".into()),
            _ => Ok(Place { path: path.into(), line, column }),
        }
    }
}

impl Place {
    /// The text before and after it.
    fn split<'a>(&self, text: &'a str) -> Done<(&'a str, &'a str)> {
        let shown = self.path.display();
        let mut lines = text.split_inclusive('\n');
        let n_lines = lines.clone().count();
        let start: usize = lines.by_ref().take(self.line - 1).map(str::len).sum();
        // One may write behind the last line break, and in an empty file.
        let is_new = self.line == n_lines + 1 && (text.is_empty() || text.ends_with('\n'));
        let Some(line) = lines.next().or(is_new.then_some("")) else {
            let (s, line) = (if n_lines == 1 { "" } else { "s" }, self.line);
            let problem = format!("{shown} has {n_lines} line{s}: no line {line}");
            return Err(Failure::new(problem, "give a line that the file has"));
        };
        let line = line.trim_end_matches(['\n', '\r']);
        let n_chars = line.chars().count();
        let column = self.column.unwrap_or(n_chars + 1);
        if column > n_chars + 1 {
            let problem = format!(
                "line {} of {shown} has {n_chars} characters: no column {column}",
                self.line
            );
            let hint = format!("give a column from 1 to {}, or none for its end", n_chars + 1);
            return Err(Failure::new(problem, &hint));
        }
        let at = line.char_indices().nth(column - 1).map_or(line.len(), |(at, _)| at);
        Ok(text.split_at(start + at))
    }
}

/// What was asked, laid out.
struct Asked {
    laid: Laid,
    context_ms: f64,
}

impl Complete {
    pub fn run(&self) -> Done<ExitCode> {
        let begin = Instant::now();
        let text = std::fs::read_to_string(&self.place.path).map_err(|error| {
            let problem = format!("cannot read {}: {error}", self.place.path.display());
            Failure::new(problem, "give a text file that is there, as in src/main.rs:42")
        })?;
        let (prefix, suffix) = self.place.split(&text)?;
        let project = Project::of(&self.place.path);
        let chosen = Chosen::new(self.model.as_deref(), &self.source.adapter, &project)?;
        if !self.quiet {
            chosen.say();
        }
        let mut loaded = self.source.load(&chosen.model, &chosen.adapters)?;
        let load_ms = 1e3 * begin.elapsed().as_secs_f64();
        let asked = self.ask(&loaded, &project, prefix, suffix)?;
        self.tell(&loaded, &asked);
        let request = self.request(&loaded, &asked)?;
        answer::listen();
        let mut out = Out::new();
        let (text, answer) = self.answer(&mut loaded, request, [prefix, suffix], &mut out)?;
        if self.json {
            line(self.to_json(&chosen, &asked, (&text, &answer), load_ms));
        } else {
            out.end_line_on_terminal();
            if !self.quiet {
                eprintln!("speed   {}", answer.timings());
            }
        }
        let is_interrupted = answer::is_interrupted();
        Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
    }

    /// The prompt for what stands between two texts.
    fn ask(
        &self,
        loaded: &Generator,
        project: &Project,
        prefix: &str,
        suffix: &str,
    ) -> Done<Asked> {
        let (begin, n_ctx) = (Instant::now(), loaded.engine.settings().context);
        let path = project.relative(&self.place.path);
        let mut shown: Vec<Shown> = Vec::new();
        if !self.no_context && loaded.fim.is_some() {
            let mut index = Index::new(&project.root);
            index.refresh(Duration::ZERO);
            shown = index.context(&path, prefix, suffix, hole::picked_bytes(n_ctx));
        }
        let context_ms = 1e3 * begin.elapsed().as_secs_f64();
        let hole = Hole {
            prefix,
            suffix,
            n_prefix: None,
            n_suffix: None,
            repo: &project.name(),
            path: &path,
            files: shown.iter().map(|(path, text)| FimFile { path, text }).collect(),
            others: if self.no_context { Others::Sent } else { Others::Picked },
        };
        Ok(Asked { laid: insert::prompt(loaded, &hole)?, context_ms })
    }

    /// What is to be known of the prompt.
    fn tell(&self, loaded: &Generator, asked: &Asked) {
        if self.quiet {
            return;
        }
        if loaded.fim.is_none() {
            let name = &loaded.name;
            eprintln!(
                "note    {name} has no fill-in-the-middle tokens: it continues the text before the \
                 place, and sees neither what follows nor other files"
            );
        } else if !self.no_context {
            let n_tok: usize = asked.laid.shown.iter().map(|shown| shown.1).sum();
            let paths: Vec<&str> = asked.laid.shown.iter().map(|shown| &shown.0[..]).collect();
            let paths = if paths.is_empty() { "no other files".into() } else { paths.join(", ") };
            eprintln!("context {paths}  {n_tok} tokens, {:.0} ms", asked.context_ms);
        }
    }

    fn request(&self, loaded: &Generator, asked: &Asked) -> Done<Request> {
        let Request { n_max, sampling, stop_tokens, .. } =
            insert::request(loaded, &asked.laid, self.n_lines());
        let request = self.sampling.request(loaded, asked.laid.ids.clone(), n_max)?;
        let sampling = match self.sampling.temperature {
            Some(_) => request.sampling,
            None => Sampling { seed: request.sampling.seed, ..sampling },
        };
        Ok(Request { sampling, stop_tokens, ..request })
    }

    fn n_lines(&self) -> usize {
        self.lines.unwrap_or(N_LINES)
    }

    /// The text that is inserted, written as it comes, and the answer it is from.
    fn answer(
        &self,
        loaded: &mut Generator,
        request: Request,
        around: [&str; 2],
        out: &mut Out,
    ) -> Done<(String, Answer)> {
        let mut lines = Lines::between(loaded, around, self.n_lines());
        let mut write = |text: &str| {
            if !self.json {
                out.write(text);
            }
        };
        let mut flow = ControlFlow::Continue(());
        let answer = answer_until(&mut loaded.engine, request, &mut |token| {
            let taken;
            (taken, flow) = lines.push(&token.text);
            write(&taken);
            flow
        })?;
        if flow.is_continue() {
            write(&lines.finish(&answer.finish.text));
        }
        Ok((lines.text, answer))
    }

    fn to_json(
        &self,
        chosen: &Chosen,
        asked: &Asked,
        (text, answer): (&str, &Answer),
        load_ms: f64,
    ) -> Value {
        let file = |(path, n_tok): &(String, usize)| json!({"path": path, "n_tok": n_tok});
        let adapter = |path: &Path| json!(path.display().to_string());
        let mut timings = answer.timings_json();
        timings["load_ms"] = json!(load_ms);
        timings["context_ms"] = json!(asked.context_ms);
        let model = self.model.as_ref().unwrap_or(&chosen.model);
        json!({
            "text": text, "file": self.place.path.display().to_string(), "line": self.place.line,
            "column": self.place.column, "model": model.display().to_string(),
            "adapters": chosen.adapters.iter().map(|it| adapter(&it.path)).collect::<Vec<_>>(),
            "why": chosen.why, "context": asked.laid.shown.iter().map(file).collect::<Vec<_>>(),
            "truncated": asked.laid.is_cut, "timings": timings,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_file_a_line_and_perhaps_a_column() {
        let parse = |text: &str| text.parse::<Place>();
        let place = |path: &str, line, column| Ok(Place { path: path.into(), line, column });
        assert_eq!(parse("src/main.rs:42"), place("src/main.rs", 42, None));
        assert_eq!(parse("src/main.rs:42:7"), place("src/main.rs", 42, Some(7)));
        assert_eq!(parse("C:\\x\\main.rs:42"), place("C:\\x\\main.rs", 42, None));
        for (text, words) in [
            ("src/main.rs", "no line"),
            ("src/main.rs:", "no line"),
            (":3", "no file"),
            ("a:0", "from 1"),
            ("a:1:0", "from 1"),
        ] {
            assert!(parse(text).unwrap_err().contains(words), "{text}");
        }
    }

    #[test]
    fn a_file_is_split_at_the_place_and_errors_say_what_it_has() {
        let split = |text: &'static str, line, column| {
            Place { path: "f".into(), line, column }.split(text).map_err(|error| error.problem)
        };
        assert_eq!(split("ab\ncd\n", 1, None), Ok(("ab", "\ncd\n")));
        assert_eq!(split("ab\r\ncd\r\n", 2, None), Ok(("ab\r\ncd", "\r\n")));
        assert_eq!(split("äb\ncd", 1, Some(2)), Ok(("ä", "b\ncd")));
        assert_eq!(split("ab\ncd", 2, Some(3)), Ok(("ab\ncd", "")));
        assert_eq!(split("ab\n", 2, None), Ok(("ab\n", "")));
        assert_eq!(split("", 1, None), Ok(("", "")));
        assert!(split("ab", 2, None).unwrap_err().contains("has 1 line:"));
        assert!(split("ab\n", 3, None).unwrap_err().contains("no line 3"));
        assert!(split("ab", 1, Some(4)).unwrap_err().contains("no column 4"));
    }
}
