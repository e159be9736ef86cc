//! `elapid chat`: a conversation in the terminal.

use crate::report::{Done, Failure, between, mebibytes};
use crate::talk::answer::{self, Answer, INTERRUPTED, Out, answer};
use crate::talk::conversation::Conversation;
use crate::talk::flags::{ModelFlags, SamplingFlags, number_from_zero, share};
use crate::talk::input::{Input, Typed};
use crate::talk::load::{chat_prompt, load};
use elapid::Generator;
use elapid::{Reason, Request};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Talk with a model that has a chat template.
///
/// A line is a message; it goes on in the next line after a backslash, or between """ and """.
/// Ctrl-C ends an answer and keeps what was said, Ctrl-D leaves. Where stdin is no terminal each
/// line of it is a message. /help lists what else can be typed.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid chat SmolLM2-135M-Instruct\n  \
    elapid chat model.gguf --system 'Answer in one sentence.' --temperature 0.3\n  \
    elapid chat model.gguf --adapter runs/a1=0.5\n  \
    printf 'Hello\\nWhat did I say?\\n' | elapid chat model.gguf --quiet")]
pub struct Chat {
    /// Directory, .gguf or .elapid file, or a run of `elapid train`
    model: PathBuf,
    /// What the model is told before all
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of an answer, at most [default: what the context leaves]
    #[arg(long, short = 'n', value_name = "N", value_parser = between(1, 1 << 24))]
    max_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    source: ModelFlags,
    /// Answers alone
    #[arg(long, short = 'q')]
    quiet: bool,
}

const HELP: &str = "\
/help               this list
/system TEXT        what the model is told before all; without TEXT nothing
/reset              forget what was said
/undo               take the last message and its answer back
/retry              answer the last message again
/save FILE          write the conversation to a file
/load FILE          go on with one
/set                the settings; /set temperature 0.7 changes one
/adapter            the adapters; /adapter NAME 0.5 changes the scale of one, 0 turns it off
/stats              speeds of the last answer, context, memory
/quit               leave (or Ctrl-D)
\"\"\" ... \"\"\"         a message of several lines; a backslash at the end of a line does the same
Ctrl-C              end the answer and keep what was said";

const COMMANDS: [&str; 11] = [
    "/help", "/system ", "/reset", "/undo", "/retry", "/save ", "/load ", "/set ", "/adapter",
    "/stats", "/quit",
];

/// What can be set while talking.
const SETTINGS: &str = "temperature, top-k, top-p, min-p, repeat-penalty, presence-penalty, \
    frequency-penalty, seed, max-tokens";

/// What to do after something was typed.
#[derive(PartialEq)]
enum Next {
    Answer,
    Listen,
    Leave,
}

/// A chat under way.
struct Talk {
    loaded: Generator,
    conversation: Conversation,
    sampling: SamplingFlags,
    max_tokens: Option<usize>,
    /// Adapters by number, with their scales now.
    adapters: Vec<f32>,
    /// Answers so far: each draws for itself.
    n_answers: u64,
    seed: u64,
    last: Option<String>,
    out: Out,
    notes: Notes,
}

/// Whether what is not an answer is said.
#[derive(Clone, Copy, PartialEq)]
enum Notes {
    None,
    Plain,
    Dim,
}

impl Notes {
    fn say(self, text: &str) {
        match self {
            Notes::None => {}
            Notes::Plain => eprintln!("{text}"),
            Notes::Dim => eprintln!("\x1b[2m{text}\x1b[0m"),
        }
    }
}

impl Chat {
    pub fn run(&self) -> Done<ExitCode> {
        let loaded = load(&self.model, &self.source.settings())?;
        loaded.chat()?;
        // A constraint that cannot be read is known before anybody has typed.
        self.sampling.constraint()?;
        let mut input = Input::open(&COMMANDS)?;
        let mut talk = self.talk(loaded);
        if input.is_terminal() {
            let name = &talk.loaded.name;
            talk.notes.say(&format!("{name}  /help lists what can be typed, Ctrl-D leaves"));
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
        Talk {
            conversation: Conversation::new(self.system.clone()),
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            adapters: loaded.adapters.iter().map(|adapter| adapter.scale).collect(),
            n_answers: 0,
            seed: self.sampling.sampling(&loaded.suggested).seed,
            last: None,
            out: Out::new(),
            notes: match (self.quiet, is_plain) {
                (true, _) => Notes::None,
                (_, true) => Notes::Plain,
                _ => Notes::Dim,
            },
            loaded,
        }
    }
}

/// Says what went wrong, and goes on.
fn complain(failure: Failure) -> Next {
    eprintln!("error: {failure}");
    Next::Listen
}

impl Talk {
    /// Takes what was typed.
    fn hear(&mut self, text: &str) -> Done<Next> {
        let Some(command) = text.strip_prefix('/') else { return Ok(self.ask(text)) };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        self.command(name, rest.trim())
    }

