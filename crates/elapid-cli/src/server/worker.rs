//! The thread that owns the engine of a model.
//!
//! Commands come in by a channel, pieces of answers go out by a channel of each HTTP request. The
//! thread sleeps while there is nothing to do. Between two steps of the engine it looks for clients
//! that have gone and requests whose time is over: those are cancelled. Here also are the endings
//! that only a server has (`ending.rs`).
//!
//! A failure ends the requests that it happened to. After a lost device, or several panics with no
//! answer in between, the engine is beyond help: every request is told so, and the server ends.
//!
//! Not here: what a request means, what an answer looks like.

use super::answer::{End, Growing, Grown, Piece};
use super::error::{Answered, ApiError};
use crate::talk::answer::unfinished;
use crate::talk::ending::Ending;
use axum::http::StatusCode;
use elapid::{Error, Event, Finish, Generator, Reason, Refusal, Request, RequestId, Stats};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Semaphore, oneshot, watch};

/// Requests in a row that end in a panic before the server ends.
const N_PANICS_MAX: usize = 3;

/// Schemas and grammars of strangers are read by recursion.
const STACK_BYTES: usize = 16 << 20;

/// Work for the thread; nothing ends it.
type Command = Option<Box<dyn FnOnce(&mut Desk) + Send>>;

/// What happened since the start.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    pub n_taken: u64,
    /// Turned away for want of room.
    pub n_full: u64,
    /// Ended because the client had gone.
    pub n_gone: u64,
    /// Ended because the time was over.
    pub n_late: u64,
    /// Ended by a failure, and those of them where memory ran out.
    pub n_failed: u64,
    pub n_out_of_memory: u64,
    pub n_embedded: u64,
    pub n_steps: u64,
    /// Slots in use, summed over steps.
    pub n_busy: u64,
    pub prompt_time: Duration,
    pub answer_time: Duration,
    pub n_tok_max: usize,
}

/// What the engine was like after its last step.
#[derive(Clone, Debug, Default)]
pub struct Board {
    pub stats: Stats,
    pub totals: Totals,
    /// Why nothing is answered any more.
    pub broken: Option<ApiError>,
}

/// The way to the thread.
pub struct Worker {
    commands: Sender<Command>,
    board: watch::Receiver<Board>,
    /// Room for texts that wait for their vectors.
    embedding: Semaphore,
    /// From a request to the end of its answer.
    time_max: Duration,
    /// Every request under way has one.
    busy: Arc<()>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What everybody is told once nothing is answered any more.
pub type Broken = watch::Sender<Option<ApiError>>;

fn gone<T>(_: T) -> ApiError {
    ApiError::unavailable("the engine has ended; the server stops")
}

impl Worker {
    pub fn start(
        generator: Generator,
        time_max: Duration,
        broken: Broken,
    ) -> std::io::Result<Worker> {
        let (commands, inbox) = mpsc::channel();
        let embedding = Semaphore::new(generator.engine.settings().n_waiting_max.max(1));
        let (shown, board) = watch::channel(Board::default());
        let (jobs, totals) = (BTreeMap::new(), Totals::default());
        let ends = broken.clone();
        let desk = Desk { generator, jobs, board: shown, broken, totals, n_panics: 0 };
        let thread = std::thread::Builder::new().name("engine".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || {
            // What panicked has said so on stderr.
            if catch_unwind(AssertUnwindSafe(|| desk.run(&inbox))).is_err() {
                ends.send_replace(Some(ApiError::unavailable("the engine has ended")));
            }
        })?;
        let (busy, thread) = (Arc::new(()), Mutex::new(Some(thread)));
        Ok(Worker { commands, board, embedding, time_max, busy, thread })
    }

    /// Whether a request is under way.
    pub fn is_busy(&self) -> bool {
        Arc::strong_count(&self.busy) > 1
    }

    /// Loads an adapter: its number and name. Requests wait meanwhile.
    pub async fn load_adapter(&self, path: PathBuf, scale: f32) -> Answered<(usize, String)> {
        self.with_generator(move |generator| {
            let number = generator.add_adapter(&path, scale)?;
            Ok((number, generator.adapters[number].name.clone()))
        })
        .await
    }

    /// Unloads one; answers under way keep it.
    pub async fn unload_adapter(&self, number: usize) -> Answered<()> {
        self.with_generator(move |generator| generator.remove_adapter(number)).await
    }

