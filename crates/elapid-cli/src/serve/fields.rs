//! The body of a request: a JSON object whose fields are asked for by name and checked one by one,
//! so that an error names the field, what it holds and what it should hold.
//!
//! `null` is the same as absent: clients write both.

use super::App;
use super::error::{Answered, ApiError};
use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::StreamExt;

/// Time in which a body must be there.
const BODY_TIME: Duration = Duration::from_secs(30);

/// The same for a body that nobody will look at.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Bytes past the limit that are read and thrown away, so that a client hears why before its
/// connection is closed under it.
const N_DRAINED_MAX: usize = 16 << 20;

/// A body that is JSON of any kind.
pub struct Raw(pub Value);

/// A body that is a JSON object.
pub struct Fields(Map<String, Value>);

impl FromRequest<Arc<App>> for Raw {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Arc<App>) -> Answered<Raw> {
        check_type(request.headers())?;
        // `gather` has put it into memory.
        let bytes = axum::body::to_bytes(request.into_body(), usize::MAX).await;
        let bytes = bytes.map_err(|_| broke_off())?;
        serde_json::from_slice(&bytes)
            .map(Raw)
            .map_err(|error| ApiError::bad(format!("the body is not JSON: {error}")))
    }
}

impl FromRequest<Arc<App>> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Answered<Fields> {
        match Raw::from_request(request, app).await?.0 {
            Value::Object(map) => Ok(Fields(map)),
            other => Err(ApiError::bad(format!("the body is {}, not an object", kind(&other)))),
        }
    }
}

fn check_type(headers: &HeaderMap) -> Answered<()> {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = text.unwrap_or("").split(';').next().unwrap_or("").trim();
    let essence = essence.to_ascii_lowercase();
    if essence == "application/json" || essence.ends_with("+json") {
        return Ok(());
    }
    let got = if essence.is_empty() { "no Content-Type".into() } else { format!("`{essence}`") };
    let words = format!("the body comes with {got}; send `Content-Type: application/json`");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, words))
}

fn broke_off() -> ApiError {
    ApiError::bad("the body broke off")
}

/// The request with its whole body in memory, if it is short enough and comes in time.
///
/// Every body is read, also of requests that will be refused: a client that is still sending may
/// find its connection closed before it has seen why.
pub async fn gather(request: Request, n_max: usize) -> Answered<Request> {
    let waits = request.headers().contains_key(header::EXPECT);
    let (parts, body) = request.into_parts();
    // Who asks before sending has sent nothing yet.
    if waits && body.size_hint().lower() > n_max as u64 {
        return Err(too_large(n_max));
    }
    match tokio::time::timeout(BODY_TIME, read(body, n_max)).await {
        Ok(bytes) => Ok(Request::from_parts(parts, Body::from(bytes?))),
        Err(_) => {
            let words = format!("the body was not there after {} s", BODY_TIME.as_secs());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, words))
        }
    }
}

/// Reads the body of a request that is refused, as far as it comes soon.
pub async fn discard(request: Request) {
    if !request.headers().contains_key(header::EXPECT) {
        let _ = tokio::time::timeout(DISCARD_TIME, read(request.into_body(), 0)).await;
    }
}

async fn read(body: Body, n_max: usize) -> Answered<Vec<u8>> {
    let (mut stream, mut bytes, mut n_read) = (body.into_data_stream(), Vec::new(), 0);
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| broke_off())?;
        n_read += piece.len();
        match n_read {
            n if n <= n_max => bytes.extend_from_slice(&piece),
            n if n > n_max.saturating_add(N_DRAINED_MAX) => break,
            _ => {}
        }
    }
    if n_read > n_max { Err(too_large(n_max)) } else { Ok(bytes) }
}

fn too_large(n_max: usize) -> ApiError {
    let words = format!("the body is larger than {n_max} bytes (--max-body-mib)");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, words).with_code("body_too_large")
}

