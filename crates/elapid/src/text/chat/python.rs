//! Where minijinja differs from jinja2: operators, filters, tests and methods.
//!
//! Only what templates meet: slices with negative steps, division, `%` on strings, methods of
//! strings that pycompat lacks or does otherwise. Whatever can grow is charged to the meter
//! before it is made. Not here: values as text, in `text`.

use super::guard::{Meter, NODE_COST, refuse_namespace};
use super::text::{json, text};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, Output, State, format_filter};
use minijinja_contrib::pycompat;
use std::sync::Arc;

pub(super) type Outcome<T> = Result<T, Error>;

/// Longest `range`, as in jinja2's sandbox.
const RANGE_MAX: i64 = 100_000;

pub(super) fn fail(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Sets up filters, tests, functions, methods and printing.
pub(super) fn install(env: &mut Environment<'static>, meter: &Arc<Meter>) {
    // The first two make as many empty cells as asked for; the others are not in jinja2.
    for name in ["batch", "slice", "split", "lines", "chain", "zip"] {
        env.remove_filter(name);
    }
    operators(env, meter);
    filters(env, meter);
    number_filters(env);
    let m = meter.clone();
    env.set_formatter(move |out: &mut Output, _: &State, value: &Value| {
        Ok(out.write_str(&text(value, &m)?)?)
    });
    let m = meter.clone();
    env.set_unknown_method_callback(move |state, value, name, args| {
        method(state, value, name, args, &m)
    });
    let m = meter.clone();
    env.add_function("range", move |start: i64, stop: Option<i64>, step: Option<i64>| {
        range(start, stop, step, &m)
    });
    env.add_function("dict", |pairs: Option<Value>, named: Kwargs| -> Outcome<Value> {
        let mut list = Vec::new();
        for pair in pairs.iter().flat_map(|pairs| pairs.try_iter()).flatten() {
            list.push((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        }
        for name in named.args() {
            list.push((Value::from(name), named.get::<Value>(name)?));
        }
        Ok(Value::from_iter(list))
    });
    comparisons(env, meter);
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_test("sequence", |value: &Value| {
        !matches!(value.kind(), ValueKind::Number | ValueKind::Bool | ValueKind::None)
    });
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

fn range(start: i64, stop: Option<i64>, step: Option<i64>, meter: &Meter) -> Outcome<Value> {
    let (start, stop) = if let Some(stop) = stop { (start, stop) } else { (0, start) };
    let step = step.unwrap_or(1);
    let span = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
    let n = match (span, step) {
        (_, 0) => return Err(fail("`range` with step 0")),
        (Some(span), _) => (span.max(0) as u64).div_ceil(step.unsigned_abs()),
        (None, _) => u64::MAX,
    };
    if n > RANGE_MAX as u64 {
        return Err(fail(format!("a range of {n} items, at most {RANGE_MAX} are made")));
    }
    meter.charge(n as usize * NODE_COST)?;
    Ok((0..n as i64).map(|idx| start + idx * step).collect())
}

fn operators(env: &mut Environment<'static>, meter: &Arc<Meter>) {
    let m = meter.clone();
    env.add_function("meter ", move |value: Value| {
        m.read(&value)?;
        if value.kind() == ValueKind::Iterable { m.read_level(value) } else { Ok(value) }
    });
    let m = meter.clone();
    env.add_function("level ", move |value: Value| m.read_level(value));
    env.add_function("plain ", |value: Value| refuse_namespace(&value).map(|()| value));
    let m = meter.clone();
    env.add_function("add ", move |a: Value, b: Value| {
        let is_text = a.as_str().is_some() || b.as_str().is_some();
        let read = |value: Value| match is_text {
            true => m.read(&value).map(|()| value),
            false => m.read_level(value),
        };
        sum(&read(a)?, &read(b)?)
    });
    let m = meter.clone();
    env.add_function("concat ", move |a: &Value, b: &Value| -> Outcome<String> {
        Ok(text(a, &m)? + &text(b, &m)?)
    });
    env.add_function("items ", |value: Value| match value.is_none() {
        true => Err(fail("a loop over none")),
        false => Ok(value),
    });
    let m = meter.clone();
    env.add_function("mul ", move |a: &Value, b: &Value| product(a, b, &m));
    env.add_function("div ", |a: &Value, b: &Value| {
        let (a, b) = (float(a)?, float(b)?);
        if b == 0.0 { Err(fail("division by zero")) } else { Ok(a / b) }
    });
    env.add_function("pow ", |a: &Value, b: &Value| match (integer(a), integer(b)) {
        (Some(a), Some(b @ 0..)) => {
            let power = u32::try_from(b).ok().and_then(|b| a.checked_pow(b));
            Ok(Value::from(power.ok_or_else(|| fail("`**` gives too large a number"))?))
        }
        _ => Ok(Value::from(float(a)?.powf(float(b)?))),
    });
    let m = meter.clone();
    env.add_function("rem ", move |a: &Value, b: &Value| remainder(a, b, &m));
    env.add_function("order ", |a: &Value, op: &str, b: &Value| -> Outcome<bool> {
        let kind = |value: &Value| match value.kind() {
            ValueKind::Bool => ValueKind::Number,
            ValueKind::Iterable => ValueKind::Seq,
            kind => kind,
        };
        let known = [ValueKind::Number, ValueKind::String, ValueKind::Seq];
        if kind(a) != kind(b) || !known.contains(&kind(a)) {
            return Err(fail(format!("`{op}` between {} and {}", a.kind(), b.kind())));
        }
        Ok(match op {
            "<" => a < b,
            "<=" => a <= b,
            ">" => a > b,
            _ => a >= b,
        })
    });
    env.add_function("slice ", slice);
    env.add_function("namespace ", minijinja::functions::namespace);
}

/// Tests that `select` and its like run on every item with the same, perhaps large, argument.
fn comparisons(env: &mut Environment<'static>, meter: &Arc<Meter>) {
    type Compare = fn(&Value, &Value) -> bool;
    let list: [(&[&str], Compare); 6] = [
        (&["eq", "equalto", "=="], |a, b| a == b),
        (&["ne", "!="], |a, b| a != b),
        (&["lt", "lessthan", "<"], |a, b| a < b),
        (&["le", "<="], |a, b| a <= b),
        (&["gt", "greaterthan", ">"], |a, b| a > b),
        (&["ge", ">="], |a, b| a >= b),
    ];
    for (names, compare) in list {
        for name in names {
            let m = meter.clone();
            env.add_test(*name, move |a: &Value, b: &Value| m.read(b).map(|()| compare(a, b)));
        }
    }
    let m = meter.clone();
    env.add_test("in", move |a: &Value, b: &Value| {
        m.read(b)?;
        match (a.as_str(), b.as_str()) {
            (Some(a), Some(b)) => Ok(b.contains(a)),
            _ => b.try_iter().map(|mut items| items.any(|item| item == *a)),
        }
    });
    // Not in jinja2.
    env.remove_test("startingwith");
    env.remove_test("endingwith");
}

fn integer(value: &Value) -> Option<i128> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => None,
        ValueKind::Number | ValueKind::Bool => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

pub(super) fn float(value: &Value) -> Outcome<f64> {
    match value.kind() {
        ValueKind::Number | ValueKind::Bool => f64::try_from(value.clone()),
        kind => Err(fail(format!("a number is needed, got {kind}"))),
    }
}

fn sum(a: &Value, b: &Value) -> Outcome<Value> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Value::from([a, b].concat()));
    }
    if a.kind() == ValueKind::Seq && b.kind() == ValueKind::Seq {
        return Ok(a.try_iter()?.chain(b.try_iter()?).collect());
    }
    if let (Some(a), Some(b)) = (integer(a), integer(b)) {
        let sum = a.checked_add(b).ok_or_else(|| fail("`+` gives too large a number"))?;
        return Ok(Value::from(sum));
    }
    match (float(a), float(b)) {
        (Ok(a), Ok(b)) => Ok(Value::from(a + b)),
        _ => Err(fail(format!("`+` between {} and {}", a.kind(), b.kind()))),
    }
}

fn product(a: &Value, b: &Value, meter: &Meter) -> Outcome<Value> {
    let (value, n) = match (integer(a), integer(b)) {
        (Some(a), Some(b)) => {
            let product = a.checked_mul(b).ok_or_else(|| fail("`*` gives too large a number"))?;
            return Ok(Value::from(product));
        }
        (None, Some(n)) if a.kind() != ValueKind::Number => (a, n),
        (Some(n), None) if b.kind() != ValueKind::Number => (b, n),
        _ => return Ok(Value::from(float(a)? * float(b)?)),
    };
    let n = usize::try_from(n.max(0)).map_err(|_| fail("`*` repeats too often"))?;
    let n_byte =
        value.as_str().map_or_else(|| value.len().map(|len| len * NODE_COST), |s| Some(s.len()));
    meter.charge(n_byte.unwrap_or(0).saturating_mul(n))?;
    match value.as_str() {
        Some(text) => Ok(Value::from(text.repeat(n))),
        None => {
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok((0..n).flat_map(|_| items.iter().cloned()).collect())
        }
    }
}

fn remainder(a: &Value, b: &Value, meter: &Meter) -> Outcome<Value> {
    if let Some(format) = a.as_str() {
        let list = matches!(b.kind(), ValueKind::Seq | ValueKind::Iterable);
        let args = if list { b.try_iter()?.collect() } else { vec![b.clone()] };
        return Ok(Value::from(formatted(FormatStyle::Printf, format, &args, meter)?));
    }
    match (integer(a), integer(b)) {
        (_, Some(0)) => Err(fail("`%` by zero")),
        (Some(a), Some(b)) => {
            let rest = a.checked_rem(b).unwrap_or(0);
            Ok(Value::from(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
        _ => {
            let (a, b) = (float(a)?, float(b)?);
            Ok(Value::from(a - b * (a / b).floor()))
        }
    }
}

/// `format` filled in. Each place may hold all of `args`, and a width makes that many spaces.
fn formatted(style: FormatStyle, format: &str, args: &[Value], meter: &Meter) -> Outcome<String> {
    if format.contains('*') || format.split(|ch: char| !ch.is_ascii_digit()).any(|n| n.len() > 3) {
        return Err(fail("a format with a width of more than 999, or with `*`"));
    }
    let n_place = format.matches(['%', '{']).count();
    let n_byte: usize = args.iter().map(Meter::size).sum();
    meter.charge(n_place.saturating_mul(n_byte.saturating_add(999)))?;
    format_filter(style, format, args)
}

/// Python's slice.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Outcome<Value> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    let part = |part: &Value| match part.is_none() {
        true => Ok(None),
        false => i64::try_from(part.clone()).map(Some),
    };
    let (start, stop, step) = (part(start)?, part(stop)?, part(step)?.unwrap_or(1));
    let chars: Option<Vec<char>> = value.as_str().map(|text| text.chars().collect());
    let items: Vec<Value> = match (&chars, value.kind()) {
        (Some(_), _) => Vec::new(),
        (None, ValueKind::Seq | ValueKind::Iterable) => value.try_iter()?.collect(),
        (None, kind) => return Err(fail(format!("a slice of {kind}"))),
    };
    let len = chars.as_ref().map_or(items.len(), Vec::len) as i64;
    if step == 0 {
        return Err(fail("a slice with step 0"));
    }
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |at: Option<i64>, open: i64| {
        at.map_or(open, |at| if at < 0 { at.saturating_add(len) } else { at }.clamp(low, high))
    };
    let (mut at, end) = if step > 0 {
        (place(start, 0), place(stop, len))
    } else {
        (place(start, len - 1), place(stop, -1))
    };
    let mut places = Vec::new();
    while if step > 0 { at < end } else { at > end } {
        places.push(at as usize);
        at = at.saturating_add(step);
    }
    Ok(match chars {
        Some(chars) => Value::from(places.into_iter().map(|at| chars[at]).collect::<String>()),
        None => places.into_iter().map(|at| items[at].clone()).collect(),
    })
}

fn number_filters(env: &mut Environment<'static>) {
    env.add_filter("int", |value: &Value, default: Option<i64>| {
        let parsed = value.as_str().and_then(|text| {
            let text = text.trim();
            text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|x| x as i64))
        });
        match value.kind() {
            ValueKind::Number | ValueKind::Bool => float(value).map(|x| x as i64),
            _ => Ok(parsed.or(default).unwrap_or(0)),
        }
    });
    env.add_filter("round", |value: &Value, n: Option<i32>| {
        let scale = 10f64.powi(n.unwrap_or(0).clamp(-300, 300));
        float(value).map(|x| (x * scale).round_ties_even() / scale)
    });
}

