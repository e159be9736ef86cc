//! A model: opened, made, asked, saved.

use crate::failure::{Done, Failure, options};
use crate::machine;
use crate::training::Run;
use crate::vocabulary::Vocabulary;
use elapid::{
    Arch, Event, Finish, Form, Message, Method, Model, Package, Reason, Refusal, Request,
    RequestId, Session, Shape, Size, Special, take_files,
};
use serde::Deserialize;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use wasm_bindgen::prelude::*;

/// Files by their names.
type Files = BTreeMap<String, Arc<Vec<u8>>>;

thread_local! {
    /// Files that were given and wait for the call that opens them.
    static GIVEN: RefCell<Files> = const { RefCell::new(Files::new()) };
}

/// Gives a file to the call that comes next. A name without a folder belongs to a model, one in
/// `adapter/` to its adapter.
#[wasm_bindgen(js_name = giveFile)]
pub fn give_file(name: String, bytes: Vec<u8>) {
    GIVEN.with_borrow_mut(|given| given.insert(name, Arc::new(bytes)));
}

/// Forgets files that were given to a call that never came.
#[wasm_bindgen(js_name = forgetFiles)]
pub fn forget_files() {
    GIVEN.take();
}

/// What was given.
pub fn given() -> Files {
    GIVEN.take()
}

/// Puts files where the engine finds them by their paths.
pub fn put(dir: &Path, files: &Files) -> Done<()> {
    for (name, bytes) in files {
        elapid::write(&dir.join(name), |sink| sink(bytes))?;
    }
    Ok(())
}

/// Takes what the engine wrote at a path; a single file has this name.
fn taken(path: &Path, name: &str) -> Vec<(String, Vec<u8>)> {
    let mut files = take_files(path);
    if let [(only, _)] = &mut files[..]
        && only.is_empty()
    {
        *only = name.into();
    }
    files
}

/// A folder for one call.
pub fn folder() -> PathBuf {
    thread_local!(static COUNT: Cell<u64> = const { Cell::new(0) });
    COUNT.set(COUNT.get() + 1);
    PathBuf::from(format!("call-{}", COUNT.get()))
}

