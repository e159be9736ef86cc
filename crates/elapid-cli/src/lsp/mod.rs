//! The language server: completions in an editor, by messages on stdin and stdout.
//!
//! One thread reads messages (`frame.rs`), this one answers them and owns the engine. Between two
//! steps of the engine it looks for messages, so a completion that is cancelled ends within a step.
//! One completion is made at a time; others wait. For a document only the newest counts: the one
//! before it is answered with `ContentModified`.
//!
//! A document belongs to the project that `elapid complete` would find for it, whose newest adapter
//! is taken and whose files are shown to the model. Models of the last projects stay loaded, with
//! their prompt caches.
//!
//! Not here: which model a project has (`commands/`), the prompt and the end of an answer
//! (`talk/`), which files are shown (`server/nearby.rs`).

mod asked;
mod document;
mod frame;

use crate::project::Project;
use crate::report::{Done, Failure, print};
use crate::server::nearby::Nearby;
use crate::talk::hole::{self, Hole, Others};
use crate::talk::insert::{self, Lines};
use asked::{Asked, Form};
use document::{Change, Encoding, path};
use elapid::{Event, Generator, Reason, Refusal, RequestId};
use frame::{Code, Frame, Frames, answer, written};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

/// Messages that wait to be looked at; past them the editor waits.
const N_MESSAGES_MAX: usize = 256;
/// Projects whose models stay loaded.
const N_HOMES_MAX: usize = 2;

/// Makes the model of a project ready.
pub type Load<'a> = &'a dyn Fn(&Project) -> Done<Generator>;

pub struct Settings {
    pub n_lines: usize,
    /// Which files besides its own a model is shown.
    pub others: Others,
    pub log: Log,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// The choice of a model, failures.
    Short,
    /// Two lines for each answer too.
    Answers,
}

/// Answers messages until there are no more; 0 where the client said goodbye.
pub fn serve(settings: Settings, load: Load<'_>) -> ExitCode {
    let (sender, inbox) = sync_channel(N_MESSAGES_MAX);
    std::thread::spawn(move || {
        let mut frames = Frames::new(BufReader::new(std::io::stdin()));
        // A stream that cannot be read is at its end, and nobody listens after the last message.
        while let Ok(()) = sender.send(frames.next().unwrap_or(Frame::End)) {}
    });
    let desk = Desk {
        settings,
        load,
        stage: Stage::New,
        encoding: Encoding::Utf16,
        folders: Vec::new(),
        documents: HashMap::new(),
        waiting: VecDeque::new(),
        job: None,
        homes: Vec::new(),
    };
    desk.run(&inbox)
}

/// What has been said of the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Open,
    Shut,
}

struct Desk<'a> {
    settings: Settings,
    load: Load<'a>,
    stage: Stage,
    encoding: Encoding,
    /// What the editor has open.
    folders: Vec<PathBuf>,
    /// Texts by URI. A request keeps the text that it was asked of.
    documents: HashMap<String, Rc<String>>,
    /// At most one for a document.
    waiting: VecDeque<Asked>,
    /// Runs on the last of the homes.
    job: Option<Job>,
    /// The last used is last.
    homes: Vec<Home>,
}

/// A project whose model is loaded.
struct Home {
    project: Project,
    /// The run of `elapid adapt` that was the newest when it was loaded.
    newest: Option<PathBuf>,
    loaded: Generator,
    nearby: Nearby,
}

/// A completion under way.
struct Job {
    asked: Asked,
    id: RequestId,
    lines: Lines,
    begin: Instant,
    n_prompt: usize,
    n_tok: usize,
}

#[derive(Deserialize)]
struct Folder {
    uri: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Opened {
    text_document: Item,
}

#[derive(Deserialize)]
struct Item {
    uri: String,
    #[serde(default)]
    text: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Changed {
    text_document: Item,
    content_changes: Vec<Change>,
}

/// The parameters of a message.
fn read<T: DeserializeOwned>(params: Value) -> Result<T, (Code, String)> {
    serde_json::from_value(params).map_err(|error| (Code::InvalidParams, error.to_string()))
}

fn failed(failure: &Failure) -> (Code, String) {
    (Code::Failed, format!("{} ({})", failure.problem, failure.hint))
}

impl Desk<'_> {
    fn run(mut self, inbox: &Receiver<Frame>) -> ExitCode {
        loop {
            let is_idle = self.job.is_none() && self.waiting.is_empty();
            let first = is_idle.then(|| inbox.recv().unwrap_or(Frame::End));
            for frame in first.into_iter().chain(inbox.try_iter()) {
                let ControlFlow::Break(code) = self.take(frame) else { continue };
                return code;
            }
            match self.waiting.pop_front_if(|_| self.job.is_none()) {
                Some(asked) => self.begin(asked),
                None => self.step(),
            }
        }
    }

