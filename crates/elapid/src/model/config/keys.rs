//! A JSON object read key by key, with errors that name file, key and value.
//!
//! Keys of a family are asked for by our names; errors spell them as the file does.

use super::family::{Arch, Facts, Family, Mixers};
use crate::error::{Error, Result};
use serde_json::{Map, Value};

pub(crate) struct Keys {
    file: String,
    /// Dotted path of this object within the file, for messages.
    path: String,
    map: Map<String, Value>,
    /// Of the family, once it is known.
    facts: Option<&'static Facts>,
    /// Where the object was made of the metadata of a GGUF file.
    arch: Option<Arch>,
    hint: &'static str,
}

impl Keys {
    /// Parses a whole file.
    ///
    /// Transformers 4 writes a bare `Infinity`, which is not JSON, and transformers 5 an object
    /// `{"__float__": "Infinity"}`; the first is turned into the second.
    pub(crate) fn parse(file: &str, json: &str) -> Result<Keys> {
        let hint = "a config.json begins with `{` and is written by the tool that made the model";
        let value: Value = serde_json::from_str(&quote_infinities(json))
            .map_err(|error| Error::format(file, format!("not JSON: {error}"), hint))?;
        match value {
            Value::Object(map) => Ok(Keys::new(file, map, None)),
            _ => Err(Error::format(file, "not a JSON object", hint)),
        }
    }

    /// Of a config.json, or of a GGUF file of this architecture.
    pub(crate) fn new(file: &str, map: Map<String, Value>, arch: Option<Arch>) -> Keys {
        let hint = "compare with the config.json of the original";
        Keys { file: file.into(), path: String::new(), map, facts: None, arch, hint }
    }

    /// What its errors tell people to do.
    pub(crate) fn with_hint(self, hint: &'static str) -> Keys {
        Keys { hint, ..self }
    }

    /// Takes the names of a family from now on.
    pub(crate) fn set_family(&mut self, family: Family) {
        self.facts = Some(family.facts());
    }

    /// What config.json calls a key of ours.
    fn name<'a>(&self, key: &'a str) -> &'a str {
        self.facts.and_then(|facts| facts.row(key)).map_or(key, |row| row.1)
    }

    /// What the family means by the absence of a key, unless a GGUF file would have to hold it.
    fn default(&self, key: &str) -> Option<f64> {
        let facts = self.facts?;
        let is_stored = facts.row(key).is_some_and(|row| row.gguf_key().is_some());
        let default = facts.defaults.iter().find(|default| default.0 == key);
        default.filter(|_| self.arch.is_none() || !is_stored).map(|default| default.1)
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn wrong(&self, key: &str, problem: impl Into<String>) -> Error {
        let row = self.facts.and_then(|facts| facts.row(key));
        let (key, hint) = match (self.arch, row.and_then(|row| row.gguf_key())) {
            (Some(arch), Some(key)) => (format!("{arch}.{key}"), "convert the original again"),
            _ => (format!("{}{}", self.path, self.name(key)), self.hint),
        };
        Error::config(&self.file, &key, problem, hint)
    }

    pub(crate) fn is_own(&self) -> bool {
        self.facts.is_some_and(|facts| facts.mixers == Mixers::Own)
    }

    /// Whether the settings of a part are an object: in our own config and in that of mamba_ssm.
    pub(crate) fn has_parts(&self) -> bool {
        self.facts.is_some_and(|facts| matches!(facts.mixers, Mixers::Own | Mixers::Named))
    }

    /// The value, unless absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        let name = self.name(key);
        let in_part = || {
            let (part, key) = name.split_once('.').filter(|_| self.has_parts())?;
            self.map.get(part)?.get(key)
        };
        self.map.get(name).or_else(in_part).filter(|value| !value.is_null())
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub(crate) fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(key, "is missing"))
    }

    pub(crate) fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, format!("is {value}, not {wanted}"));
        read(value).map(Some).ok_or_else(wrong)
    }

    pub(crate) fn str(&self, key: &str) -> Result<&str> {
        self.need(key, self.typed(key, "a string", Value::as_str)?)
    }

    pub(crate) fn str_or<'a>(&'a self, key: &str, default: &'a str) -> Result<&'a str> {
        Ok(self.typed(key, "a string", Value::as_str)?.unwrap_or(default))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        self.need(key, self.size_opt(key)?)
    }

    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.size_opt(key)?.unwrap_or(default))
    }

    pub(crate) fn size_opt(&self, key: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().filter(|&n| n <= 1 << 40)?.try_into().ok();
        let size = self.typed(key, "a whole number", read)?;
        Ok(size.or(self.default(key).map(|n| n as usize)))
    }

    /// A size whose null does not mean what its absence means: none.
    pub(crate) fn size_or_null(&self, key: &str) -> Result<Option<usize>> {
        let is_null = self.map.get(self.name(key)).is_some_and(Value::is_null);
        if is_null { Ok(None) } else { self.size_opt(key) }
    }

    /// A size, or the word "auto" for none.
    pub(crate) fn size_or_auto(&self, key: &str) -> Result<Option<usize>> {
        let is_auto = self.get(key).is_some_and(|value| value == "auto");
        if is_auto { Ok(None) } else { self.size_opt(key) }
    }

    pub(crate) fn float_or(&self, key: &str, default: f32) -> Result<f32> {
        Ok(self.float_opt(key)?.map_or(default, |x| x as f32))
    }

    pub(crate) fn float_opt(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.typed(key, "a number", as_float)?.or(self.default(key)))
    }

    pub(crate) fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        let default = self.default(key).map_or(default, |x| x != 0.0);
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(crate) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.typed(key, "a list of whole numbers", |value| {
            value.as_array()?.iter().map(|n| n.as_u64()?.try_into().ok()).collect()
        })
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.typed(key, "a list of numbers", |value| {
            value.as_array()?.iter().map(|x| as_float(x).map(|x| x as f32)).collect()
        })
    }

    /// Item `idx` of a list of strings, one for each layer; none where there is no list.
    pub(crate) fn string_at(&self, key: &str, idx: usize) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, format!("is {value}, not a list of strings"));
        let list = value.as_array().ok_or_else(wrong)?;
        match list.get(idx) {
            Some(item) => item.as_str().map(Some).ok_or_else(wrong),
            None => Err(self.wrong(key, format!("holds {}, none for layer {idx}", list.len()))),
        }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Keys>> {
        let map = self.typed(key, "an object", |value| value.as_object().cloned())?;
        Ok(map.map(|map| self.nested(key, map)))
    }

    /// A part of this file under a path of its own.
    pub(crate) fn nested(&self, key: &str, map: Map<String, Value>) -> Keys {
        let path = format!("{}{key}.", self.path);
        Keys { file: self.file.clone(), path, map, facts: None, arch: None, hint: self.hint }
    }

    /// Refuses every key that is not in `known`.
    pub(crate) fn only(&self, known: &[&str]) -> Result<()> {
        match self.map.keys().find(|key| !known.contains(&key.as_str())) {
            Some(key) => {
                Err(self.wrong(key, format!("is unknown; known are {}", known.join(", "))))
            }
            None => Ok(()),
        }
    }
}

