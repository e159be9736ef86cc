//! Fields that a route does not read: none is accepted and then ignored.
//!
//! A field that no struct of the route names is refused with its name, unless it says nothing:
//!
//! | passes    | because                                                                   |
//! |-----------|---------------------------------------------------------------------------|
//! | `EMPTY`   | null, false, 0, "", [] and {} switch nothing on                           |
//! | `HINTS`   | it is about accounts or speed, or belongs to a field that must be off     |
//! | `NEUTRAL` | this value is what happens anyway; clients send it all the time           |

use super::error::{Answered, ApiError};
use serde::de::value::Error as Refused;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

const HINTS: &[&str] = &[
    "cache_prompt",
    "client_metadata",
    "debug_options",
    "dynatemp_exponent",
    "id_slot",
    "keep_alive",
    "language",
    "metadata",
    "mirostat_eta",
    "mirostat_tau",
    "model",
    "n_cache_reuse",
    "n_keep",
    "prompt_cache_key",
    "prompt_cache_retention",
    "return_progress",
    "safety_identifier",
    "service_tier",
    "store",
    "t_max_prompt_ms",
    "timings_per_token",
    "user",
];

const NEUTRAL: &[(&str, &str)] = &[
    ("modalities", r#"["text"]"#),
    ("n", "1"),
    ("parse_tool_calls", "true"),
    ("reasoning_effort", r#""none""#),
    ("reasoning_format", r#""none""#),
    ("reasoning_format", r#""auto""#),
    ("skip_special_tokens", "true"),
    ("tfs_z", "1"),
    ("top_n_sigma", "-1"),
    ("truncation", r#""disabled""#),
    ("typ_p", "1"),
    ("typical_p", "1"),
    ("verbosity", r#""medium""#),
];

/// What to do instead, for fields that people ask for.
const INSTEAD: &[(&str, &str)] = &[
    ("mirostat", "mirostat is not supported; use `min_p` or `top_p`"),
    ("functions", "is the old form; use `tools`"),
    ("function_call", "is the old form; use `tool_choice`"),
    ("previous_response_id", "nothing is stored here; send the whole conversation as `input`"),
    ("images", "this model reads only text"),
];

/// Refuses fields of a body that are in none of these lists and say something.
pub fn refuse_others(map: &Map<String, Value>, known: &[&[&str]]) -> Answered<()> {
    let is_known = |name: &str| known.iter().any(|list| list.contains(&name));
    for (name, value) in map.iter().filter(|(name, _)| !is_known(name)) {
        if is_empty(value) || HINTS.contains(&&name[..]) || is_neutral(name, value) {
            continue;
        }
        let instead = INSTEAD.iter().find(|(field, _)| field == name);
        let words = instead.map_or("is not supported on this route; omit it", |pair| pair.1);
        return Err(ApiError::field(name, words).with_code("unsupported_field"));
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(is_on) => !is_on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

fn is_neutral(name: &str, value: &Value) -> bool {
    let same = |text: &str| match serde_json::from_str::<Value>(text) {
        Ok(Value::Number(number)) => number.as_f64() == value.as_f64(),
        Ok(neutral) => neutral == *value,
        Err(_) => false,
    };
    NEUTRAL.iter().any(|(field, text)| *field == name && same(text))
}

/// The names that a struct reads, its own and others that stand for them.
pub fn names<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // It always fails: there is nothing to read.
    let _ = T::deserialize(Names(&mut names));
    names
}

struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = Refused;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Refused> {
        Err(Refused::custom("only structs have names"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refused> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(serde::Deserialize)]
    struct Fields {
        #[serde(alias = "second")]
        _first: Option<u8>,
    }

    fn refused(value: Value) -> Option<String> {
        let known = [names::<Fields>()];
        refuse_others(value.as_object().unwrap(), &known).err().and_then(|error| error.param)
    }

    #[test]
    fn a_field_that_is_not_read_is_refused_unless_it_says_nothing() {
        assert_eq!(refused(json!({"_first": 1, "second": 1})), None);
        assert_eq!(refused(json!({"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0})), None);
        assert_eq!(
            refused(json!({"dynatemp_range": 0.0, "dynatemp_exponent": 1.75, "other": null})),
            None
        );
        assert_eq!(refused(json!({"mirostat": 2})), Some("mirostat".into()));
        assert_eq!(refused(json!({"dynatemp_range": 0.1})), Some("dynatemp_range".into()));
        assert_eq!(refused(json!({"typical_p": 0.9})), Some("typical_p".into()));
        assert_eq!(refused(json!({"temprature": 0.5})), Some("temprature".into()));
    }
}