/// A model on a device, with at most one run of training.
#[wasm_bindgen]
pub struct WebModel {
    pub(crate) session: Session,
    pub(crate) run: Option<Run>,
    /// What is trained, once that was chosen.
    pub(crate) method: Option<(Method, Option<String>)>,
    /// What it was opened from; none where its first weights were random.
    pub(crate) source: Option<(String, Files)>,
    device: elapid::Device,
    /// Answers that are being made, and what came of them that nobody has fetched.
    answers: BTreeMap<RequestId, VecDeque<Event>>,
    /// Tokens of prompts that were read: their states are in the prompt cache.
    snapshots: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct CreateOptions {
    arch: Option<Arch>,
    preset: Option<Size>,
    context: Option<usize>,
    vocabulary_size: Option<usize>,
    seed: Option<u64>,
    device: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GenerateOptions {
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    seed: Option<u64>,
    #[serde(default)]
    stop: Vec<String>,
}

/// Longest sequence of a new model.
const CONTEXT_MAX: usize = 1 << 20;

#[wasm_bindgen]
impl WebModel {
    /// Opens the model that was given: one file, or those of a directory.
    pub async fn open(name: String, device: String) -> Done<WebModel> {
        let mut files = given();
        let device = machine::device(&device).await?;
        let split = files.split_off("adapter/");
        let (adapter, rest): (Files, Files) =
            split.into_iter().partition(|it| it.0.starts_with("adapter/"));
        files.extend(rest);
        let source = Some((name.clone(), files.clone()));
        let mut model = open(&name, files)?;
        if !adapter.is_empty() {
            // It stays there: its numbers are read when they are needed.
            let dir = folder();
            put(&dir, &adapter)?;
            let only = adapter.keys().next().filter(|_| adapter.len() == 1);
            let path = match only.filter(|name| name.ends_with(".gguf")) {
                Some(file) => dir.join(file),
                None => dir.join("adapter"),
            };
            model = model.with_adapter(path);
        }
        WebModel::new(Session::new(model, &device)?, device, source)
    }

    /// A new model, with a vocabulary of texts or, without texts, of a tokenizer.
    pub async fn create(
        json: String,
        texts: Vec<String>,
        vocabulary: Option<Vocabulary>,
    ) -> Done<WebModel> {
        let options: CreateOptions = options(&json)?;
        let device = machine::device(options.device.as_deref().unwrap_or("auto")).await?;
        let size = options.preset.unwrap_or(Size::Tiny);
        let arch = options.arch.unwrap_or(Arch::Hybrid);
        let context = options.context.unwrap_or(256);
        if !(1..=CONTEXT_MAX).contains(&context) {
            let hint = format!("it must be from 1 to {CONTEXT_MAX}");
            return Err(Failure::input(format!("a context of {context} tokens"), &hint));
        }
        let n_bytes: usize = texts.iter().map(String::len).sum();
        let n_vocab = (n_bytes / 64).clamp(512, size.n_vocab());
        let n_vocab = options.vocabulary_size.unwrap_or(n_vocab);
        let mut each = texts.iter().map(String::as_str);
        let vocabulary = match vocabulary {
            Some(vocabulary) => elapid::Vocabulary::Files(vocabulary.files()?, None),
            None if n_bytes == 0 => {
                let hint = "give texts like those that it will learn, or a tokenizer";
                return Err(Failure::input("a vocabulary of no texts", hint));
            }
            None => elapid::Vocabulary::New(n_vocab, &mut each),
        };
        let model = Model::scratch(Shape { size, arch, context }, vocabulary)?;
        let mut session = Session::new(model, &device)?;
        session.adapt(&Method::Full, None, options.seed.unwrap_or(0))?;
        let mut made = WebModel::new(session, device, None)?;
        made.method = Some((Method::Full, None));
        Ok(made)
    }

    /// What it is, as JSON.
    pub fn info(&self) -> Done<String> {
        let info = self.session.model().info()?;
        let types: Vec<&str> = info.dtype_bytes.keys().copied().collect();
        let info = json!({
            "name": info.name, "family": info.family, "parameters": info.n_params,
            "layers": info.n_layer, "vocabulary": info.n_vocab, "context": info.n_ctx,
            "bytes": info.dtype_bytes.values().sum::<usize>(), "types": types,
            "device": machine::describe(&self.device),
            "canChat": self.session.model().chat_template()?.is_some(),
            "canFill": self.session.tokenizer().fim().is_some(),
        });
        Ok(info.to_string())
    }

    /// A tokenizer of its own that is the model's.
    pub fn tokenizer(&self) -> Vocabulary {
        Vocabulary::of(self.session.tokenizer().clone())
    }

    /// Begins an answer to a text; its number. Messages are JSON, and asked by `chat`.
    pub async fn generate(&mut self, prompt: String, json: String) -> Done<f64> {
        self.idle()?;
        let request = self.session.request(&prompt)?;
        self.submit(request, &json)
    }

    /// Begins an answer to messages.
    pub async fn chat(&mut self, messages: String, json: String) -> Done<f64> {
        self.idle()?;
        let messages: Vec<Message> = options(&messages)?;
        let request = self.session.chat(&messages)?;
        self.submit(request, &json)
    }

    /// Begins to fill the gap between two texts.
    pub async fn fill(&mut self, prefix: String, suffix: String, json: String) -> Done<f64> {
        self.idle()?;
        let request = self.session.infill(&prefix, &suffix)?;
        self.submit(request, &json)
    }

    /// Reads a prompt; the number of the snapshot.
    pub async fn snapshot(&mut self, prompt: String) -> Done<usize> {
        self.idle()?;
        let request = self.session.request(&prompt)?.max_tokens(0);
        let ids = request.prompt.clone();
        let id = self.submitted(request)?;
        while !self.is_over(id) {
            self.advance().await?;
        }
        self.answers.remove(&id);
        self.snapshots.push(ids);
        Ok(self.snapshots.len() - 1)
    }

    /// Begins an answer that continues a snapshot.
    pub async fn fork(&mut self, snapshot: usize, text: String, json: String) -> Done<f64> {
        self.idle()?;
        let Some(snapshot) = self.snapshots.get(snapshot) else {
            return Err(Failure::input("there is no such snapshot", "make one of this model"));
        };
        let more = self.session.tokenizer().encode(&text, Special::Plain)?;
        let prompt = [&snapshot[..], &more].concat();
        let request = self.session.generator()?.request(prompt);
        self.submit(request, &json)
    }

    /// What came next of an answer: JSON of a token, or of its end; none once it is over.
    #[wasm_bindgen(js_name = nextToken)]
    pub async fn next_token(&mut self, answer: f64) -> Done<Option<String>> {
        let id = RequestId(answer as u64);
        loop {
            let Some(waiting) = self.answers.get_mut(&id) else { return Ok(None) };
            match waiting.pop_front() {
                None => self.advance().await?,
                Some(Event::Prompt { .. }) => {}
                Some(Event::Token(token)) => {
                    let json = json!({ "id": token.id, "text": token.text });
                    return Ok(Some(json.to_string()));
                }
                Some(Event::Done(finish)) => {
                    self.answers.remove(&id);
                    return finished(finish).map(Some);
                }
            }
        }
    }

    /// Ends an answer.
    pub fn cancel(&mut self, answer: f64) {
        let id = RequestId(answer as u64);
        if self.answers.remove(&id).is_some()
            && self.run.is_none()
            && let Ok(generator) = self.session.generator()
        {
            generator.engine.cancel(id);
        }
    }

    /// One vector of length one for a text.
    pub async fn embed(&mut self, text: String) -> Done<Vec<f32>> {
        self.idle()?;
        Ok(self.session.embed(&text).await?)
    }

    /// Writes the model: names and bytes, one after the other.
    pub async fn save(&mut self, format: String, quant: Option<String>) -> Done<js_sys::Array> {
        let files = self.saved(&format, quant.as_deref()).await?;
        let list = js_sys::Array::new();
        for (name, bytes) in files {
            list.push(&name.into());
            list.push(&js_sys::Uint8Array::from(&bytes[..]).into());
        }
        Ok(list)
    }
}

impl WebModel {
    fn new(
        session: Session,
        device: elapid::Device,
        source: Option<(String, Files)>,
    ) -> Done<WebModel> {
        let (run, method) = (None, None);
        let (answers, snapshots) = (BTreeMap::new(), Vec::new());
        Ok(WebModel { session, run, method, source, device, answers, snapshots })
    }

    pub(crate) fn device(&self) -> &elapid::Device {
        &self.device
    }

    /// Fails while the weights are with a run.
    pub(crate) fn idle(&self) -> Done<()> {
        match self.run {
            None => Ok(()),
            Some(_) => {
                let hint = "finish the run, or leave its loop with `break`";
                Err(Failure::input("the model is being trained", hint))
            }
        }
    }

    /// Answers that were begun and will not be continued: the weights change.
    pub(crate) fn drop_answers(&mut self) {
        self.answers.clear();
        self.snapshots.clear();
    }

    fn submit(&mut self, request: Request, json: &str) -> Done<f64> {
        let options: GenerateOptions = options(json)?;
        let mut request = request;
        let sampling = &mut request.sampling;
        let set = |value: Option<f32>, to: &mut f32| *to = value.unwrap_or(*to);
        set(options.temperature, &mut sampling.temperature);
        set(options.top_p, &mut sampling.top_p);
        set(options.min_p, &mut sampling.min_p);
        set(options.repeat_penalty, &mut sampling.repeat_penalty);
        sampling.top_k = options.top_k.filter(|k| *k > 0).or(sampling.top_k);
        sampling.seed = options.seed.unwrap_or(0);
        request.n_max = options.max_tokens.unwrap_or(request.n_max);
        request.stop_texts.extend(options.stop);
        Ok(self.submitted(request)?.0 as f64)
    }

    fn submitted(&mut self, request: Request) -> Done<RequestId> {
        let engine = &mut self.session.generator()?.engine;
        let id = engine.submit(request).map_err(|refusal| match refusal {
            Refusal::Bad(error) => Failure::from(error),
            Refusal::Full => {
                let hint = "finish one of them, or leave its loop with `break`";
                Failure::input("the model is giving other answers", hint)
            }
        })?;
        self.answers.insert(id, VecDeque::new());
        Ok(id)
    }

    fn is_over(&self, id: RequestId) -> bool {
        let waiting = self.answers.get(&id);
        waiting.is_none_or(|it| it.iter().any(|event| matches!(event, Event::Done(_))))
    }

    /// One step of the engine, for all answers.
    async fn advance(&mut self) -> Done<()> {
        let engine = &mut self.session.generator()?.engine;
        if engine.is_idle() {
            // Nothing will come: what waits for an answer that is not there must not wait forever.
            self.answers.clear();
            return Ok(());
        }
        for (id, event) in engine.step().await {
            if let Some(waiting) = self.answers.get_mut(&id) {
                waiting.push_back(event);
            }
        }
        Ok(())
    }

    pub(crate) async fn saved(
        &mut self,
        format: &str,
        quant: Option<&str>,
    ) -> Done<Vec<(String, Vec<u8>)>> {
        self.idle()?;
        let has_adapter = self.method.as_ref().is_some_and(|it| !matches!(it.0, Method::Full));
        let format = match format {
            "" if has_adapter => "adapter",
            "" => "gguf",
            other => other,
        };
        let (form, name) = match format {
            "gguf" => (Some(Form::Gguf), "model.gguf"),
            "package" => (Some(Form::Package), "model.elapid"),
            "safetensors" => (Some(Form::Directory), "model"),
            "adapter" => (None, "adapter"),
            "adapter-gguf" => (None, "adapter.gguf"),
            other => {
                let hint = "use gguf, package, safetensors, adapter or adapter-gguf";
                return Err(Failure::input(format!("there is no format `{other}`"), hint));
            }
        };
        if form.is_none() && !has_adapter {
            let hint = "train one with the method `lora`, `dora` or `bc`, or save a model";
            return Err(Failure::input("there is no adapter to save", hint));
        }
        let dir = folder();
        let done = self.session.save(dir.join(name)).await;
        let files = taken(&dir.join(name), name);
        take_files(&dir);
        done?;
        let is_plain = quant.is_none() && has_adapter == form.is_none();
        match form {
            _ if is_plain => Ok(files),
            Some(form) => self.converted(files, name, (form, quant), has_adapter),
            None => Err(Failure::input("an adapter is not quantized", "leave `quant` out")),
        }
    }

    /// What was saved in another form. An adapter is folded into its base.
    fn converted(
        &self,
        files: Vec<(String, Vec<u8>)>,
        name: &str,
        (form, quant): (Form, Option<&str>),
        has_adapter: bool,
    ) -> Done<Vec<(String, Vec<u8>)>> {
        let mix = quant.map(str::parse).transpose()?;
        let shared = |(name, bytes): (String, Vec<u8>)| (name, Arc::new(bytes));
        let files: Files = files.into_iter().map(shared).collect();
        let dir = folder();
        let model = match (&self.source, has_adapter) {
            (_, false) => open(name, files)?,
            (Some((name, base)), true) => {
                put(&dir.join("adapter"), &files)?;
                let only = files.keys().next().filter(|_| files.len() == 1);
                let path = only.map_or("adapter".into(), |file| format!("adapter/{file}"));
                open(name, base.clone())?.with_adapter(dir.join(path))
            }
            (None, true) => {
                let hint = "save the adapter, and the model before it";
                return Err(Failure::input("the base of the adapter was never saved", hint));
            }
        };
        let (host, path) = (self.device.host_device(), dir.join("out").join(name));
        let done = model.convert(&path, form, mix, &host, &mut |_, _| {});
        let written = taken(&path, name);
        take_files(&dir);
        done?;
        Ok(written)
    }
}

fn open(name: &str, files: Files) -> Done<Model> {
    let only = files.values().next().filter(|_| files.len() == 1).cloned();
    let is_one = |bytes: &Arc<Vec<u8>>| {
        bytes.starts_with(b"GGUF")
            || bytes.starts_with(b"ELAPID")
            || !files.contains_key("config.json")
    };
    if let Some(bytes) = only.filter(is_one) {
        if !bytes.starts_with(b"ELAPID") {
            return Ok(Model::from_gguf(name, bytes)?);
        }
        let package = Package::parse(name, bytes)?;
        package.verify()?;
        return Ok(Model::from_files(name, &|file| Ok(package.get(file)))?);
    }
    if files.is_empty() {
        return Err(Failure::input("there are no files to open", "give a model"));
    }
    if files.contains_key("adapter_config.json") && !files.contains_key("config.json") {
        let hint = "load its base model, with these files as the option `adapter`";
        return Err(Failure::input("this is an adapter, not a model", hint));
    }
    Ok(Model::from_files(name, &|file| Ok(files.get(file).cloned().map(|it| it as _)))?)
}

fn finished(finish: Finish) -> Done<String> {
    let reason = match &finish.reason {
        Reason::End | Reason::Cancelled => "end",
        Reason::StopText(_) => "stop",
        Reason::Length => "length",
        Reason::Failed(error) => {
            let hint = error.hint().into_owned();
            let lost = matches!(**error, elapid::Error::DeviceLost { .. });
            let code = if lost { "device_lost" } else { "input" };
            return Err(Failure { code, message: error.to_string(), hint });
        }
    };
    let json = json!({
        "reason": reason, "text": finish.text, "promptTokens": finish.n_prompt,
        "cachedTokens": finish.n_cached, "tokens": finish.n_tok,
    });
    Ok(json.to_string())
}
