//! Values as text: what Python's `str`, `repr` and `json.dumps` write.
//!
//! The meter sees a value before it is written, so that it is neither large nor deep.

use super::guard::Meter;
use super::python::{Outcome, fail, float};
use minijinja::value::{Kwargs, Value, ValueKind};
use std::fmt::Write;

/// `str(value)`.
pub(super) fn text(value: &Value, meter: &Meter) -> Outcome<String> {
    meter.read(value)?;
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => (),
        None => repr(value, &mut out)?,
    }
    Ok(out)
}

/// `repr(value)`; the meter has seen that `value` is neither large nor deep.
fn repr(value: &Value, out: &mut String) -> Outcome<()> {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => out.push_str(&float_text(float(value)?)),
        ValueKind::String => quoted(value.as_str().unwrap_or(""), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (idx, item) in value.try_iter()?.enumerate() {
                out.push_str(if idx > 0 { ", " } else { "" });
                repr(&item, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (idx, key) in value.try_iter()?.enumerate() {
                out.push_str(if idx > 0 { ", " } else { "" });
                repr(&key, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for ch in text.chars() {
        match ch {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ch if ch == quote => out.extend(['\\', ch]),
            ch if ch.is_control() => out.push_str(&format!("\\x{:02x}", ch as u32)),
            ch => out.push(ch),
        }
    }
    out.push(quote);
}

/// Shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn float_text(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_string();
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{x:?}")
}

/// How `json.dumps` is asked to write.
struct Json {
    indent: Option<usize>,
    is_ascii: bool,
    is_sorted: bool,
    comma: String,
    colon: String,
}

pub(super) fn json(
    value: &Value,
    indent: Option<usize>,
    named: &Kwargs,
    meter: &Meter,
) -> Outcome<String> {
    let indent = named.get::<Option<usize>>("indent")?.or(indent);
    let pair: Option<Vec<String>> = named.get("separators")?;
    let pair = pair.filter(|pair| pair.len() == 2);
    let style = Json {
        indent,
        is_ascii: named.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        is_sorted: named.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        comma: pair.as_ref().map_or(if indent.is_some() { "," } else { ", " }, |p| &p[0]).into(),
        colon: pair.as_ref().map_or(": ", |pair| &pair[1]).into(),
    };
    named.assert_all_used()?;
    meter.read(value)?;
    let mut out = String::new();
    style.write(value, 0, &mut out, meter)?;
    Ok(out)
}

impl Json {
    fn new_line(&self, depth: usize, out: &mut String, meter: &Meter) -> Outcome<()> {
        if let Some(indent) = self.indent {
            let n = indent.saturating_mul(depth);
            meter.charge(n)?;
            out.push('\n');
            out.push_str(&" ".repeat(n));
        }
        Ok(())
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String, meter: &Meter) -> Outcome<()> {
        let is_map = match value.kind() {
            ValueKind::None => {
                out.push_str("null");
                return Ok(());
            }
            ValueKind::Bool => {
                out.push_str(if value.is_true() { "true" } else { "false" });
                return Ok(());
            }
            ValueKind::Number | ValueKind::String => return self.write_scalar(value, out),
            ValueKind::Seq | ValueKind::Iterable => false,
            ValueKind::Map => true,
            kind => return Err(fail(format!("{kind} is not JSON"))),
        };
        let mut items: Vec<Value> = value.try_iter()?.collect();
        if is_map && self.is_sorted {
            items.sort();
        }
        let n_item = items.len();
        out.push(if is_map { '{' } else { '[' });
        for (idx, item) in items.into_iter().enumerate() {
            out.push_str(if idx > 0 { &self.comma } else { "" });
            self.new_line(depth + 1, out, meter)?;
            if is_map {
                self.write_text(&item.to_string(), out);
                out.push_str(&self.colon);
                self.write(&value.get_item(&item)?, depth + 1, out, meter)?;
            } else {
                self.write(&item, depth + 1, out, meter)?;
            }
        }
        if n_item > 0 {
            self.new_line(depth, out, meter)?;
        }
        out.push(if is_map { '}' } else { ']' });
        Ok(())
    }

    fn write_scalar(&self, value: &Value, out: &mut String) -> Outcome<()> {
        match value.as_str() {
            Some(text) => self.write_text(text, out),
            None => repr(value, out)?,
        }
        Ok(())
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for ch in text.chars() {
            match ch {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                ch if ch < ' ' || (self.is_ascii && ch > '~') => {
                    for unit in ch.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                ch => out.push(ch),
            }
        }
        out.push('"');
    }
}
