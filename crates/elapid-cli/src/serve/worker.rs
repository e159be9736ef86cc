//! The one thread that owns the engine.
//!
//! Commands come in by a channel, what happens to a request goes out by a channel of its own. The
//! thread sleeps while there is nothing to do. Between two steps of the engine it looks who has
//! gone away and whose time is over: those requests are cancelled.
//!
//! A panic of the engine ends the requests that were running, in words, and no others; after
//! several of them the server gives up.
//!
//! Not here: what a request means, what an answer looks like.

use super::error::{Answered, ApiError};
use super::feed::{Feed, Note, What};
use elapid::Error;
use elapid::{Engine, Event, Finish, Refusal, Request, RequestId, Stats};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{oneshot, watch};

/// Panics of the engine after which the server ends.
const N_PANICS_MAX: usize = 3;

/// Schemas and grammars of strangers are read by recursion.
const STACK_BYTES: usize = 16 << 20;

/// What a panic is called before clients.
const BROKE: &str = "the engine failed on this request; the server's stderr says where";

enum Command {
    Submit(Box<Submission>),
    Embed { ids: Vec<u32>, reply: oneshot::Sender<Result<Vec<f32>, Error>> },
    Stop,
}

struct Submission {
    request: Request,
    deadline: Instant,
    notes: UnboundedSender<Note>,
    reply: oneshot::Sender<Result<(), Refusal>>,
}

/// A slot of the engine, for people who watch it.
#[derive(Clone, Debug)]
pub struct Slot {
    /// The request in it.
    pub id: RequestId,
    /// Tokens of its prompt, and how many of them are read.
    pub n_prompt: usize,
    /// Prompt tokens that are read.
    pub n_read: usize,
    /// Tokens of its answer.
    pub n_tok: usize,
    /// Tokens that it may have.
    pub n_max: usize,
}

/// What happened since the start.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Requests that were taken.
    pub n_taken: u64,
    /// Turned away for want of room.
    pub n_full: u64,
    /// Ended because the client had gone.
    pub n_gone: u64,
    /// Ended because the time was over.
    pub n_late: u64,
    /// Ended by a failure.
    pub n_failed: u64,
    /// Texts that were turned into vectors.
    pub n_embedded: u64,
    /// Steps of the engine.
    pub n_steps: u64,
    /// Slots in use, summed over steps.
    pub n_busy: u64,
    /// Time between the begin of a prompt and its end, summed.
    pub prompt_time: Duration,
    /// Time between the end of a prompt and the end of its answer, summed.
    pub answer_time: Duration,
    /// Most tokens a sequence ever had.
    pub n_tok_max: usize,
}

/// What the engine was like after its last step.
#[derive(Clone, Debug, Default)]
pub struct Board {
    /// Of the engine.
    pub stats: Stats,
    /// By number.
    pub slots: Vec<Option<Slot>>,
    /// Since the start.
    pub totals: Totals,
}

/// The way to the thread.
pub struct Worker {
    commands: Sender<Command>,
    board: Arc<Mutex<Board>>,
    /// Texts that wait for their vectors.
    n_embedding: AtomicUsize,
    n_embedding_max: usize,
    /// True when the engine is beyond help.
    broken: watch::Receiver<bool>,
}

fn lock(board: &Mutex<Board>) -> MutexGuard<'_, Board> {
    // What is in it is a copy; half of one does no harm.
    board.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gone<T>(_: T) -> ApiError {
    ApiError::internal("the engine has ended; start the server again")
}

impl Worker {
    /// Starts the thread.
    pub fn start(engine: Engine) -> std::io::Result<(Worker, JoinHandle<()>)> {
        let (commands, inbox) = mpsc::channel();
        let (broken_sender, broken) = watch::channel(false);
        let n_embedding_max = engine.settings().n_waiting_max.max(1);
        let slots = vec![None; engine.settings().n_slots];
        let board = Arc::new(Mutex::new(Board { slots, ..Board::default() }));
        let desk = Desk {
            engine,
            jobs: BTreeMap::new(),
            board: board.clone(),
            totals: Totals::default(),
            n_panics: 0,
            broken: broken_sender,
        };
        let thread = std::thread::Builder::new().name("engine".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || desk.run(&inbox))?;
        let n_embedding = AtomicUsize::new(0);
        Ok((Worker { commands, board, n_embedding, n_embedding_max, broken }, thread))
    }