    async fn with_generator<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Generator) -> elapid::Result<T> + Send + 'static,
    ) -> Answered<T> {
        self.ask(move |desk| {
            let done = catch_unwind(AssertUnwindSafe(|| work(&mut desk.generator)));
            let failed = |_| ApiError::internal("the adapter cannot be loaded; see the log");
            Ok(done.map_err(failed)??)
        })
        .await
    }

    /// Hands requests in, each with where its answer ends besides where the model ends it.
    ///
    /// Answers that are dropped end their requests.
    pub async fn submit(&self, requests: Vec<(Request, Ending)>) -> Answered<Growing> {
        let (sender, pieces) = tokio::sync::mpsc::unbounded_channel();
        let (n_answers, deadline) = (requests.len(), Instant::now() + self.time_max);
        for (idx, (request, ending)) in requests.into_iter().enumerate() {
            let job = Job {
                idx,
                pieces: sender.clone(),
                ending,
                deadline,
                finish: unfinished(request.prompt.len()),
                _busy: self.busy.clone(),
                begun: None,
                read: None,
            };
            self.ask(move |desk| desk.submit(request, job)).await?;
        }
        Ok(Growing { pieces, n_answers, n_ended: 0 })
    }

    pub async fn embed(&self, ids: Vec<u32>) -> Answered<Vec<f32>> {
        let _room = self.embedding.try_acquire().map_err(|_| ApiError::full())?;
        self.ask(move |desk| desk.embed(&ids)).await
    }

    /// Has the thread do this, unless the engine is beyond help or nobody waits any more.
    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Desk) -> Answered<T> + Send + 'static,
    ) -> Answered<T> {
        let (reply, answer) = oneshot::channel();
        let command = move |desk: &mut Desk| {
            let broken = desk.board.borrow().broken.clone();
            if !reply.is_closed() {
                let _ = reply.send(broken.map_or_else(|| work(desk), Err));
            }
        };
        self.commands.send(Some(Box::new(command))).map_err(gone)?;
        answer.await.map_err(gone)?
    }

    /// What the engine was like after its last step.
    pub fn board(&self) -> Board {
        self.board.borrow().clone()
    }

    /// Ends the thread and waits for its end; whatever still runs is cut off.
    pub fn stop(&self) {
        // One that is gone already need not be told.
        let _ = self.commands.send(None);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = thread.map(JoinHandle::join);
    }
}

/// A request under way.
struct Job {
    /// Its number among those of its HTTP request.
    idx: usize,
    pieces: UnboundedSender<(usize, Grown)>,
    ending: Ending,
    deadline: Instant,
    /// Its end if it came now.
    finish: Finish,
    _busy: Arc<()>,
    /// When the engine turned to it, and when its prompt was read.
    begun: Option<Instant>,
    read: Option<Instant>,
}

impl Job {
    fn send(&self, grown: Grown) {
        // A client that has gone is found by `sweep`.
        let _ = self.pieces.send((self.idx, grown));
    }

    fn end(&self, finish: Finish, now: Instant) -> End {
        let begun = self.begun.unwrap_or(now);
        let read = self.read.unwrap_or(begun);
        End { finish, prompt_time: read - begun, answer_time: now - read }
    }

    fn finished(&mut self, finish: Finish, now: Instant) -> Answered<(Piece, End)> {
        if let Reason::Failed(error) = &finish.reason {
            return Err(ApiError::of(error, StatusCode::INTERNAL_SERVER_ERROR));
        }
        let (text, stop) = self.ending.finish(&finish.text);
        let reason = stop.unwrap_or(finish.reason);
        let end = self.end(Finish { reason, ..finish }, now);
        Ok((Piece { text, tokens: Vec::new() }, end))
    }
}

struct Desk {
    generator: Generator,
    jobs: BTreeMap<RequestId, Job>,
    board: watch::Sender<Board>,
    broken: Broken,
    totals: Totals,
    /// Requests in a row that ended in a panic.
    n_panics: usize,
}

impl Desk {
    fn run(mut self, inbox: &Receiver<Command>) {
        loop {
            let first = match self.jobs.is_empty() {
                true => Some(inbox.recv().unwrap_or(None)),
                false => None,
            };
            for command in first.into_iter().chain(inbox.try_iter()) {
                match command {
                    Some(command) => command(&mut self),
                    None => return,
                }
            }
            self.sweep();
            if !self.jobs.is_empty() {
                self.step();
            }
            // Nobody waits for figures: who wants them looks.
            self.board.send_if_modified(|board| {
                board.stats = self.generator.engine.stats();
                board.totals = self.totals.clone();
                false
            });
        }
    }

    fn submit(&mut self, request: Request, job: Job) -> Answered<()> {
        match self.generator.engine.submit(request) {
            Ok(id) => {
                self.jobs.insert(id, job);
                self.totals.n_taken += 1;
                Ok(())
            }
            Err(Refusal::Full) => {
                self.totals.n_full += 1;
                Err(ApiError::full())
            }
            Err(Refusal::Bad(error)) => Err(self.refused(&error)),
        }
    }

