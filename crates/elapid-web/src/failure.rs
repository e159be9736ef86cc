//! What JavaScript is told when something fails: a code, the engine's words, and its hint.

use elapid::Error;
use serde::de::DeserializeOwned;
use serde_json::json;
use wasm_bindgen::JsValue;

/// An error on its way to JavaScript, where it becomes an exception of a class of its own.
#[derive(Debug)]
pub struct Failure {
    /// Known to the classes of JavaScript.
    pub code: &'static str,
    /// What is wrong.
    pub message: String,
    /// What to do; may be empty.
    pub hint: String,
}

/// A result with [`Failure`].
pub type Done<T> = Result<T, Failure>;

impl Failure {
    /// An argument that cannot be taken.
    pub fn input(message: impl Into<String>, hint: &str) -> Failure {
        Failure { code: "input", message: message.into(), hint: hint.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let code = match &error {
            Error::UnknownFamily { .. } => "unknown_family",
            Error::Config { .. } => "config",
            Error::Format { .. } => "format",
            Error::MissingTensor { .. } => "missing_tensor",
            Error::ExtraTensor { .. } => "extra_tensor",
            Error::WrongShape { .. } => "wrong_shape",
            Error::NoMatch { .. } => "no_match",
            Error::Diverged { .. } => "diverged",
            Error::OutOfMemory { .. } => "out_of_memory",
            Error::DeviceLost { .. } => "device_lost",
            Error::Device { .. } => "device",
            Error::Read { .. } => "read",
            Error::Write { .. } => "write",
            Error::Panic { .. } => "defect",
            _ => "input",
        };
        Failure { code, message: error.to_string(), hint: error.hint().into_owned() }
    }
}

impl From<Failure> for JsValue {
    fn from(Failure { code, message, hint }: Failure) -> JsValue {
        let json = json!({ "code": code, "message": message, "hint": hint });
        JsValue::from_str(&json.to_string())
    }
}

/// Options as they come: a JSON object with known keys alone.
pub fn options<T: DeserializeOwned>(json: &str) -> Done<T> {
    serde_json::from_str(json).map_err(|error| {
        // Where in the JSON is of no use to people who never saw it.
        let words = error.to_string();
        let words = words.split(" at line ").next().unwrap_or_default().to_string();
        Failure::input(format!("the options: {words}"), "see the types of the package")
    })
}
