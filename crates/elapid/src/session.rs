//! The short way for programs: a model that learns, writes, chats, embeds and measures.
//!
//! A session is a few calls of the modules below it. `Generator` takes over where several requests
//! run at once, `Training` where a program wants its own loop.

#[cfg(feature = "fs")]
mod paths;

use crate::data::corpus::Corpus;
use crate::data::fim_training::FimTraining;
use crate::data::pack::{LoadSettings, Loader, Order};
use crate::data::project::ProjectTraining;
use crate::data::{Document, Encoded, Ends, encode};
use crate::error::{Error, Result};
use crate::eval::{
    DocScore, EvalSettings, FimReport, FimSettings, Subject, fim_exact_match, measure,
};
use crate::generate::engine::{Event, Reason, Refusal, Request, RequestId, Token};
use crate::generate::generator::{Generator, GeneratorSettings};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::preset::{Arch, Size};
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tensor::device::Device;
use crate::tensor::gpu::later::{block_on, wait};
use crate::text::chat::Message;
use crate::text::tokenizer::{Special, Tokenizer};
use crate::train::lens::Lens;
use crate::train::method::{self, Coverage, Method};
use crate::train::optim::{Optimizer, OptimizerKind};
use crate::train::scratch::{self, Shape};
use crate::train::state::Saved;
use crate::train::teacher::Teacher;
use crate::train::{self, Outcome, Settings, Trainer, Training};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;

/// A model on a device: it learns, writes, chats, embeds and measures.
///
/// Weights are loaded when they are first needed: as they are stored to generate, as f32 to train.
pub struct Session {
    model: Arc<Checkpoint>,
    device: Device,
    tokenizer: Arc<Tokenizer>,
    /// What is trained, once that was chosen.
    method: Option<Method>,
    /// Weights to train and to measure, once something was adapted, trained or measured.
    learner: Option<Learner>,
    /// Ready to write, until the weights change.
    generator: Option<Generator>,
}

/// What training changes, and what the optimizer remembers of it.
struct Learner {
    model: Model,
    weights: Weights,
    lens: Option<Lens>,
    optimizer: Option<(OptimizerKind, Optimizer)>,
}

/// How documents become batches.
#[derive(Clone, Debug, PartialEq)]
pub struct Batches {
    /// Tokens of a row.
    pub context: usize,
    /// Rows in a batch.
    pub n_rows: usize,
    /// Share of documents that are turned for fill-in-the-middle.
    pub fim: f64,
    /// Of these, the share with the suffix first.
    pub spm: f64,
    /// Share of the text that is shown after other files of its project, with their paths.
    pub project: f64,
    /// The project of all documents; none where the first folder of a name is its project.
    pub project_name: Option<String>,
    /// Of the order of rows.
    pub seed: u64,
}

impl Default for Batches {
    fn default() -> Batches {
        let (context, n_rows, seed) = (128, 8, 0);
        let (fim, spm, project, project_name) = (0.0, 0.5, 0.0, None);
        Batches { context, n_rows, fim, spm, project, project_name, seed }
    }
}

/// A prompt that was read: what follows it starts from its cached state.
#[derive(Clone, Debug)]
pub struct Snapshot {
    ids: Vec<u32>,
}

impl Session {
    /// A session with an open model.
    pub fn new(model: Checkpoint, device: &Device) -> Result<Session> {
        let tokenizer = Arc::new(scratch::tokenizer_of(&model)?);
        Ok(Session {
            model: Arc::new(model),
            device: device.clone(),
            tokenizer,
            method: None,
            learner: None,
            generator: None,
        })
    }

    /// A new model with random weights and a vocabulary made from `text`.
    pub fn scratch(size: Size, arch: Arch, text: &str, device: &Device) -> Result<Session> {
        let context = Batches::default().context;
        let n_vocab = (text.len() / 64).clamp(512, size.n_vocab());
        let texts = scratch::vocabulary(n_vocab, context, &mut [text].into_iter())?;
        Session::new(scratch::checkpoint(Shape { size, arch, context }, texts, None)?, device)
    }

    /// The model as it was opened or made.
    pub fn model(&self) -> &Checkpoint {
        &self.model
    }

    /// Text to ids and back.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Chooses what is trained: everything, LoRA or DoRA adapters, B and C alone, embeddings.
    /// `quant` stores frozen matrices in blocks of few bits (QLoRA): `nf4`, `q4_0`, `q8_0`, `q4_k`.
    /// Where the model was opened with an adapter, LoRA continues that one.
    pub fn adapt(&mut self, method: &Method, quant: Option<&str>, seed: u64) -> Result<Coverage> {
        self.learner(seed)?;
        let Learner { model, mut weights, .. } = self.learner.take().expect("it was just made");
        if let Some(quant) = quant {
            method::quantize(&mut weights, quant)?;
        }
        let coverage = method::apply(method, &model, &mut weights, seed)?;
        self.generator = None;
        self.method = Some(method.clone());
        self.learner = Some(Learner { model, weights, lens: None, optimizer: None });
        Ok(coverage)
    }