fn filters(env: &mut Environment<'static>, meter: &Arc<Meter>) {
    let m = meter.clone();
    env.add_filter("tojson", move |value: &Value, indent: Option<usize>, named: Kwargs| {
        json(value, indent, &named, &m)
    });
    let m = meter.clone();
    env.add_filter("string", move |value: &Value| text(value, &m));
    let m = meter.clone();
    env.add_filter("join", move |list: &Value, glue: Option<Value>, named: Kwargs| {
        let attribute: Option<String> = named.get("attribute")?;
        let glue = match named.get::<Option<Value>>("d")?.or(glue) {
            Some(glue) => text(&glue, &m)?,
            None => String::new(),
        };
        named.assert_all_used()?;
        let mut out = String::new();
        for (idx, item) in list.try_iter()?.enumerate() {
            m.charge(glue.len())?;
            out.push_str(if idx > 0 { &glue } else { "" });
            let item = attribute.as_ref().map_or(Ok(item.clone()), |name| item.get_attr(name))?;
            out.push_str(&text(&item, &m)?);
        }
        Ok::<_, Error>(out)
    });
    let m = meter.clone();
    env.add_filter("replace", move |value: &Value, old: &str, new: &str, n: Option<i64>| {
        replaced(&text(value, &m)?, old, new, n.unwrap_or(-1), &m)
    });
    let m = meter.clone();
    env.add_filter("indent", move |value: &Value, args: Rest<Value>, named: Kwargs| {
        indented(&text(value, &m)?, &args, &named, &m)
    });
    env.add_filter("title", |value: &str| titled(value, |ch| " -({[<\n\t".contains(ch)));
    let m = meter.clone();
    env.add_filter("trim", move |value: &Value, chars: Option<&str>| {
        let value = text(value, &m)?;
        let is_trimmed = |ch: char| chars.map_or(ch.is_whitespace(), |chars| chars.contains(ch));
        Ok::<_, Error>(value.trim_matches(is_trimmed).to_string())
    });
    let m = meter.clone();
    env.add_filter("upper", move |value: &Value| Ok::<_, Error>(text(value, &m)?.to_uppercase()));
    let m = meter.clone();
    env.add_filter("lower", move |value: &Value| Ok::<_, Error>(text(value, &m)?.to_lowercase()));
    env.add_filter("wordcount", |value: &str| value.split_whitespace().count());
    env.add_filter("length", |value: &Value| match value.is_undefined() {
        true => Ok(0),
        false => value.len().ok_or_else(|| fail(format!("the length of {}", value.kind()))),
    });
    env.add_filter("items", |value: &Value| -> Outcome<Vec<Value>> {
        match value.is_undefined() {
            true => Ok(Vec::new()),
            false => pairs(value),
        }
    });
    let m = meter.clone();
    env.add_filter("format", move |format: &str, args: Rest<Value>| {
        formatted(FormatStyle::Printf, format, &args, &m)
    });
}