    /// Hands a request in; what happens to it comes by the feed.
    ///
    /// A feed that is dropped ends its request.
    pub async fn submit(&self, request: Request, time_max: Duration) -> Answered<Feed> {
        let (notes, receiver) = tokio::sync::mpsc::unbounded_channel();
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + time_max;
        let feed = Feed::new(receiver, &request);
        let submission = Box::new(Submission { request, deadline, notes, reply });
        self.commands.send(Command::Submit(submission)).map_err(gone)?;
        answer.await.map_err(gone)??;
        Ok(feed)
    }

    /// The vector of a text.
    pub async fn embed(&self, ids: Vec<u32>) -> Answered<Vec<f32>> {
        if self.n_embedding.fetch_add(1, Ordering::SeqCst) >= self.n_embedding_max {
            self.n_embedding.fetch_sub(1, Ordering::SeqCst);
            return Err(ApiError::full());
        }
        let _counted = Counted(&self.n_embedding);
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Embed { ids, reply }).map_err(gone)?;
        Ok(answer.await.map_err(gone)??)
    }

    /// What the engine was like after its last step.
    pub fn board(&self) -> Board {
        lock(&self.board).clone()
    }

    /// Ends the thread; whatever still runs is cut off.
    pub fn stop(&self) {
        // One that is gone already need not be told.
        let _ = self.commands.send(Command::Stop);
    }

    /// Comes back when the engine is beyond help.
    pub async fn broken(&self) {
        let mut broken = self.broken.clone();
        // The sender goes away with the thread, which is the same.
        let _ = broken.wait_for(|broken| *broken).await;
    }
}

/// Counts down when it goes, however that happens.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request under way.
struct Job {
    notes: UnboundedSender<Note>,
    deadline: Instant,
    n_max: usize,
    /// When the engine turned to it, and when its prompt was read.
    begun: Option<Instant>,
    read: Option<Instant>,
}

/// What the thread has before it.
struct Desk {
    engine: Engine,
    jobs: BTreeMap<RequestId, Job>,
    board: Arc<Mutex<Board>>,
    totals: Totals,
    n_panics: usize,
    broken: watch::Sender<bool>,
}

/// What `f` gives; nothing after a panic, whose words are on stderr.
fn caught<T>(f: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(f)).ok()
}

