//! A line on stderr for each request (`serve --log`): what was asked, the status, how long it took
//! to the end of the answer. No text of anybody's is in it.
//!
//!     request POST /v1/chat/completions 200 1413 ms

use axum::body::{Body, HttpBody};
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use std::time::Instant;
use tokio_stream::StreamExt;

/// Characters of a path, at most.
const N_CHAR_MAX: usize = 80;

/// A request under way; its line is written when this is dropped.
pub struct Line {
    asked: String,
    /// None where the client went away before there was one.
    status: Option<StatusCode>,
    started: Instant,
}

impl Line {
    pub fn new(method: &Method, uri: &Uri) -> Line {
        let path: String = uri.path().chars().take(N_CHAR_MAX).collect();
        Line { asked: format!("{method} {path}"), status: None, started: Instant::now() }
    }

    /// The response, whose end ends this too.
    pub fn follow(mut self, response: Response) -> Response {
        self.status = Some(response.status());
        if response.body().size_hint().exact().is_some() {
            return response;
        }
        response.map(|body| {
            Body::from_stream(body.into_data_stream().map(move |piece| {
                // Held by the stream, and dropped with it.
                let _ = &self;
                piece
            }))
        })
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let status = self.status.map_or("gone".into(), |status| status.as_u16().to_string());
        eprintln!("request {} {status} {} ms", self.asked, self.started.elapsed().as_millis());
    }
}
