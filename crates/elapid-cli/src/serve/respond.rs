//! From answers that grow to an HTTP response: one JSON object, or a stream of them.
//!
//! A stream is `text/event-stream`: `data: {json}` and an empty line for each piece; a comment
//! while nothing happens, so that nobody in between thinks the connection dead. An error after the
//! first byte can only be said in the stream.
//!
//! Whoever stops reading drops the feeds, which ends their requests.

use super::error::{Answered, ApiError};
use super::feed::{Answer, End, Feed, Piece};
use super::params::Mode;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

/// Silence after which a comment is sent.
const SILENCE: Duration = Duration::from_secs(5);

/// What answers look like on a route.
pub trait Shape: Send + Sync + 'static {
    /// All answers as one object.
    fn whole(&self, answers: &[Answer]) -> Value;
    /// What goes before the first piece of an answer.
    fn first(&self, _idx: usize) -> Option<Value> {
        None
    }
    /// A piece of an answer.
    fn piece(&self, idx: usize, piece: &Piece) -> Value;
    /// The end of an answer.
    fn last(&self, idx: usize, end: &End) -> Value;
    /// What goes after all answers.
    fn after(&self, _ends: &[End]) -> Option<Value> {
        None
    }
    /// The line that says there is no more, where there is one.
    fn done(&self) -> Option<&'static str>;
    /// Whether tokens are reported, and not their text alone.
    fn shows_tokens(&self) -> bool;
}

/// The response made of these answers.
pub async fn respond(mode: Mode, feeds: Vec<Feed>, shape: impl Shape) -> Answered<Response> {
    if mode == Mode::Stream {
        return Ok(stream(feeds, shape));
    }
    let mut answers = Vec::with_capacity(feeds.len());
    for feed in feeds {
        answers.push(feed.whole().await?);
    }
    Ok(Json(shape.whole(&answers)).into_response())
}

fn stream(feeds: Vec<Feed>, shape: impl Shape) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<Bytes, Infallible>>(32);
    tokio::spawn(drive(feeds, Arc::new(shape), sender));
    let mut response = Body::from_stream(ReceiverStream::new(receiver)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Sends all pieces of all feeds, each in its order.
async fn drive(
    feeds: Vec<Feed>,
    shape: Arc<impl Shape>,
    sender: Sender<Result<Bytes, Infallible>>,
) {
    let mut tasks = JoinSet::new();
    for (idx, feed) in feeds.into_iter().enumerate() {
        let (shape, sender) = (shape.clone(), sender.clone());
        tasks.spawn(async move { (idx, one(idx, feed, &*shape, &sender).await) });
    }
    let mut ends = Vec::new();
    while let Some(done) = tasks.join_next().await {
        match done {
            Ok((idx, Ok(Some(end)))) => ends.push((idx, end)),
            // Nobody listens any more: the other feeds are dropped with their tasks.
            Ok((_, Ok(None))) => return,
            Ok((_, Err(error))) => {
                let _ = sender.send(Ok(event(&error.json()))).await;
                return;
            }
            Err(_) => {
                let error = ApiError::internal("the answer broke off");
                let _ = sender.send(Ok(event(&error.json()))).await;
                return;
            }
        }
    }
    ends.sort_by_key(|end| end.0);
    let ends: Vec<End> = ends.into_iter().map(|end| end.1).collect();
    if let Some(value) = shape.after(&ends) {
        let _ = sender.send(Ok(event(&value))).await;
    }
    if let Some(done) = shape.done() {
        let _ = sender.send(Ok(Bytes::from_static(done.as_bytes()))).await;
    }
}

/// Sends the pieces of one feed; no end where nobody listens any more.
async fn one(
    idx: usize,
    mut feed: Feed,
    shape: &impl Shape,
    sender: &Sender<Result<Bytes, Infallible>>,
) -> Answered<Option<End>> {
    if let Some(first) = shape.first(idx) {
        let _ = sender.send(Ok(event(&first))).await;
    }
    // Text that is not certain yet comes with a later token.
    let mut pending = Piece::default();
    loop {
        let next = tokio::select! {
            _ = sender.closed() => return Ok(None),
            next = feed.next() => next?,
            _ = tokio::time::sleep(SILENCE) => {
                let _ = sender.send(Ok(Bytes::from_static(b": still here\n\n"))).await;
                continue;
            }
        };
        let Some(piece) = next else { break };
        pending.text.push_str(&piece.text);
        pending.tokens.extend(piece.tokens);
        let is_worth =
            !pending.text.is_empty() || shape.shows_tokens() && !pending.tokens.is_empty();
        if is_worth {
            let piece = std::mem::take(&mut pending);
            let _ = sender.send(Ok(event(&shape.piece(idx, &piece)))).await;
        }
    }
    let end = feed.end().expect("a feed that gives no more has ended");
    let _ = sender.send(Ok(event(&shape.last(idx, end)))).await;
    Ok(Some(end.clone()))
}

fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}