fn pairs(map: &Value) -> Outcome<Vec<Value>> {
    let pair = |key: Value| Ok(Value::from(vec![key.clone(), map.get_item(&key)?]));
    map.try_iter()?.map(pair).collect()
}

fn replaced(value: &str, old: &str, new: &str, n: i64, meter: &Meter) -> Outcome<String> {
    let n = usize::try_from(n).unwrap_or(usize::MAX);
    let n_hit = value.matches(old).count().min(n);
    meter.charge(value.len().saturating_add(n_hit.saturating_mul(new.len())))?;
    Ok(value.replacen(old, new, n))
}

fn indented(value: &str, args: &[Value], named: &Kwargs, meter: &Meter) -> Outcome<String> {
    let arg = |idx: usize, name: &str| -> Outcome<Option<Value>> {
        Ok(args.get(idx).cloned().or(named.get(name)?))
    };
    let margin = match arg(0, "width")? {
        Some(text) if text.as_str().is_some() => text.to_string(),
        width => {
            let width = width.map_or(Ok(4), usize::try_from)?;
            meter.charge(width)?;
            " ".repeat(width)
        }
    };
    let is_first = arg(1, "first")?.is_some_and(|value| value.is_true());
    let is_blank = arg(2, "blank")?.is_some_and(|value| value.is_true());
    let mut out = String::new();
    for (idx, line) in value.split('\n').enumerate() {
        meter.charge(margin.len())?;
        out.push_str(if idx > 0 { "\n" } else { "" });
        let is_wanted = if idx == 0 { is_first } else { is_blank || !line.is_empty() };
        out.push_str(if is_wanted { &margin } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Each letter after `is_gap` in upper case, the others in lower case.
fn titled(value: &str, is_gap: impl Fn(char) -> bool) -> String {
    let mut out = String::new();
    let mut is_start = true;
    for ch in value.chars() {
        if is_start {
            out.extend(ch.to_uppercase())
        } else {
            out.extend(ch.to_lowercase())
        }
        is_start = is_gap(ch);
    }
    out
}

/// Methods of strings that pycompat lacks, or where it differs.
fn method(
    state: &State,
    value: &Value,
    name: &str,
    args: &[Value],
    meter: &Meter,
) -> Outcome<Value> {
    let Some(s) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    let arg = |idx: usize| args.get(idx).and_then(Value::as_str);
    let chars_before = |at: Option<usize>| match at {
        Some(at) => Value::from(s[..at].chars().count()),
        None => Value::from(-1),
    };
    let cased = |is: fn(char) -> bool, not: fn(char) -> bool| {
        Value::from(s.chars().any(is) && !s.chars().any(not))
    };
    let list = |parts: &[&str]| parts.iter().map(|part| Value::from(*part)).collect::<Value>();
    let all = |is: fn(char) -> bool| Value::from(!s.is_empty() && s.chars().all(is));
    if name.contains("split") {
        if arg(0) == Some("") {
            return Err(fail("`split` by an empty string"));
        }
        let n_part = match arg(0) {
            Some(part) => s.matches(part).count(),
            None => s.chars().filter(|ch| ch.is_whitespace()).count(),
        };
        meter.charge(n_part * NODE_COST)?;
    }
    Ok(match (name, arg(0)) {
        ("find", Some(part)) if args.len() == 1 => chars_before(s.find(part)),
        ("rfind", Some(part)) if args.len() == 1 => chars_before(s.rfind(part)),
        ("count", Some(part)) if args.len() == 1 => Value::from(s.matches(part).count()),
        ("removeprefix", Some(part)) => Value::from(s.strip_prefix(part).unwrap_or(s)),
        ("removesuffix", Some(part)) => Value::from(s.strip_suffix(part).unwrap_or(s)),
        ("partition", Some(part)) => {
            let (a, b) = s.split_once(part).ok_or(()).map_or((s, None), |(a, b)| (a, Some(b)));
            list(&[a, if b.is_some() { part } else { "" }, b.unwrap_or("")])
        }
        ("rpartition", Some(part)) => {
            let (a, b) = s.rsplit_once(part).map_or((None, s), |(a, b)| (Some(a), b));
            list(&[a.unwrap_or(""), if a.is_some() { part } else { "" }, b])
        }
        ("rsplit", Some(part)) if !part.is_empty() => {
            let n = args.get(1).map_or(Ok(-1), |n| i64::try_from(n.clone()))?;
            let n = usize::try_from(n).map_or(usize::MAX, |n| n.saturating_add(1));
            let mut parts: Vec<&str> = s.rsplitn(n, part).collect();
            parts.reverse();
            list(&parts)
        }
        ("replace", Some(old)) => {
            let new = arg(1).ok_or_else(|| fail("`replace` needs two strings"))?;
            let n = args.get(2).map_or(Ok(-1), |n| i64::try_from(n.clone()))?;
            Value::from(replaced(s, old, new, n, meter)?)
        }
        ("join", None) if args.len() == 1 => {
            let mut out = String::new();
            for (idx, item) in args[0].try_iter()?.enumerate() {
                meter.charge(s.len())?;
                out.push_str(if idx > 0 { s } else { "" });
                out.push_str(item.as_str().ok_or_else(|| fail("`join` of what is no string"))?);
            }
            Value::from(out)
        }
        ("format", _) => Value::from(formatted(FormatStyle::StrFormat, s, args, meter)?),
        ("title", None) => Value::from(titled(s, |ch| !ch.is_alphabetic())),
        ("islower", None) => cased(char::is_lowercase, char::is_uppercase),
        ("isupper", None) => cased(char::is_uppercase, char::is_lowercase),
        ("isdigit" | "isnumeric" | "isdecimal", None) => all(char::is_numeric),
        ("isalpha", None) => all(char::is_alphabetic),
        ("isalnum", None) => all(char::is_alphanumeric),
        ("isspace", None) => all(char::is_whitespace),
        _ => return pycompat::unknown_method_callback(state, value, name, args),
    })
}