    fn embed(&mut self, ids: &[u32]) -> Answered<Vec<f32>> {
        self.totals.n_embedded += 1;
        self.generator.engine.embed(ids).map_err(|error| self.refused(&error))
    }

    /// What a client is told when its request was not taken: mostly its own fault.
    fn refused(&mut self, error: &Error) -> ApiError {
        let told = ApiError::of(error, StatusCode::BAD_REQUEST);
        if told.status.is_server_error() {
            self.note_failure(error);
        }
        told
    }

    /// Ends requests whose client has gone or whose time is over.
    fn sweep(&mut self) {
        let now = Instant::now();
        let (engine, totals) = (&mut self.generator.engine, &mut self.totals);
        self.jobs.retain(|id, job| {
            let (is_gone, is_late) = (job.pieces.is_closed(), now >= job.deadline);
            if is_gone {
                totals.n_gone += 1;
            } else if is_late {
                totals.n_late += 1;
                job.send(Err(ApiError::late()));
            }
            if is_gone || is_late {
                engine.cancel(*id);
            }
            !is_gone && !is_late
        });
    }

    fn step(&mut self) {
        let begin = Instant::now();
        self.totals.n_steps += 1;
        self.totals.n_busy += self.generator.engine.stats().running.len() as u64;
        // What belongs to a request the engine catches itself.
        let events = catch_unwind(AssertUnwindSafe(|| self.generator.engine.step()));
        let Ok(events) = events else {
            return self.give_up(ApiError::unavailable("the engine panicked; see the log"));
        };
        for (id, event) in events {
            self.pass_on(id, event, [begin, Instant::now()]);
        }
        if self.generator.engine.is_idle() && !self.jobs.is_empty() {
            self.give_up(ApiError::unavailable("the engine forgot a request"));
        }
    }

    /// Gives an event to the one it is for; the step was from `begin` to `now`.
    fn pass_on(&mut self, id: RequestId, event: Event, [begin, now]: [Instant; 2]) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.begun.get_or_insert(begin);
        match event {
            Event::Prompt { n_cached, scored, .. } => {
                (job.finish.n_cached, job.read) = (n_cached, Some(now));
                if !scored.is_empty() {
                    job.send(Ok((Piece { text: String::new(), tokens: scored }, None)));
                }
            }
            Event::Token(token) => {
                job.finish.n_tok += 1;
                let (text, stop) = job.ending.push(&token.text, now - job.read.unwrap_or(now));
                let end = stop.map(|reason| Finish { reason, ..job.finish.clone() });
                let end = end.map(|finish| job.end(finish, now));
                job.send(Ok((Piece { text, tokens: vec![token] }, end.clone())));
                if let Some(end) = end {
                    self.count(&end);
                    self.jobs.remove(&id);
                    self.generator.engine.cancel(id);
                }
            }
            Event::Done(finish) => {
                let Some(mut job) = self.jobs.remove(&id) else { return };
                let reason = finish.reason.clone();
                let finished = job.finished(finish, now);
                if let Ok((_, end)) = &finished {
                    self.count(end);
                }
                // First, so that whoever hears of a failure finds `/health` true.
                match reason {
                    Reason::Failed(error) => self.note_failure(&error),
                    _ => self.n_panics = 0,
                }
                job.send(finished.map(|(piece, end)| (piece, Some(end))));
            }
        }
    }

    fn count(&mut self, end: &End) {
        let totals = &mut self.totals;
        totals.prompt_time += end.prompt_time;
        totals.answer_time += end.answer_time;
        totals.n_tok_max = totals.n_tok_max.max(end.finish.n_prompt + end.finish.n_tok);
    }

    /// Counts a failure, tells the log, and sees whether there is a point in continuing.
    fn note_failure(&mut self, error: &Error) {
        let error_of_api = ApiError::of(error, StatusCode::INTERNAL_SERVER_ERROR);
        match error {
            Error::OutOfMemory { .. } => self.totals.n_out_of_memory += 1,
            Error::Panic { .. } => self.n_panics += 1,
            _ => {}
        }
        self.totals.n_failed += 1;
        eprintln!("fail    {}", error_of_api.message);
        if matches!(error, Error::DeviceLost { .. }) {
            self.give_up(error_of_api);
        } else if self.n_panics >= N_PANICS_MAX {
            let words =
                format!("{N_PANICS_MAX} requests in a row failed: {}", error_of_api.message);
            self.give_up(ApiError::unavailable(words));
        }
    }

    /// Nothing can be answered any more: everybody is told why.
    fn give_up(&mut self, why: ApiError) {
        for (id, job) in std::mem::take(&mut self.jobs) {
            self.totals.n_failed += 1;
            job.send(Err(why.clone()));
            self.generator.engine.cancel(id);
        }
        self.board.send_modify(|board| board.broken = Some(why.clone()));
        self.broken.send_replace(Some(why));
    }
}
