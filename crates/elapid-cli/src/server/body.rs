//! The body of a request: JSON that is read into structs, so that an error names the field and says
//! what it should hold.
//!
//! `null` is the same as absent: clients write both. What no struct of a route reads is refused by
//! `fields.rs`.

use super::App;
use super::error::{Answered, ApiError};
use super::fields;
use super::models::Models;
use axum::body::{Body as HttpBody, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use elapid::Special;
use serde::de::{Deserialize, Deserializer, Error as _};
use serde_json::{Map, Number, Value};
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

pub struct Body(Value);

impl FromRequest<Arc<Models>> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Arc<Models>) -> Answered<Body> {
        check_type(request.headers())?;
        // `gather` has put it into memory.
        let bytes = axum::body::to_bytes(request.into_body(), usize::MAX).await;
        let bytes = bytes.map_err(|_| broke_off())?;
        let value = serde_json::from_slice(&bytes);
        value.map(Body).map_err(|error| ApiError::bad(format!("the body is not JSON: {error}")))
    }
}

impl Body {
    /// A request of another API, translated.
    pub fn of(map: Map<String, Value>) -> Body {
        Body(Value::Object(map))
    }

    /// The model that is asked for.
    pub fn model(&self) -> Option<&str> {
        self.0.get("model").or(self.0.get("name")).and_then(Value::as_str)
    }

    pub fn is_object(&self) -> bool {
        self.0.is_object()
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// Refuses fields that say something and are in none of these lists.
    pub fn refuse_others(&self, known: &[&[&str]]) -> Answered<()> {
        self.0.as_object().map_or(Ok(()), |map| fields::refuse_others(map, known))
    }

    /// The fields of an object that `T` knows.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Answered<T> {
        match self.0.is_object() {
            true => self.read_any(""),
            false => Err(ApiError::bad("the body is not a JSON object")),
        }
    }

    /// JSON of any kind; errors name places below `name`.
    pub fn read_any<'a, T: Deserialize<'a>>(&'a self, name: &str) -> Answered<T> {
        serde_path_to_error::deserialize(&self.0).map_err(|error| {
            let path = format!("{name}{}", error.path());
            let first = path.split(['.', '[']).next().unwrap_or_default();
            let words = format!("`{path}`: {}", error.inner());
            ApiError { param: Some(first.to_string()), ..ApiError::bad(words) }
        })
    }
}

/// A whole number; `16.0` is one too.
pub fn whole(number: &Number) -> Option<i64> {
    let float = number.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 9e15);
    number.as_i64().or(float.map(|x| x as i64))
}

/// A whole number within bounds.
#[derive(Clone, Copy)]
pub struct Int<const LOW: i64, const HIGH: i64>(pub i64);

/// A number of things, at most as many as u32 counts.
pub type Size = Int<0, { u32::MAX as i64 }>;

/// The same; below zero is as many as there is room for.
pub type Limit = Int<-2, { u32::MAX as i64 }>;

impl<'de, const LOW: i64, const HIGH: i64> Deserialize<'de> for Int<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = Number::deserialize(deserializer)?;
        whole(&number).filter(|n| (LOW..=HIGH).contains(n)).map(Int).ok_or_else(|| {
            D::Error::custom(format_args!("{number} is not a whole number from {LOW} to {HIGH}"))
        })
    }
}

impl<const LOW: i64, const HIGH: i64> Int<LOW, HIGH> {
    /// It, unless it is below zero.
    pub fn limit(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }

    /// It, zero where it is below.
    pub fn size(self) -> usize {
        usize::try_from(self.0).unwrap_or(0)
    }
}

#[derive(Clone, Copy)]
pub struct Num<const LOW: i64, const HIGH: i64>(pub f64);

impl<'de, const LOW: i64, const HIGH: i64> Deserialize<'de> for Num<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = Number::deserialize(deserializer)?;
        let within = number.as_f64().filter(|x| (LOW as f64..=HIGH as f64).contains(x));
        within.map(Num).ok_or_else(|| {
            D::Error::custom(format_args!("{number} is not a number from {LOW} to {HIGH}"))
        })
    }
}

/// A time in milliseconds.
pub type Ms = Num<-1, 1_000_000_000>;

impl Ms {
    /// It, where it is more than zero.
    pub fn time(self) -> Option<Duration> {
        (self.0 > 0.0).then(|| Duration::from_secs_f64(self.0 / 1e3))
    }
}

#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    pub fn list(texts: Option<Texts>, name: &str, n_max: usize) -> Answered<Vec<String>> {
        match texts {
            None => Ok(Vec::new()),
            Some(Texts::One(text)) => Ok(vec![text]),
            Some(Texts::Many(list)) => at_most(name, list, n_max),
        }
    }
}

pub fn at_most<T>(name: &str, list: Vec<T>, n_max: usize) -> Answered<Vec<T>> {
    match list.len() <= n_max {
        true => Ok(list),
        false => Err(ApiError::field(name, format!("has {} items, at most {n_max}", list.len()))),
    }
}