    fn take(&mut self, frame: Frame) -> ControlFlow<ExitCode> {
        let mut message = match frame {
            Frame::Message(message) => message,
            Frame::Broken(code, words) => {
                self.reply(&Value::Null, Err((code, words)));
                return ControlFlow::Continue(());
            }
            Frame::End => return ControlFlow::Break(ExitCode::FAILURE),
        };
        let params = message.get_mut("params").map(Value::take).unwrap_or_default();
        let id = message.get("id").filter(|id| id.is_string() || id.is_number());
        match (message.get("method").and_then(Value::as_str), id) {
            (Some("exit"), _) => {
                let is_shut = self.stage == Stage::Shut;
                return ControlFlow::Break(ExitCode::from(u8::from(!is_shut)));
            }
            (Some(method), Some(id)) => self.request(method, id, params),
            (Some(method), None) => self.notice(method, params),
            // An answer: nothing was asked.
            (None, Some(_)) if message.get("result").or(message.get("error")).is_some() => {}
            (None, id) => {
                let words = "a message is an object with a method";
                let id = id.cloned().unwrap_or_default();
                self.reply(&id, Err((Code::InvalidRequest, words.into())));
            }
        }
        ControlFlow::Continue(())
    }

    fn reply(&self, id: &Value, outcome: Result<Value, (Code, String)>) {
        print(written(&answer(id, outcome)));
    }

    fn request(&mut self, method: &str, id: &Value, params: Value) {
        let outcome = match (self.stage, method) {
            (Stage::New, "initialize") => Ok(self.initialize(&params)),
            (Stage::New, _) => Err((Code::NotInitialized, "initialize comes first".into())),
            (Stage::Shut, _) => Err((Code::InvalidRequest, "the server was shut down".into())),
            (Stage::Open, "initialize") => {
                Err((Code::InvalidRequest, "the server was initialized before".into()))
            }
            (Stage::Open, "shutdown") => {
                self.stage = Stage::Shut;
                self.end_all(|_| true, Code::Cancelled);
                Ok(Value::Null)
            }
            (Stage::Open, "textDocument/inlineCompletion") => {
                return self.ask(id, params, Form::Inline);
            }
            (Stage::Open, "textDocument/completion") => return self.ask(id, params, Form::List),
            (Stage::Open, _) => Err((Code::MethodNotFound, format!("no method `{method}` here"))),
        };
        self.reply(id, outcome);
    }

    fn initialize(&mut self, params: &Value) -> Value {
        self.stage = Stage::Open;
        let encodings = params.pointer("/capabilities/general/positionEncodings");
        let knows_utf8 = encodings.and_then(Value::as_array);
        let knows_utf8 = knows_utf8.is_some_and(|list| list.iter().any(|name| name == "utf-8"));
        self.encoding = if knows_utf8 { Encoding::Utf8 } else { Encoding::Utf16 };
        let folders = params.get("workspaceFolders").cloned().unwrap_or_default();
        let folders: Vec<Folder> = serde_json::from_value(folders).unwrap_or_default();
        self.folders = folders.iter().filter_map(|folder| path(&folder.uri)).collect();
        if self.folders.is_empty() {
            let root = params.get("rootUri").and_then(Value::as_str).and_then(path);
            self.folders = root.into_iter().collect();
        }
        let mut capabilities = json!({
            "positionEncoding": if knows_utf8 { "utf-8" } else { "utf-16" },
            "textDocumentSync": {"openClose": true, "change": 2},
            "inlineCompletionProvider": {},
            "workspace": {"workspaceFolders": {"supported": true, "changeNotifications": true}},
        });
        // An editor that shows completions in the text is not to list them too.
        if params.pointer("/capabilities/textDocument/inlineCompletion").is_none() {
            capabilities["completionProvider"] = json!({});
        }
        let about = json!({"name": "elapid", "version": env!("CARGO_PKG_VERSION")});
        json!({"capabilities": capabilities, "serverInfo": about})
    }

