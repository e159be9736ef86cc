//! What a client is told when its request cannot be answered: the error object of its API.
//!
//! | API       | object                                                      |
//! |-----------|-------------------------------------------------------------|
//! | OpenAI    | `{"error": {"message", "type", "param", "code"}}`           |
//! | Anthropic | `{"type": "error", "error": {"type", "message"}}`           |
//! | Ollama    | `{"error": "message"}`                                      |
//!
//! Every answer that is no success has the form of its route.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use elapid::Error;
use serde_json::{Value, json};
use std::fmt::Display;

/// Characters of a message, at most: values come from strangers and may be megabytes long.
const N_CHAR_MAX: usize = 800;

/// Seconds after which a client that was turned away may try again.
const RETRY_AFTER_S: u32 = 1;

#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    /// What is wrong and what to do.
    pub message: String,
    pub param: Option<String>,
    /// One word for programs.
    pub code: Option<&'static str>,
}

/// Whose error object a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Openai,
    Anthropic,
    Ollama,
}

impl Dialect {
    pub fn of(path: &str) -> Dialect {
        match path {
            path if path.starts_with("/api/") => Dialect::Ollama,
            path if path.starts_with("/v1/messages") => Dialect::Anthropic,
            _ => Dialect::Openai,
        }
    }
}

pub type Answered<T> = Result<T, ApiError>;

impl ApiError {
    pub fn new(status: StatusCode, message: impl Display) -> ApiError {
        let mut message = message.to_string();
        if let Some((at, _)) = message.char_indices().nth(N_CHAR_MAX) {
            message.truncate(at);
            message.push_str(" [...]");
        }
        ApiError { status, message, param: None, code: None }
    }

    pub fn bad(message: impl Display) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn field(name: &str, problem: impl Display) -> ApiError {
        let param = Some(name.chars().take(N_CHAR_MAX).collect());
        ApiError { param, ..ApiError::bad(format!("`{name}`: {problem}")) }
    }

    pub fn missing(name: &str) -> ApiError {
        ApiError::field(name, "is missing")
    }

    pub fn internal(message: impl Display) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn unavailable(message: impl Display) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    pub fn full() -> ApiError {
        ApiError::unavailable("too many requests are waiting; try again in a moment")
            .with_code("queue_full")
    }

    pub fn late() -> ApiError {
        let words = "the answer took longer than this server allows (--timeout-s)";
        ApiError::new(StatusCode::REQUEST_TIMEOUT, words).with_code("timeout")
    }

    /// An error of the engine; of this status unless it is no fault of the request.
    pub fn of(error: &Error, status: StatusCode) -> ApiError {
        let words = format!("{error}; {}", error.hint());
        match error {
            Error::OutOfMemory { .. } => ApiError::internal(words).with_code("out_of_memory"),
            Error::DeviceLost { .. } => ApiError::unavailable(words).with_code("device_lost"),
            Error::Panic { .. } => ApiError::internal(words),
            _ => ApiError::new(status, words),
        }
    }

    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// As OpenAI names this kind of error.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            408 => "timeout_error",
            503 => "unavailable_error",
            500..=599 => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub fn json(&self, dialect: Dialect) -> Value {
        let (message, kind) = (&self.message, self.kind());
        match dialect {
            Dialect::Openai => json!({"error": {
                "message": message, "type": kind, "param": self.param, "code": self.code,
            }}),
            Dialect::Anthropic => {
                let kind = match self.status.as_u16() {
                    503 => "overloaded_error",
                    500..=599 => "api_error",
                    _ => kind,
                };
                json!({"type": "error", "error": {"type": kind, "message": message}})
            }
            Dialect::Ollama => json!({"error": message}),
        }
    }

    pub fn response(self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.json(dialect))).into_response();
        let more = match self.status {
            StatusCode::SERVICE_UNAVAILABLE => {
                Some((header::RETRY_AFTER, HeaderValue::from(RETRY_AFTER_S)))
            }
            StatusCode::UNAUTHORIZED => {
                Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")))
            }
            _ => None,
        };
        response.headers_mut().extend(more);
        // Who knows the route may say it in the words of another API.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        ApiError::of(&error, StatusCode::BAD_REQUEST)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response(Dialect::Openai)
    }
}