impl Desk {
    fn run(mut self, inbox: &Receiver<Command>) {
        loop {
            let first = match self.jobs.is_empty() {
                true => match inbox.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                },
                false => None,
            };
            for command in first.into_iter().chain(inbox.try_iter()) {
                match command {
                    Command::Stop => return,
                    Command::Submit(submission) => self.submit(*submission),
                    Command::Embed { ids, reply } => self.embed(&ids, reply),
                }
            }
            self.sweep();
            if !self.jobs.is_empty() {
                self.step();
            }
            self.publish();
            if self.n_panics >= N_PANICS_MAX {
                self.broken.send_replace(true);
                return;
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { request, deadline, notes, reply } = submission;
        let n_max = request.n_max;
        let taken = match caught(|| self.engine.submit(request)) {
            Some(taken) => taken,
            None => {
                self.after_panic();
                Err(Refusal::Bad(Error::input(BROKE, "leave out what is unusual about it")))
            }
        };
        match &taken {
            Ok(id) => {
                let job = Job { notes, deadline, n_max, begun: None, read: None };
                self.jobs.insert(*id, job);
                self.totals.n_taken += 1;
            }
            Err(Refusal::Full) => self.totals.n_full += 1,
            Err(Refusal::Bad(_)) => {}
        }
        // Who does not wait for the reply has gone, and is found by `sweep`.
        let _ = reply.send(taken.map(|_| ()));
    }

    fn embed(&mut self, ids: &[u32], reply: oneshot::Sender<Result<Vec<f32>, Error>>) {
        if reply.is_closed() {
            return;
        }
        let vector = caught(|| self.engine.embed(ids)).unwrap_or_else(|| {
            self.after_panic();
            Err(Error::input(BROKE, "leave out what is unusual about it"))
        });
        self.totals.n_embedded += 1;
        let _ = reply.send(vector);
    }

    /// Ends requests whose client has gone or whose time is over.
    fn sweep(&mut self) {
        let now = Instant::now();
        let mut ended = Vec::new();
        for (id, job) in &self.jobs {
            if job.notes.is_closed() {
                self.totals.n_gone += 1;
                ended.push(*id);
            } else if now >= job.deadline {
                self.totals.n_late += 1;
                let _ = job.notes.send(Note { at: now, what: What::Late });
                ended.push(*id);
            }
        }
        for id in ended {
            self.jobs.remove(&id);
            if caught(|| self.engine.cancel(id)).is_none() {
                self.after_panic();
            }
        }
    }

    fn step(&mut self) {
        let begin = Instant::now();
        let n_running = self.board_slots();
        let Some(events) = caught(|| self.engine.step()) else {
            self.after_panic();
            return;
        };
        self.totals.n_steps += 1;
        self.totals.n_busy += n_running as u64;
        let now = Instant::now();
        for (id, event) in events {
            self.pass_on(id, event, [begin, now]);
        }
        if self.engine.is_idle() && !self.jobs.is_empty() {
            self.fail_all("the engine forgot this request");
        }
    }

    fn board_slots(&self) -> usize {
        self.engine.stats().running.len()
    }

    /// Gives an event to the one it is for; the step was from `begin` to `now`.
    fn pass_on(&mut self, id: RequestId, event: Event, [begin, now]: [Instant; 2]) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let send = |job: &Job, at, what| {
            // Whoever has gone is found by `sweep`.
            let _ = job.notes.send(Note { at, what });
        };
        if job.begun.is_none() {
            job.begun = Some(begin);
            send(job, begin, What::Begun);
        }
        if matches!(event, Event::Prompt { .. }) {
            job.read = Some(now);
        }
        if let Event::Done(finish) = &event {
            let job = self.jobs.remove(&id).expect("it was found above");
            self.count(&job, finish, now);
            send(&job, now, What::Event(event));
        } else {
            send(job, now, What::Event(event));
        }
    }

    fn count(&mut self, job: &Job, finish: &Finish, now: Instant) {
        let totals = &mut self.totals;
        if matches!(finish.reason, elapid::Reason::Failed(_)) {
            totals.n_failed += 1;
        }
        let begun = job.begun.unwrap_or(now);
        let read = job.read.unwrap_or(begun);
        totals.prompt_time += read - begun;
        totals.answer_time += now - read;
        totals.n_tok_max = totals.n_tok_max.max(finish.n_prompt + finish.n_tok);
    }

    /// Nothing that ran when the engine panicked can be trusted.
    fn after_panic(&mut self) {
        self.n_panics += 1;
        let ids: Vec<RequestId> = self.jobs.keys().copied().collect();
        self.fail_all(BROKE);
        let cancelled = caught(|| ids.into_iter().for_each(|id| self.engine.cancel(id)));
        if cancelled.is_none() {
            self.n_panics = N_PANICS_MAX;
        }
    }

    fn fail_all(&mut self, words: &str) {
        let at = Instant::now();
        for (_, job) in std::mem::take(&mut self.jobs) {
            self.totals.n_failed += 1;
            let _ = job.notes.send(Note { at, what: What::Broken(words.to_string()) });
        }
    }

    /// Writes down what the engine is like now.
    fn publish(&mut self) {
        let Some(stats) = caught(|| self.engine.stats()) else { return };
        let mut board = lock(&self.board);
        for place in &mut board.slots {
            let is_there = |slot: &Slot| stats.running.iter().any(|running| running.0 == slot.id);
            *place = place.take().filter(is_there);
        }
        for &(id, n_prompt, n_read, n_tok) in &stats.running {
            let n_max = self.jobs.get(&id).map_or(0, |job| job.n_max);
            let slot = Slot { id, n_prompt, n_read, n_tok, n_max };
            let has = |place: &Option<Slot>| place.as_ref().is_some_and(|slot| slot.id == id);
            let at = board.slots.iter().position(has);
            let at = at.or_else(|| board.slots.iter().position(Option::is_none));
            if let Some(at) = at {
                board.slots[at] = Some(slot);
            }
        }
        board.stats = stats;
        board.totals = self.totals.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught() {
        assert_eq!(caught(|| 1), Some(1));
        assert_eq!(caught(|| -> u32 { panic!("on purpose") }), None);
    }
}