    /// Nobody waits for an answer to these: what is wrong with one is said on stderr.
    fn notice(&mut self, method: &str, params: Value) {
        if self.stage != Stage::Open {
            return;
        }
        let done = match method {
            // While something runs, its model has to stay the last.
            "initialized" if self.job.is_none() => {
                self.warm_up();
                Ok(())
            }
            "$/cancelRequest" => {
                let id = params.get("id").cloned().unwrap_or_default();
                self.end_all(|asked| asked.id == id, Code::Cancelled);
                Ok(())
            }
            "textDocument/didOpen" => read(params).map(|Opened { text_document: item }| {
                self.documents.insert(item.uri, item.text.into());
            }),
            "textDocument/didChange" => self.change(params),
            "textDocument/didClose" => read(params).map(|Opened { text_document: item }| {
                self.end_all(|asked| asked.uri == item.uri, Code::ContentModified);
                self.documents.remove(&item.uri);
            }),
            "workspace/didChangeWorkspaceFolders" => self.change_folders(&params),
            _ => Ok(()),
        };
        if let Err((_, words)) = done {
            eprintln!("fail    {method}: {words}");
        }
    }

    fn change(&mut self, params: Value) -> Result<(), (Code, String)> {
        let uri = params.pointer("/textDocument/uri").and_then(Value::as_str).map(str::to_string);
        let changed: Changed = read(params).inspect_err(|_| {
            // Its text is not known any more.
            uri.and_then(|uri| self.documents.remove(&uri));
        })?;
        let text = self.documents.get_mut(&changed.text_document.uri);
        let text = Rc::make_mut(text.ok_or((Code::InvalidParams, "it is not open".into()))?);
        changed.content_changes.iter().for_each(|change| self.encoding.apply(text, change));
        Ok(())
    }

    fn change_folders(&mut self, params: &Value) -> Result<(), (Code, String)> {
        let list = |name: &str| {
            let list = params.pointer(name).cloned().unwrap_or(json!([]));
            read::<Vec<Folder>>(list).map(|it| it.iter().filter_map(|it| path(&it.uri)).collect())
        };
        let (added, removed): (Vec<_>, Vec<_>) = (list("/event/added")?, list("/event/removed")?);
        self.folders.retain(|folder| !removed.contains(folder));
        self.folders.extend(added);
        Ok(())
    }

    fn ask(&mut self, id: &Value, params: Value, form: Form) {
        let asked = Asked::new(id, params, form, |uri| {
            let text = self.documents.get(uri).cloned();
            text.map(|text| (text, self.encoding)).ok_or_else(|| format!("{uri} is not open"))
        });
        match asked {
            Ok(asked) => {
                self.end_all(|older| older.uri == asked.uri, Code::ContentModified);
                self.waiting.push_back(asked);
            }
            Err(words) => self.reply(id, Err((Code::InvalidParams, words))),
        }
    }

    /// Ends completions that were asked for.
    fn end_all(&mut self, is_meant: impl Fn(&Asked) -> bool, code: Code) {
        let words = match code {
            Code::Cancelled => "cancelled",
            _ => "the document was closed or asked about again",
        };
        let (mut ended, left): (VecDeque<Asked>, _) =
            self.waiting.drain(..).partition(|asked| is_meant(asked));
        self.waiting = left;
        if let Some(job) = self.job.take_if(|job| is_meant(&job.asked)) {
            if let Some(home) = self.homes.last_mut() {
                home.loaded.engine.cancel(job.id);
            }
            ended.push_front(job.asked);
        }
        ended.iter().for_each(|asked| self.reply(&asked.id, Err((code, words.into()))));
    }

    /// Loads what the first request will need.
    fn warm_up(&mut self) {
        let folder = self.folders.first().map_or(Path::new("."), PathBuf::as_path);
        let project = Project::of(folder);
        // The directory that a server happens to start in may be anything.
        let is_shown = self.settings.others == Others::Picked && !self.folders.is_empty();
        match self.home(project) {
            Ok(home) if is_shown && home.loaded.fim.is_some() => home.nearby.warm_up(),
            Ok(_) => {}
            Err(failure) => eprintln!("fail    {}; {}", failure.problem, failure.hint),
        }
    }

