//! `elapid chat`: a conversation in the terminal.

use super::{Chosen, here};
use crate::report::{Done, Failure, between, mebibytes};
use crate::talk::answer::{self, INTERRUPTED, Out, answer};
use crate::talk::conversation::Conversation;
use crate::talk::flags::{ModelFlags, SamplingFlags, chat_prompt, finite, number_from_zero, share};
use crate::talk::input::{Input, Typed};
use elapid::{Generator, LoadedAdapter, Reason, Request, Sampling};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Chat with a model that has a chat template.
///
/// Each line is a message. For several lines, end a line with a backslash or write between """ and
/// """. Ctrl-C stops an answer and keeps what was written, Ctrl-D quits. If stdin is not a
/// terminal, each of its lines is a message. /help lists the commands.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid chat SmolLM2-135M-Instruct\n  \
    elapid chat model.gguf --system 'Answer in one sentence.' --temperature 0.3\n  \
    elapid chat model.gguf --adapter runs/a1=0.5\n  \
    printf 'Hello\\nWhat did I say?\\n' | elapid chat model.gguf --quiet")]
pub struct Chat {
    /// Model: directory, .gguf or .elapid file, a run of `elapid train`, or elapid-code
    /// [default: the newest adapter of the project with its base, or elapid-code]
    model: Option<PathBuf>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum tokens per answer [default: what the context leaves]
    #[arg(long, short = 'n', value_name = "N", value_parser = between(1, 1 << 24))]
    max_tokens: Option<usize>,
    /// Print answers only
    #[arg(long, short = 'q')]
    quiet: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    source: ModelFlags,
}

const HELP: &str = "\
/help               this list
/system TEXT        set the system message; without TEXT remove it
/reset              clear the conversation
/undo               remove the last message and its answer
/retry              answer the last message again
/save FILE          save the conversation
/load FILE          load a conversation
/set                show the settings; /set temperature 0.7 changes one
/adapter            list the adapters; /adapter NAME 0.5 sets the scale of one, 0 turns it off
/stats              speeds of the last answer, context, memory
/quit               quit (or Ctrl-D)
\"\"\" ... \"\"\"         a message of several lines; a backslash at the end of a line does the same
Ctrl-C              stop the answer and keep what was written";

const SETTINGS: &str = "the settings are temperature, top-k, top-p, min-p, repeat-penalty, \
    presence-penalty, frequency-penalty, seed, max-tokens";

/// What to do after something was typed.
#[derive(PartialEq)]
enum Next {
    Answer,
    Listen,
    Leave,
}

struct Talk {
    loaded: Generator,
    conversation: Conversation,
    sampling: SamplingFlags,
    max_tokens: Option<usize>,
    /// Answers so far: each draws for itself.
    n_answers: u64,
    last: Option<String>,
    out: Out,
    /// What stands around notes, where they are wanted.
    notes: Option<[&'static str; 2]>,
}

impl Chat {
    pub fn run(&self) -> Done<ExitCode> {
        let chosen = Chosen::new(self.model.as_deref(), &self.source.adapter, &here())?;
        if !self.quiet {
            chosen.say();
        }
        let loaded = self.source.load(&chosen.model, &chosen.adapters)?;
        loaded.chat()?;
        // A constraint that cannot be read is known before anybody has typed.
        self.sampling.constraint()?;
        let mut input = Input::open(HELP)?;
        let mut talk = self.talk(loaded);
        if input.is_terminal() {
            let name = &talk.loaded.name;
            talk.note(&format!("{name}  /help lists the commands, Ctrl-D quits"));
        }
        answer::listen();
        loop {
            let next = match input.next()? {
                Typed::End => Next::Leave,
                Typed::Nothing => Next::Listen,
                Typed::Text(text) => talk.hear(&text).unwrap_or_else(complain),
                Typed::Quoted(text) => talk.ask(&text),
            };
            match next {
                Next::Leave => return Ok(ExitCode::SUCCESS),
                Next::Listen => continue,
                Next::Answer => {}
            }
            match talk.answer() {
                Ok(Reason::Cancelled) if !input.is_terminal() => {
                    return Ok(ExitCode::from(INTERRUPTED));
                }
                Ok(_) => {}
                Err(failure) => {
                    // The question stays out of what follows.
                    talk.conversation.undo();
                    complain(failure);
                }
            }
        }
    }