    /// Makes the embedding of a new model from that of `donor`, which has the same vocabulary.
    pub fn borrow_embedding(&mut self, donor: &Checkpoint, seed: u64) -> Result<()> {
        let donated = donor.weights(&self.device)?;
        let name = &donor.model().config().embed_name;
        let id = donated.find(name).expect("a model has an embedding");
        let learner = self.learner(seed)?;
        let lens = Lens::attach(&learner.model, &mut learner.weights, donated.tensor(id), seed)?;
        learner.lens = Some(lens);
        Ok(())
    }

    fn load(&self, seed: u64) -> Result<Weights> {
        match self.model.is_stored() {
            false => Ok(Weights::init(&self.device, self.model.model().specs(), seed)),
            true => stored_weights(&self.model, &self.device),
        }
    }

    fn learner(&mut self, seed: u64) -> Result<&mut Learner> {
        if self.learner.is_none() {
            let model = Model::new(self.model.model().config().clone());
            let weights = self.load(seed)?;
            self.learner = Some(Learner { model, weights, lens: None, optimizer: None });
        }
        Ok(self.learner.as_mut().expect("it was just made"))
    }

    /// Starts training on documents. The weights move into the [`Training`] until
    /// [`Session::end`] takes them back.
    pub fn begin(
        &mut self,
        documents: &[Document],
        batches: &Batches,
        settings: &Settings,
    ) -> Result<Training> {
        let items: Vec<_> = documents.iter().map(|it| (it.n_bytes(), Some(1.0))).collect();
        let document = |idx: usize| Ok(documents[idx].clone());
        let corpus = Corpus::hold(&items, &document, &self.tokenizer)?;
        self.begin_on(Arc::new(corpus), batches, settings)
    }

    /// The same on a corpus that this model's tokenizer has encoded.
    pub fn begin_on(
        &mut self,
        corpus: Arc<Corpus>,
        batches: &Batches,
        settings: &Settings,
    ) -> Result<Training> {
        train::check(settings)?;
        if self.method.is_none() {
            self.adapt(&Method::Full, None, settings.seed)?;
        }
        let fim = self.fim(batches)?;
        let project = (batches.project != 0.0).then(|| {
            let name = batches.project_name.clone();
            ProjectTraining::new(batches.project, name, self.tokenizer.fim())
        });
        let ends = Ends::of(&self.tokenizer);
        let load = LoadSettings {
            context: batches.context,
            n_rows: batches.n_rows.max(1),
            seed: batches.seed,
            fim,
            project: project.transpose()?,
            ends,
            shuffle: Order::Shuffled,
        };
        let loader = Loader::new(corpus, load, self.tokenizer.clone())?;
        self.generator = None;
        let learner = self.learner.take().expect("it was just made");
        let Learner { model, weights, lens, optimizer } = learner;
        let optimizer = match optimizer {
            Some((kind, optimizer)) if kind == settings.optimizer => optimizer,
            _ => Optimizer::with_experts_over(
                &weights,
                settings.optimizer,
                settings.expert_bytes_max,
            ),
        };
        let options = ForwardOptions::default();
        let trainer = Trainer { model, weights, optimizer, options, lens, teacher: None };
        Training::new(trainer, loader, settings.clone())
    }

    fn fim(&self, batches: &Batches) -> Result<Option<FimTraining>> {
        if batches.fim == 0.0 {
            return Ok(None);
        }
        let tokens = self.tokenizer.fim().ok_or_else(|| {
            let problem = "the vocabulary has no fill-in-the-middle tokens";
            Error::input(problem, "train without fill-in-the-middle, or use a model for code")
        })?;
        Ok(Some(FimTraining { rate: batches.fim, spm: batches.spm, tokens }))
    }

    /// Takes what a checkpoint trained, after `adapt` with the same method: all of it with a
    /// `share` of 1, with less a mean of that and the weights as they are.
    pub fn restore(&mut self, saved: &Saved, share: f32) -> Result<()> {
        self.generator = None;
        let learner = self.learner(0)?;
        saved.write_weights(&mut learner.weights, share)?;
        if let Some(lens) = &learner.lens {
            lens.forward(&mut learner.weights);
        }
        Ok(())
    }