    /// The model of a project, loaded where it is not, or where a newer adapter is there.
    fn home(&mut self, project: Project) -> Done<&mut Home> {
        let newest = project.newest().map(|run| run.dir);
        let known = self.homes.iter().position(|home| home.project.root == project.root);
        let known = known.map(|at| self.homes.remove(at)).filter(|home| home.newest == newest);
        let home = match known {
            Some(home) => home,
            None => {
                // First, so that there are never more than are kept.
                self.homes.drain(..(self.homes.len() + 1).saturating_sub(N_HOMES_MAX));
                let (loaded, nearby) = ((self.load)(&project)?, Nearby::new(&project));
                Home { project, newest, loaded, nearby }
            }
        };
        self.homes.push(home);
        Ok(self.homes.last_mut().unwrap_or_else(|| unreachable!("one was just added")))
    }

    fn begin(&mut self, asked: Asked) {
        let path = path(&asked.uri);
        let project = match &path {
            Some(path) => Project::of_document(path, &self.folders),
            None => Project::of(self.folders.first().map_or(Path::new("."), PathBuf::as_path)),
        };
        let (others, n_lines) = (self.settings.others, self.settings.n_lines);
        let begun = self.home(project);
        let begun = begun.and_then(|home| home.begin(&asked, path.as_deref(), others, n_lines));
        match begun {
            Ok((id, lines, n_prompt)) => {
                let begin = Instant::now();
                self.job = Some(Job { asked, id, lines, begin, n_prompt, n_tok: 0 });
            }
            Err(failure) => self.reply(&asked.id, Err(failed(&failure))),
        }
    }

    fn step(&mut self) {
        let (Some(job), Some(home)) = (&mut self.job, self.homes.last_mut()) else { return };
        let (engine, log) = (&mut home.loaded.engine, self.settings.log);
        let mut end = None;
        for (id, event) in engine.step() {
            match event {
                _ if id != job.id || end.is_some() => {}
                Event::Prompt { n_done, n_cached, .. } => {
                    if log == Log::Answers && n_done == job.n_prompt {
                        let n_read = n_done - n_cached;
                        eprintln!("prompt  {n_read} tokens read, {n_cached} cached");
                    }
                }
                Event::Token(token) => {
                    job.n_tok += 1;
                    if job.lines.push(&token.text).1.is_break() {
                        engine.cancel(id);
                        end = Some(Ok(()));
                    }
                }
                Event::Done(finish) => {
                    job.lines.finish(&finish.text);
                    end = Some(match finish.reason {
                        Reason::Failed(error) => Err((Code::Internal, error.to_string())),
                        _ => Ok(()),
                    });
                }
            }
        }
        let Some((end, job)) = end.and_then(|end| Some((end, self.job.take()?))) else { return };
        if log == Log::Answers {
            eprintln!("answer  {} tokens, {} ms", job.n_tok, job.begin.elapsed().as_millis());
        }
        self.reply(&job.asked.id, end.map(|()| job.asked.result(&job.lines.text)));
    }
}

impl Home {
    /// Hands a request to the engine: its number, the lines it will have, tokens of its prompt.
    fn begin(
        &mut self,
        asked: &Asked,
        path: Option<&Path>,
        others: Others,
        n_lines: usize,
    ) -> Done<(RequestId, Lines, usize)> {
        let Home { project, loaded, nearby, .. } = self;
        let [prefix, suffix] = asked.around();
        let named = path.map(|path| path.to_string_lossy());
        let n_bytes = hole::picked_bytes(loaded.engine.settings().context);
        let picked = (others == Others::Picked && loaded.fim.is_some())
            .then(|| nearby.pick(named.as_deref(), [&prefix, &suffix], n_bytes));
        let own = path.map(|path| project.relative(path)).unwrap_or_default();
        let path = picked.as_ref().map(|picked| &picked.path[..]).filter(|path| !path.is_empty());
        let hole = Hole {
            prefix: &prefix,
            suffix: &suffix,
            n_prefix: None,
            n_suffix: None,
            repo: &nearby.repo,
            path: path.unwrap_or(if own.is_empty() { "file" } else { &own }),
            files: picked.iter().flat_map(|picked| picked.shown()).collect(),
            others,
        };
        let laid = insert::prompt(loaded, &hole)?;
        let lines = Lines::between(loaded, [&prefix, &suffix], n_lines);
        let request = insert::request(loaded, &laid, n_lines);
        let id = loaded.engine.submit(request).map_err(|refusal| match refusal {
            Refusal::Bad(error) => Failure::from(error),
            Refusal::Full => Failure::new("the request queue is full", "try again"),
        })?;
        Ok((id, lines, laid.ids.len()))
    }
}