    fn talk(&self, loaded: Generator) -> Talk {
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || !std::io::stderr().is_terminal();
        let around = if is_plain { ["", ""] } else { ["\x1b[2m", "\x1b[0m"] };
        let mut sampling = self.sampling.clone();
        sampling.seed = Some(sampling.sampling(Sampling::default()).seed);
        Talk {
            loaded,
            conversation: Conversation::new(self.system.clone()),
            sampling,
            max_tokens: self.max_tokens,
            n_answers: 0,
            last: None,
            out: Out::new(),
            notes: (!self.quiet).then_some(around),
        }
    }
}

/// Prints what went wrong, and continues.
fn complain(failure: Failure) -> Next {
    eprintln!("error: {failure}");
    Next::Listen
}

impl Talk {
    fn note(&self, text: &str) {
        if let Some([before, after]) = self.notes {
            eprintln!("{before}{text}{after}");
        }
    }

    fn hear(&mut self, text: &str) -> Done<Next> {
        let Some(command) = text.strip_prefix('/') else { return Ok(self.ask(text)) };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        self.command(name, rest.trim())
    }

    fn ask(&mut self, text: &str) -> Next {
        if text.is_empty() {
            return Next::Listen;
        }
        self.conversation.push(text.to_string());
        Next::Answer
    }

    fn command(&mut self, name: &str, rest: &str) -> Done<Next> {
        match name {
            "help" | "?" => eprintln!("{HELP}"),
            "system" => {
                self.conversation.system = (!rest.is_empty()).then(|| rest.to_string());
            }
            "reset" => self.conversation.reset(),
            "undo" => match self.conversation.undo() {
                Some(text) => {
                    let first = text.lines().next().unwrap_or("");
                    self.note(&format!("removed: {first}"));
                }
                None => self.note("the conversation is empty"),
            },
            "retry" => match self.conversation.retry() {
                true => return Ok(Next::Answer),
                false => self.note("the conversation is empty"),
            },
            "save" => {
                self.conversation.save(path_of(rest)?)?;
                self.note(&format!("saved   {rest}"));
            }
            "load" => {
                self.conversation = Conversation::load(path_of(rest)?)?;
                let n = self.conversation.n_turns();
                self.note(&format!("loaded  {rest}: {n} questions"));
            }
            "set" => self.set(rest)?,
            "adapter" => self.adapter(rest)?,
            "stats" => self.stats(),
            "quit" | "exit" | "q" => return Ok(Next::Leave),
            _ => {
                let hint = "/help lists the commands; write a message that starts with a slash \
                    between \"\"\"";
                return Err(Failure::new(format!("unknown command /{name}"), hint));
            }
        }
        Ok(Next::Listen)
    }

    fn answer(&mut self) -> Done<Reason> {
        let request = self.request()?;
        let out = &mut self.out;
        let answer = answer(&mut self.loaded.engine, request, &mut |token| out.write(&token.text))?;
        self.n_answers += 1;
        self.out.write(&answer.finish.text);
        self.out.end_line();
        if answer.finish.n_tok == 0 || answer.text.is_empty() {
            // One line for each answer, so that a reader of a pipe can count them.
            self.out.write("\n");
        }
        match &answer.finish.reason {
            Reason::Length => self.note("note    cut off at the token limit"),
            Reason::Cancelled => self.note("note    interrupted"),
            _ => {}
        }
        let experts = answer::experts(&self.loaded.engine);
        let speed = format!("speed   {}{experts}", answer.timings());
        self.note(&speed);
        self.last = Some(speed);
        self.conversation.push(answer.text);
        Ok(answer.finish.reason)
    }

    fn request(&mut self) -> Done<Request> {
        let context = self.loaded.engine.settings().context;
        // An answer gets what it may take, but no more than a quarter is kept free for it.
        let n_kept = self.max_tokens.unwrap_or(context).min(context / 4).max(1);
        let loaded = &self.loaded;
        let mut prompt = |messages: &[_]| chat_prompt(loaded, messages);
        let (ids, n_forgotten) = self.conversation.fit(context - n_kept, &mut prompt)?;
        if n_forgotten > 0 {
            let s = if n_forgotten == 1 { "" } else { "s" };
            let words = format!("dropped the oldest {n_forgotten} question{s}");
            self.note(&format!("note    the context is full: {words}"));
        }
        let n_max = self.max_tokens.unwrap_or(context).min(context - ids.len());
        let mut request = self.sampling.request(&self.loaded, ids, n_max)?;
        request.sampling.seed = request.sampling.seed.wrapping_add(self.n_answers);
        Ok(request)
    }