    /// Takes the weights of a training back.
    pub fn end(&mut self, training: Training) {
        let Trainer { model, weights, optimizer, lens, .. } = training.trainer;
        let optimizer = Some((training.settings.optimizer, optimizer));
        self.learner = Some(Learner { model, weights, lens, optimizer });
    }

    /// Learns from a text; `on_step` hears of (step, loss) and may break.
    ///
    /// A step that diverges ends it with an error; the model is as after the step before.
    pub fn train(
        &mut self,
        text: &str,
        batches: &Batches,
        settings: &Settings,
        mut on_step: impl FnMut(u64, f32) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut training = self.begin(&[Document::whole("text", text)], batches, settings)?;
        let mut done = Ok(());
        while done.is_ok() && !training.is_done() {
            let device = self.device.clone();
            match device.run(|| wait(training.step_later())) {
                Err(error) => done = Err(error),
                Ok(Outcome::Diverged(why)) => {
                    done = Err(Error::input(why, "use a smaller learning rate, or no `spike`"));
                }
                Ok(Outcome::Made { report, .. }) => {
                    if on_step(training.progress().step, report.loss).is_break() {
                        break;
                    }
                }
            }
        }
        self.end(training);
        done
    }

    /// What makes the model answer: engine, chat template, adapters.
    pub fn generator(&mut self) -> Result<&mut Generator> {
        if self.generator.is_none() {
            let settings = GeneratorSettings::default();
            let model = self.model.clone();
            self.generator = Some(match &self.learner {
                Some(learner) => {
                    Generator::with_weights(model, learner.weights.share(), &settings)?
                }
                None if !self.model.is_stored() => {
                    Generator::with_weights(model, self.load(0)?, &settings)?
                }
                None => Generator::new(model, &self.device, &settings)?,
            });
        }
        Ok(self.generator.as_mut().expect("it was just made"))
    }

    /// A request that continues `prompt`, with the sampling that the model's files suggest.
    pub fn request(&mut self, prompt: &str) -> Result<Request> {
        let generator = self.generator()?;
        Ok(generator.request(generator.prompt(prompt, Special::Plain)?))
    }

    /// The tokens of an answer as they come.
    pub fn tokens(&mut self, request: Request) -> Result<Tokens<'_>> {
        self.generator()?.tokens(request)
    }

    /// What follows `prompt`, as a whole.
    pub fn generate(&mut self, prompt: &str) -> Result<String> {
        let request = self.request(prompt)?;
        self.tokens(request)?.text()
    }

    /// What follows `prompt`, piece by piece; `on_text` may break.
    pub fn stream(
        &mut self,
        prompt: &str,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<()> {
        let request = self.request(prompt)?;
        for token in self.tokens(request)? {
            if on_text(&token?.text).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// A request that answers these messages by the model's chat template.
    pub fn chat(&mut self, messages: &[Message]) -> Result<Request> {
        let generator = self.generator()?;
        let prompt = generator.chat()?.prompt(messages, generator.engine.tokenizer())?;
        Ok(generator.request(prompt))
    }

    /// A request that fills the gap between two texts, with a model that has tokens for it.
    pub fn infill(&mut self, prefix: &str, suffix: &str) -> Result<Request> {
        let generator = self.generator()?;
        let (prompt, stop_tokens) = generator.infill(prefix, suffix)?;
        Ok(Request { stop_tokens, ..generator.request(prompt) })
    }

    /// One vector of length one for a text; awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>> {
        wait(self.embed_later(text))
    }

    pub(crate) async fn embed_later(&mut self, text: &str) -> Result<Vec<f32>> {
        let generator = self.generator()?;
        let prompt = generator.prompt(text, Special::Plain)?;
        generator.engine.embed_later(&prompt).await
    }

    /// Reads a prompt once and keeps its state in the prompt cache.
    pub fn snapshot(&mut self, prompt: &str) -> Result<Snapshot> {
        let request = self.request(prompt)?.max_tokens(0);
        let ids = request.prompt.clone();
        self.tokens(request)?.text()?;
        Ok(Snapshot { ids })
    }

    /// A request that continues a snapshot with `text`; a snapshot may be forked any number of
    /// times, and the answer is that of reading everything anew.
    pub fn fork(&mut self, snapshot: &Snapshot, text: &str) -> Result<Request> {
        let more = self.tokenizer.encode(text, Special::Plain)?;
        Ok(self.generator()?.request([&snapshot.ids[..], &more].concat()))
    }

    /// The tokens of a document, as they are measured.
    fn encode(&self, document: &Document) -> Result<Encoded> {
        // Nothing follows the end of a text: it is not measured.
        let ends = Ends { end: None, ..Ends::of(&self.tokenizer) };
        encode(document, &self.tokenizer, ends)
    }

    /// How well the model predicts each of these documents; see `Summary` and `compare`.
    /// `on_progress` hears of tokens read and to be read. Awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn score(
        &mut self,
        documents: &[Document],
        settings: &EvalSettings,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<DocScore>> {
        wait(self.score_later(documents, settings, on_progress))
    }

    pub(crate) async fn score_later(
        &mut self,
        documents: &[Document],
        settings: &EvalSettings,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<DocScore>> {
        let encoded = documents.iter().map(|document| self.encode(document));
        let encoded = encoded.collect::<Result<Vec<_>>>()?;
        let learner = self.learner(0)?;
        measure(&learner.model, &learner.weights, &encoded, settings, on_progress).await
    }

    /// How often the model fills a gap with exactly the text that was cut out.
    pub fn score_infill(
        &mut self,
        documents: &[Document],
        settings: &FimSettings,
        on_progress: &mut dyn FnMut(usize, usize),
    ) -> Result<FimReport> {
        let tokenizer = self.tokenizer.clone();
        let Learner { model, weights, .. } = self.learner(0)?;
        let subject = Subject { model, weights, tokenizer: &tokenizer };
        fim_exact_match(subject, documents, settings, on_progress)
    }
}

/// The weights of a model, with the adapter that it was opened by.
fn stored_weights(model: &Checkpoint, device: &Device) -> Result<Weights> {
    let mut weights = model.weights(device)?;
    if let Some(lora) = model.own_adapter(device)? {
        lora.attach(&mut weights)?;
    }
    Ok(weights)
}

/// The tokens of one answer, as they come.
///
/// Text that may still become part of a stop text is held back; the last item may be text alone.
pub struct Tokens<'a> {
    generator: &'a mut Generator,
    id: RequestId,
    waiting: VecDeque<Token>,
    is_over: bool,
}

impl Generator {
    /// The tokens of an answer as they come. Dropping them ends the answer.
    pub fn tokens(&mut self, request: Request) -> Result<Tokens<'_>> {
        let id = self.engine.submit(request).map_err(|refusal| match refusal {
            Refusal::Bad(error) => error,
            Refusal::Full => Error::input("the engine takes no more requests", "try again later"),
        })?;
        Ok(Tokens { generator: self, id, waiting: VecDeque::new(), is_over: false })
    }
}

