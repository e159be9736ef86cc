//! Values as text: what Python's `str`, `repr` and `json.dumps` write.
//!
//! A value is charged to the budget before it is written, so that it is neither large nor deep.

use super::guard::{charge, read};
use super::python::{Outcome, fail, float};
use minijinja::value::{Kwargs, Value, ValueKind};
use std::fmt::Write;

/// `str(value)`.
pub(super) fn text(value: &Value) -> Outcome<String> {
    read(value)?;
    let mut out = String::new();
    if let Some(text) = value.as_str() {
        out.push_str(text);
    } else if !value.is_undefined() {
        let (comma, colon) = (", ".into(), ": ".into());
        let style = Style { scalars: Scalars::Repr, indent: None, is_sorted: false, comma, colon };
        style.write(value, 0, &mut out)?;
    }
    Ok(out)
}

/// `json.dumps(value)`.
pub(super) fn json(value: &Value, indent: Option<usize>, named: &Kwargs) -> Outcome<String> {
    let flag =
        |name: &str| Ok::<_, minijinja::Error>(named.get::<Option<bool>>(name)?.unwrap_or(false));
    let indent = named.get::<Option<usize>>("indent")?.or(indent);
    let pair: Option<Vec<String>> = named.get("separators")?;
    let comma = if indent.is_some() { "," } else { ", " };
    let [comma, colon] =
        pair.and_then(|pair| pair.try_into().ok()).unwrap_or([comma.into(), ": ".into()]);
    let scalars = if flag("ensure_ascii")? { Scalars::AsciiJson } else { Scalars::Json };
    let style = Style { scalars, indent, is_sorted: flag("sort_keys")?, comma, colon };
    named.assert_all_used()?;
    read(value)?;
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(out)
}

#[derive(Clone, Copy, PartialEq)]
enum Scalars {
    Repr,
    Json,
    AsciiJson,
}

struct Style {
    scalars: Scalars,
    indent: Option<usize>,
    is_sorted: bool,
    comma: String,
    colon: String,
}

impl Style {
    fn new_line(&self, depth: usize, out: &mut String) -> Outcome<()> {
        if let Some(indent) = self.indent {
            let n = indent.saturating_mul(depth);
            charge(n)?;
            out.push('\n');
            out.push_str(&" ".repeat(n));
        }
        Ok(())
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Outcome<()> {
        let is_map = match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => false,
            ValueKind::Map => true,
            _ => return self.scalar(value, out),
        };
        let mut items: Vec<Value> = value.try_iter()?.collect();
        if is_map && self.is_sorted {
            items.sort();
        }
        out.push(if is_map { '{' } else { '[' });
        for (idx, item) in items.iter().enumerate() {
            out.push_str(if idx > 0 { &self.comma } else { "" });
            self.new_line(depth + 1, out)?;
            if is_map {
                match self.scalars {
                    Scalars::Repr => self.write(item, depth + 1, out)?,
                    _ => self.json_text(&item.to_string(), out),
                }
                out.push_str(&self.colon);
                self.write(&value.get_item(item)?, depth + 1, out)?;
            } else {
                self.write(item, depth + 1, out)?;
            }
        }
        if !items.is_empty() {
            self.new_line(depth, out)?;
        }
        out.push(if is_map { '}' } else { ']' });
        Ok(())
    }

    fn scalar(&self, value: &Value, out: &mut String) -> Outcome<()> {
        let is_json = self.scalars != Scalars::Repr;
        match (value.kind(), value.as_str()) {
            (_, Some(text)) if is_json => self.json_text(text, out),
            (_, Some(text)) => quoted(text, out),
            (ValueKind::Number, _) if !value.is_integer() => {
                out.push_str(&float_text(float(value)?))
            }
            (ValueKind::None, _) if is_json => out.push_str("null"),
            (ValueKind::Bool, _) if is_json => write!(out, "{}", value.is_true())?,
            (ValueKind::Undefined, _) if !is_json => out.push_str("Undefined"),
            (kind, _) if is_json && kind != ValueKind::Number => {
                return Err(fail(format!("{kind} cannot be written as JSON")));
            }
            _ => write!(out, "{value}")?,
        }
        Ok(())
    }

    /// serde_json escapes as `json.dumps` does, but for `ensure_ascii`.
    fn json_text(&self, text: &str, out: &mut String) {
        for ch in serde_json::Value::from(text).to_string().chars() {
            if self.scalars == Scalars::AsciiJson && ch > '~' {
                let mut units = [0; 2];
                let units = ch.encode_utf16(&mut units).iter();
                out.extend(units.map(|unit| format!("\\u{unit:04x}")));
            } else {
                out.push(ch);
            }
        }
    }
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
    if x == 0.0 || !x.is_finite() || (1e-4..1e16).contains(&x.abs()) {
        return format!("{x:?}").to_lowercase();
    }
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