    fn set(&mut self, rest: &str) -> Done<()> {
        let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        if name.is_empty() {
            eprintln!("{}", self.settings());
            return Ok(());
        }
        let value = value.trim();
        let wrong = |problem: String| Failure::new(format!("/set {name}: {problem}"), SETTINGS);
        let whole = |text: &str| text.parse::<usize>().map_err(|_| "give a whole number".into());
        let sampling = &mut self.sampling;
        let done: Result<(), String> = match name.replace('_', "-").as_str() {
            "temperature" => number_from_zero(value).map(|x| sampling.temperature = Some(x)),
            "top-k" => whole(value).map(|k| sampling.top_k = Some(k)),
            "top-p" => share(value).map(|x| sampling.top_p = Some(x)),
            "min-p" => share(value).map(|x| sampling.min_p = Some(x)),
            "repeat-penalty" => number_from_zero(value).map(|x| sampling.repeat_penalty = Some(x)),
            "presence-penalty" => finite(value).map(|x| sampling.presence_penalty = x),
            "frequency-penalty" => finite(value).map(|x| sampling.frequency_penalty = x),
            "max-tokens" => whole(value).map(|n| self.max_tokens = Some(n.max(1))),
            "seed" => whole(value).map(|seed| {
                (sampling.seed, self.n_answers) = (Some(seed as u64), 0);
            }),
            _ => Err("unknown setting".into()),
        };
        done.map_err(wrong)
    }

    fn settings(&self) -> String {
        let now = self.sampling.sampling(self.loaded.request(Vec::new()).sampling);
        let Sampling { temperature, top_p, min_p, repeat_penalty, seed, .. } = now;
        let (presence, frequency) = (now.presence_penalty, now.frequency_penalty);
        let or = |n: Option<usize>, word: &str| n.map_or(word.to_string(), |n| n.to_string());
        let top_k = or(now.top_k, "0 (all)");
        let max_tokens = or(self.max_tokens, "what the context leaves");
        format!(
            "temperature {temperature}\ntop-k {top_k}\ntop-p {top_p}\nmin-p {min_p}\n\
             repeat-penalty {repeat_penalty}\npresence-penalty {presence}\n\
             frequency-penalty {frequency}\nseed {seed}\nmax-tokens {max_tokens}"
        )
    }

    fn adapter(&mut self, rest: &str) -> Done<()> {
        let list = &mut self.loaded.adapters;
        if rest.is_empty() {
            if list.is_empty() {
                eprintln!("no adapters; start with --adapter PATH");
            }
            for LoadedAdapter { name, path, scale } in list {
                eprintln!("{name}  scale {scale}  {}", path.display());
            }
            return Ok(());
        }
        let (name, scale) = rest.rsplit_once(char::is_whitespace).unwrap_or((rest, "1"));
        let name = name.trim();
        let Some(idx) = list.iter().position(|adapter| adapter.name == name) else {
            let names: Vec<&str> = list.iter().map(|adapter| adapter.name.as_str()).collect();
            let hint = format!("loaded: {}; add one with --adapter PATH", names.join(", "));
            return Err(Failure::new(format!("no adapter {name:?} is loaded"), &hint));
        };
        list[idx].scale = finite(scale).map_err(|_| {
            Failure::new(format!("{scale:?} is not a number"), "write /adapter NAME 0.5")
        })?;
        Ok(())
    }

    fn stats(&self) {
        let stats = self.loaded.engine.stats();
        let context = self.loaded.engine.settings().context;
        let chat = chat_prompt(&self.loaded, &self.conversation.messages());
        if let Some(speed) = &self.last {
            eprintln!("{speed}");
        }
        // A template may refuse a conversation in which nothing was said.
        let n_tok = chat.map_or(0, |ids| ids.len());
        let n = self.conversation.n_turns();
        eprintln!("context {n_tok} of {context} tokens, {n} questions");
        let (bytes, n_snapshots) = (mebibytes(stats.snapshot_bytes as f64), stats.n_snapshots);
        eprintln!(
            "tokens  {} prompt, {} cached, {} generated; {n_snapshots} snapshots, {bytes}",
            stats.n_prompt_tok, stats.n_cached_tok, stats.n_answer_tok
        );
    }
}

/// The file that a command names.
fn path_of(rest: &str) -> Done<&Path> {
    match rest {
        "" => Err(Failure::new("no file name given", "write, for example, /save talk.json")),
        _ => Ok(Path::new(rest)),
    }
}