impl Tokens<'_> {
    /// The rest of the answer as one text.
    pub fn text(self) -> Result<String> {
        self.map(|token| Ok(token?.text)).collect()
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        loop {
            if let Some(token) = self.waiting.pop_front() {
                return Some(Ok(token));
            }
            if self.is_over || self.generator.engine.is_idle() {
                return None;
            }
            let Some(events) = block_on(self.generator.engine.step_later()) else {
                self.is_over = true;
                let hint = "step the engine and await that, or use the CPU";
                return Some(Err(Error::input("a browser cannot wait for its GPU", hint)));
            };
            for (id, event) in events {
                match event {
                    _ if id != self.id => {}
                    Event::Prompt { .. } => {}
                    Event::Token(token) => self.waiting.push_back(token),
                    Event::Done(finish) => {
                        self.is_over = true;
                        if let Reason::Failed(error) = finish.reason {
                            let error = Arc::try_unwrap(error);
                            return Some(Err(error.unwrap_or_else(|error| {
                                Error::input(error.to_string(), &error.hint())
                            })));
                        }
                        if let (false, Some(last)) =
                            (finish.text.is_empty(), self.waiting.back_mut())
                        {
                            last.text.push_str(&finish.text);
                        }
                    }
                }
            }
        }
    }
}

impl Drop for Tokens<'_> {
    fn drop(&mut self) {
        self.generator.engine.cancel(self.id);
    }
}

impl Training {
    /// Learns the distribution of `teacher` beside the targets from now on, by the temperature and
    /// the share of the settings. Its vocabulary must be the same; its weights are loaded as they
    /// are stored, and do not change. Returns a hash of them.
    pub fn set_teacher(&mut self, teacher: &Checkpoint) -> Result<String> {
        let device = self.trainer.weights.device().clone();
        let model = Model::new(teacher.model().config().clone());
        let mut weights = stored_weights(teacher, &device)?;
        weights.train(|_, _| false);
        let hash = device.run(|| weights.frozen_hash());
        let tokenizer = scratch::tokenizer_of(teacher)?;
        let teacher = Teacher::new((model, weights), &tokenizer, &self.loader, &self.settings)?;
        self.trainer.teacher = Some(teacher);
        Ok(hash)
    }
}