    /// Takes a message.
    fn ask(&mut self, text: &str) -> Next {
        if text.is_empty() {
            return Next::Listen;
        }
        self.conversation.ask(text.to_string());
        Next::Answer
    }

    fn command(&mut self, name: &str, rest: &str) -> Done<Next> {
        match name {
            "help" | "?" => self.show(HELP),
            "system" => {
                self.conversation.system = (!rest.is_empty()).then(|| rest.to_string());
            }
            "reset" => self.conversation.reset(),
            "undo" => match self.conversation.undo() {
                Some(text) => self.notes.say(&format!("taken back: {}", first_line(&text))),
                None => self.notes.say("nothing was said yet"),
            },
            "retry" => match self.conversation.retry() {
                true => return Ok(Next::Answer),
                false => self.notes.say("nothing was said yet"),
            },
            "save" => {
                self.conversation.save(path_of(rest)?)?;
                self.notes.say(&format!("saved   {rest}"));
            }
            "load" => {
                self.conversation = Conversation::load(path_of(rest)?)?;
                let n = self.conversation.n_turns();
                self.notes.say(&format!("loaded  {rest}: {n} questions"));
            }
            "set" => self.set(rest)?,
            "adapter" => self.adapter(rest)?,
            "stats" => self.stats(),
            "quit" | "exit" | "q" => return Ok(Next::Leave),
            _ => {
                let hint = "/help lists what can be typed; put a message that begins with a \
                    slash between \"\"\"";
                return Err(Failure::new(format!("there is no command /{name}"), hint));
            }
        }
        Ok(Next::Listen)
    }

    /// What was asked for is shown even to those who want it quiet.
    fn show(&self, text: &str) {
        eprintln!("{text}");
    }

    /// Answers the last question.
    fn answer(&mut self) -> Done<Reason> {
        let request = self.request()?;
        let out = &mut self.out;
        let Answer { text, finish, timings, .. } =
            answer(&mut self.loaded.engine, request, &mut |token| out.write(&token.text))?;
        self.n_answers += 1;
        self.out.write(&finish.text);
        self.out.end_line();
        if finish.n_tok == 0 || text.is_empty() {
            // One line for each answer, so that a reader of a pipe can count them.
            self.out.write("\n");
        }
        self.conversation.answer(text);
        match &finish.reason {
            Reason::Length => self.notes.say("note    cut off: no room for more tokens"),
            Reason::Cancelled => self.notes.say("note    interrupted"),
            _ => {}
        }
        let sentence = timings.sentence();
        self.notes.say(&format!("speed   {sentence}"));
        self.last = Some(sentence);
        Ok(finish.reason)
    }

    fn request(&mut self) -> Done<Request> {
        let context = self.loaded.engine.settings().context;
        // An answer gets what it may take, but no more than a quarter is kept free for it.
        let n_kept = self.max_tokens.unwrap_or(context).min(context / 4).max(1);
        let loaded = &self.loaded;
        let mut prompt = |messages: &[_]| chat_prompt(loaded, messages);
        let (ids, n_forgotten) = self.conversation.fit(context - n_kept, &mut prompt)?;
        if n_forgotten > 0 {
            let turns = if n_forgotten == 1 { "question" } else { "questions" };
            let text =
                format!("note    the context is full: the oldest {n_forgotten} {turns} forgotten");
            self.notes.say(&text);
        }
        let n_max = self.max_tokens.unwrap_or(context).min(context - ids.len());
        let mut request = self.sampling.request(&self.loaded, ids, n_max)?;
        request.sampling.seed = self.seed.wrapping_add(self.n_answers);
        let scales = self.adapters.iter().copied().enumerate();
        request.adapters = scales.filter(|(_, scale)| *scale != 0.0).collect();
        Ok(request)
    }