/// What a value is, in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl Fields {
    pub fn new(map: Map<String, Value>) -> Fields {
        Fields(map)
    }

    /// The value of a field; `null` is none.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A field of this kind.
    fn typed<'a, T>(
        &'a self,
        name: &str,
        want: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Answered<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let found = read(value);
        let wrong = || ApiError::field(name, format!("is {}, not {want}", kind(value)));
        found.map(Some).ok_or_else(wrong)
    }

    pub fn text(&self, name: &str) -> Answered<Option<&str>> {
        self.typed(name, "a text", Value::as_str)
    }

    pub fn flag(&self, name: &str) -> Answered<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub fn list(&self, name: &str) -> Answered<Option<&Vec<Value>>> {
        self.typed(name, "a list", Value::as_array)
    }

    pub fn object(&self, name: &str) -> Answered<Option<&Map<String, Value>>> {
        self.typed(name, "an object", Value::as_object)
    }

    /// A number within a range.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Answered<Option<f64>> {
        let Some(number) = self.typed(name, "a number", Value::as_f64)? else { return Ok(None) };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (low, high) = (range.start(), range.end());
        Err(ApiError::field(name, format!("is {number}; give a number from {low} to {high}")))
    }

    /// A whole number within a range; `16.0` is one too.
    pub fn whole(&self, name: &str, range: RangeInclusive<i64>) -> Answered<Option<i64>> {
        let whole = |value: &Value| {
            let float = value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15);
            value.as_i64().or(float.map(|x| x as i64))
        };
        let Some(number) = self.typed(name, "a whole number", whole)? else { return Ok(None) };
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (low, high) = (range.start(), range.end());
        let words = format!("is {number}; give a whole number from {low} to {high}");
        Err(ApiError::field(name, words))
    }

    /// A text or a list of at most `n_max` texts.
    pub fn texts(&self, name: &str, n_max: usize) -> Answered<Vec<String>> {
        let list = match self.get(name) {
            None => return Ok(Vec::new()),
            Some(Value::String(text)) => return Ok(vec![text.clone()]),
            Some(Value::Array(list)) => list,
            Some(other) => {
                let words = format!("is {}, not a text or a list of texts", kind(other));
                return Err(ApiError::field(name, words));
            }
        };
        if list.len() > n_max {
            let words = format!("has {} texts, at most {n_max} are taken", list.len());
            return Err(ApiError::field(name, words));
        }
        let text = |value: &Value| {
            let wrong = || ApiError::field(name, format!("holds {}, not a text", kind(value)));
            value.as_str().map(str::to_string).ok_or_else(wrong)
        };
        list.iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields(value.as_object().unwrap().clone())
    }

    #[test]
    fn a_wrong_field_is_named_with_what_it_holds() {
        let fields = fields(json!({"a": "x", "b": 3, "c": 1.5, "d": null, "e": ["p", 1]}));
        let words = |error: ApiError| (error.param.unwrap(), error.message);
        let (param, message) = words(fields.number("a", 0.0..=1.0).unwrap_err());
        assert_eq!((param.as_str(), message.as_str()), ("a", "`a`: is a text, not a number"));
        let (_, message) = words(fields.number("b", 0.0..=1.0).unwrap_err());
        assert_eq!(message, "`b`: is 3; give a number from 0 to 1");
        assert!(fields.whole("c", 0..=9).is_err());
        assert!(matches!(fields.text("d"), Ok(None)));
        assert!(fields.texts("e", 4).unwrap_err().message.contains("holds a number"));
        assert!(fields.texts("e", 1).unwrap_err().message.contains("2 texts, at most 1"));
    }

    #[test]
    fn a_whole_number_may_be_written_with_a_point() {
        let fields = fields(json!({"a": 16.0, "b": 1e300}));
        assert_eq!(fields.whole("a", 0..=100).unwrap(), Some(16));
        assert!(fields.whole("b", 0..=100).is_err());
    }
}