fn as_float(value: &Value) -> Option<f64> {
    match value.get("__float__").and_then(Value::as_str) {
        Some(text) => text.parse().ok().filter(|x: &f64| x.is_infinite()),
        None => value.as_f64(),
    }
}

/// Replaces a bare `Infinity` outside strings by what transformers 5 writes.
fn quote_infinities(json: &str) -> String {
    let mut in_string = false;
    let pieces = json.split_inclusive('"').map(|piece| {
        let before = piece.strip_suffix('"').unwrap_or(piece);
        let n_escapes = before.len() - before.trim_end_matches('\\').len();
        let was_in_string = in_string;
        in_string ^= before.len() < piece.len() && !(in_string && n_escapes % 2 == 1);
        match was_in_string {
            true => piece.to_string(),
            false => piece
                .replace("-Infinity", r#"{"__float__":"-inf"}"#)
                .replace("Infinity", r#"{"__float__":"inf"}"#),
        }
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_are_read_in_both_spellings() {
        let json = r#"{"a": [0.0, Infinity], "b": -Infinity, "c": "Infinity \" Infinity",
                       "d": {"__float__": "Infinity"}}"#;
        let keys = Keys::parse("config.json", json).unwrap();
        assert_eq!(keys.floats("a").unwrap(), Some(vec![0.0, f32::INFINITY]));
        assert_eq!(keys.float_opt("b").unwrap(), Some(f64::NEG_INFINITY));
        assert_eq!(keys.str("c").unwrap(), "Infinity \" Infinity");
        assert_eq!(keys.float_or("d", 0.0).unwrap(), f32::INFINITY);
    }

    #[test]
    fn an_error_names_file_key_and_value() {
        let keys = Keys::parse("config.json", r#"{"hidden_size": -3}"#).unwrap();
        let text = keys.size("hidden_size").unwrap_err().report();
        assert!(
            text.starts_with("config.json: `hidden_size`: is -3, not a whole number"),
            "{text}"
        );
        let text = keys.size("vocab_size").unwrap_err().report();
        assert!(text.starts_with("config.json: `vocab_size`: is missing"), "{text}");
    }
}