    fn set(&mut self, rest: &str) -> Done<()> {
        let (name, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        if name.is_empty() {
            self.show(&self.settings());
            return Ok(());
        }
        let value = value.trim();
        let wrong = |problem: String| Failure::new(format!("/set {name}: {problem}"), SETTINGS);
        let float = |text: &str| match text.parse::<f32>() {
            Ok(number) if number.is_finite() => Ok(number),
            _ => Err("give a number".to_string()),
        };
        let whole = |text: &str| text.parse::<usize>().map_err(|_| "give a whole number".into());
        let sampling = &mut self.sampling;
        let done: Result<(), String> = match name.replace('_', "-").as_str() {
            "temperature" => number_from_zero(value).map(|x| sampling.temperature = Some(x)),
            "top-k" => whole(value).map(|k| sampling.top_k = Some(k)),
            "top-p" => share(value).map(|x| sampling.top_p = Some(x)),
            "min-p" => share(value).map(|x| sampling.min_p = Some(x)),
            "repeat-penalty" => number_from_zero(value).map(|x| sampling.repeat_penalty = Some(x)),
            "presence-penalty" => float(value).map(|x| sampling.presence_penalty = x),
            "frequency-penalty" => float(value).map(|x| sampling.frequency_penalty = x),
            "max-tokens" => whole(value).map(|n| self.max_tokens = Some(n.max(1))),
            "seed" => whole(value).map(|seed| (self.seed, self.n_answers) = (seed as u64, 0)),
            _ => Err("there is no such setting".into()),
        };
        done.map_err(wrong)
    }

    fn settings(&self) -> String {
        let now = self.sampling.sampling(&self.loaded.suggested);
        let or = |n: Option<usize>, word: &str| n.map_or(word.to_string(), |n| n.to_string());
        format!(
            "temperature {}\ntop-k {}\ntop-p {}\nmin-p {}\nrepeat-penalty {}\n\
             presence-penalty {}\nfrequency-penalty {}\nseed {}\nmax-tokens {}",
            now.temperature,
            or(now.top_k, "0 (all)"),
            now.top_p,
            now.min_p,
            now.repeat_penalty,
            now.presence_penalty,
            now.frequency_penalty,
            self.seed,
            or(self.max_tokens, "what the context leaves"),
        )
    }

    fn adapter(&mut self, rest: &str) -> Done<()> {
        if rest.is_empty() {
            if self.adapters.is_empty() {
                self.show("no adapters; start with --adapter PATH");
            }
            for (adapter, scale) in self.loaded.adapters.iter().zip(&self.adapters) {
                let path = adapter.path.display();
                self.show(&format!("{}  scale {scale}  {path}", adapter.name));
            }
            return Ok(());
        }
        let (name, scale) = rest.rsplit_once(char::is_whitespace).unwrap_or((rest, "1"));
        let name = name.trim();
        let found = self.loaded.adapters.iter().position(|adapter| adapter.name == name);
        let idx = found.ok_or_else(|| {
            let names: Vec<&str> =
                self.loaded.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
            let hint = format!("there are: {}; add one with --adapter PATH", names.join(", "));
            Failure::new(format!("there is no adapter {name:?}"), &hint)
        })?;
        self.adapters[idx] = match scale.parse::<f32>() {
            Ok(scale) if scale.is_finite() => scale,
            _ => {
                let problem = format!("{scale:?} is no scale");
                return Err(Failure::new(problem, "write /adapter NAME 0.5"));
            }
        };
        Ok(())
    }

    fn stats(&self) {
        let stats = self.loaded.engine.stats();
        let context = self.loaded.engine.settings().context;
        let chat = chat_prompt(&self.loaded, &self.conversation.messages());
        if let Some(last) = &self.last {
            self.show(&format!("speed   {last}"));
        }
        // A template may refuse a conversation in which nothing was said.
        let n_tok = chat.map_or(0, |ids| ids.len());
        let n = self.conversation.n_turns();
        self.show(&format!("context {n_tok} of {context} tokens, {n} questions"));
        let (bytes, n_snapshots) = (mebibytes(stats.snapshot_bytes as f64), stats.n_snapshots);
        self.show(&format!(
            "tokens  {} read, {} kept, {} answered; {n_snapshots} snapshots of {bytes}",
            stats.n_prompt_tok, stats.n_cached_tok, stats.n_answer_tok
        ));
    }
}

/// The file that a command names.
fn path_of(rest: &str) -> Done<&Path> {
    match rest {
        "" => Err(Failure::new("which file?", "name it: /save talk.json")),
        _ => Ok(Path::new(rest)),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}