/// A prompt, or a list of them.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a text, token ids, or a list of these")]
pub enum Prompt {
    Text(String),
    Id(u32),
    List(Vec<Prompt>),
}

impl Prompt {
    fn is_id(&self) -> bool {
        matches!(self, Prompt::Id(_))
    }

    /// Each prompt, and whether they came as a list. A list with a token in it is one prompt.
    pub fn split(self, name: &str, n_max: usize) -> Answered<(Vec<Prompt>, bool)> {
        match self {
            Prompt::List(list) if !list.is_empty() && !list.iter().any(Prompt::is_id) => {
                Ok((at_most(name, list, n_max)?, true))
            }
            Prompt::Id(_) => Err(ApiError::field(name, "is a number, not a text or a list")),
            one => Ok((vec![one], false)),
        }
    }

    /// Refuses what OpenAI does not have: nothing, and texts and tokens in one list.
    pub fn check(&self, name: &str) -> Answered<()> {
        match self {
            Prompt::List(list) if list.is_empty() => Err(ApiError::field(name, "is empty")),
            Prompt::List(list) if !list.iter().all(Prompt::is_id) => {
                Err(ApiError::field(name, "holds more than token ids in one list"))
            }
            _ => Ok(()),
        }
    }

    /// Its tokens; one that begins with a text begins as a text does.
    pub fn ids(&self, app: &App, name: &str) -> Answered<Vec<u32>> {
        let list = match self {
            Prompt::Text(text) => return app.encode_prompt(text),
            Prompt::Id(_) => std::slice::from_ref(self),
            Prompt::List(list) => list,
        };
        let begin = matches!(list.first(), Some(Prompt::Text(_)));
        let mut ids = if begin { app.tokenizer.begin().to_vec() } else { Vec::new() };
        for part in list {
            match part {
                Prompt::Text(text) => ids.extend(app.tokenizer.encode(text, Special::Parse)?),
                Prompt::Id(id) => ids.push(app.token_id(name, *id)?),
                Prompt::List(_) => return Err(ApiError::field(name, "is nested too deeply")),
            }
        }
        if ids.is_empty() { app.begin() } else { Ok(ids) }
    }
}

fn check_type(headers: &HeaderMap) -> Answered<()> {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = text.unwrap_or("").split(';').next().unwrap_or("").trim();
    let essence = essence.to_ascii_lowercase();
    // Some clients of Ollama send none; a page of somebody else's would bring its origin.
    let is_untold = essence.is_empty() && !headers.contains_key(header::ORIGIN);
    if is_untold || essence == "application/json" || essence.ends_with("+json") {
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
    // A client that waits for `100 Continue` has sent nothing yet.
    if waits && body.size_hint().lower() > n_max as u64 {
        return Err(too_large(n_max));
    }
    match tokio::time::timeout(BODY_TIME, read(body, n_max)).await {
        Ok(bytes) => Ok(Request::from_parts(parts, HttpBody::from(bytes?))),
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

async fn read(body: HttpBody, n_max: usize) -> Answered<Vec<u8>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(serde::Deserialize)]
    struct Fields {
        number: Option<Num<0, 1>>,
        whole: Option<Int<0, 100>>,
        text: Option<String>,
        texts: Option<Texts>,
    }

    fn wrong(value: Value) -> (String, String) {
        let error = Body(value).read::<Fields>().err().unwrap();
        (error.param.unwrap(), error.message)
    }

    #[test]
    fn a_wrong_field_is_named_with_what_it_holds() {
        let (param, words) = wrong(json!({"number": "x"}));
        assert_eq!(param, "number");
        assert_eq!(words, "`number`: invalid type: string \"x\", expected a JSON number");
        assert_eq!(wrong(json!({"number": 3})).1, "`number`: 3 is not a number from 0 to 1");
        assert_eq!(
            wrong(json!({"whole": 1.5})).1,
            "`whole`: 1.5 is not a whole number from 0 to 100"
        );
        assert!(wrong(json!({"whole": 1e300})).1.contains("not a whole number"));
        assert!(wrong(json!({"texts": ["p", 1]})).1.contains("a text or a list of texts"));
        let list = Body(json!([1])).read::<Fields>().err().unwrap();
        assert_eq!(list.message, "the body is not a JSON object");
        let fields: Fields = Body(json!({"texts": ["p", "q"]})).read().unwrap();
        let error = Texts::list(fields.texts, "texts", 1).err().unwrap();
        assert_eq!(error.message, "`texts`: has 2 items, at most 1");
    }

    #[test]
    fn null_is_absent_and_a_whole_number_may_be_written_with_a_point() {
        let fields: Fields = Body(json!({"whole": 16.0, "text": null, "other": 1})).read().unwrap();
        assert_eq!(fields.whole.unwrap().0, 16);
        assert!(fields.text.is_none() && fields.number.is_none() && fields.texts.is_none());
    }
}
