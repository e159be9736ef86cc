//! Where minijinja differs from jinja2: operators, filters, tests and methods.
//!
//! Only what templates meet: slices with negative steps, division, `%` on strings, methods of
//! strings that pycompat lacks or does otherwise. Whatever can grow is charged to the budget of
//! `guard` before it is made.

use super::guard::{NODE_COST, charge, read, read_level, size};
use super::text::{json, text};
use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, Output, State, format_filter};
use minijinja_contrib::pycompat;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

pub(super) type Outcome<T> = Result<T, Error>;

/// Longest `range`, as in jinja2's sandbox.
const RANGE_MAX: i64 = 100_000;

pub(super) fn fail(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Sets up filters, tests, functions, methods and printing.
pub(super) fn install(env: &mut Environment<'static>) {
    // The first two make as many empty cells as asked for; the others are not in jinja2.
    for name in ["batch", "slice", "split", "lines", "chain", "zip"] {
        env.remove_filter(name);
    }
    env.remove_global("debug");
    env.set_formatter(|out: &mut Output, _: &State, value: &Value| {
        Ok(out.write_str(&text(value)?)?)
    });
    env.set_unknown_method_callback(method);
    operators(env);
    calls(env);
    filters(env);
    number_filters(env);
    env.add_function("range", range);
    env.add_function("dict", |given: Option<Value>, named: Kwargs| {
        Ok::<_, Error>(Value::from_iter(entries(given, &named)?))
    });
    env.add_function("namespace", |given: Option<Value>, named: Kwargs| {
        let entries = entries(given, &named)?;
        let entries = entries.into_iter().map(|(key, value)| (key.to_string(), value));
        Ok::<_, Error>(Value::from_object(Namespace(Mutex::new(entries.collect()))))
    });
    comparisons(env);
    env.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    env.add_test("sequence", |value: &Value| {
        !matches!(value.kind(), ValueKind::Number | ValueKind::Bool | ValueKind::None)
    });
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
}

/// What `namespace` gives: variables that a loop may change.
#[derive(Debug)]
struct Namespace(Mutex<BTreeMap<String, Value>>);

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key.as_str()?).cloned()
    }
}

/// `-x` of what is no number. minijinja reads `-x[1]` as `(-x)[1]`: the item is negated instead.
#[derive(Debug)]
struct Negated(Value);

impl Object for Negated {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        Some(self.0.get_item(key).and_then(negated).unwrap_or_else(Value::from))
    }
}

/// Refuses what cannot be part of a value: a namespace changes, so that a value could grow deep
/// or hold itself.
pub(super) fn refuse_special(value: &Value) -> Outcome<()> {
    if value.downcast_object_ref::<Namespace>().is_some() {
        return Err(fail("a namespace cannot be used as a value"));
    }
    match value.downcast_object_ref::<Negated>() {
        Some(Negated(value)) => Err(fail(format!("`-` cannot be applied to {}", value.kind()))),
        None => Ok(()),
    }
}

/// The entries of `dict` and `namespace`: a map or pairs, then named ones.
fn entries(given: Option<Value>, named: &Kwargs) -> Outcome<Vec<(Value, Value)>> {
    let mut list = Vec::new();
    if let Some(given) = given {
        read(&given)?;
        let pairs = if given.kind() == ValueKind::Map { pairs(&given)?.into() } else { given };
        for pair in pairs.try_iter()? {
            list.push((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
        }
    }
    for name in named.args() {
        let value = named.get::<Value>(name)?;
        read(&value)?;
        list.push((Value::from(name), value));
    }
    Ok(list)
}

fn range(start: i64, stop: Option<i64>, step: Option<i64>) -> Outcome<Value> {
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
    charge(n as usize * NODE_COST)?;
    Ok((0..n as i64).map(|idx| start + idx * step).collect())
}

fn operators(env: &mut Environment<'static>) {
    env.add_function("meter ", |value: Value| {
        read(&value)?;
        if value.kind() == ValueKind::Iterable { read_level(value) } else { Ok(value) }
    });
    env.add_function("items ", |value: Value| match value.is_none() {
        true => Err(fail("none is not iterable")),
        false => Ok(value),
    });
    env.add_function("set ", |value: Value, target: &Value, name: &str| {
        let Some(Namespace(entries)) = target.downcast_object_ref() else {
            return Err(fail(format!("only namespaces are assigned to, not {}", target.kind())));
        };
        // Macros hold variables: a namespace of them could grow deep.
        if value.kind() == ValueKind::Plain {
            return Err(fail("a namespace cannot be used as a value, nor hold a function"));
        }
        let mut entries = entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.insert(name.to_string(), value);
        Ok(())
    });
    env.add_function("add ", sum);
    env.add_function("concat ", |a: &Value, b: &Value| Ok::<_, Error>(text(a)? + &text(b)?));
    env.add_function("mul ", product);
    env.add_function("div ", |a: &Value, b: &Value| {
        let (a, b) = (float(a)?, float(b)?);
        if b == 0.0 { Err(fail("division by zero")) } else { Ok(a / b) }
    });
    env.add_function("pow ", |a: &Value, b: &Value| match integer(b) {
        Some(..0) => Ok(Value::from(float(a)?.powf(float(b)?))),
        _ => {
            let whole = |a: i128, b| u32::try_from(b).ok().and_then(|b| a.checked_pow(b));
            arithmetic("**", a, b, whole, f64::powf)
        }
    });
    env.add_function("rem ", remainder);
    env.add_function("neg ", negated);
    env.add_function("slice ", slice);
}

/// Filters, tests and methods, whose name is the last argument.
fn calls(env: &mut Environment<'static>) {
    /// Charges the arguments, and as much of the first as is read.
    fn metered(mut args: Vec<Value>) -> Outcome<(String, Vec<Value>)> {
        let name = args.pop().map_or(String::new(), |name| name.to_string());
        let by_attribute = args[1..].iter().all(Value::is_kwargs);
        let subject = std::mem::take(&mut args[0]);
        args[0] = match name.as_str() {
            "length" | "count" | "first" | "default" | "d" | "defined" | "undefined" | "none"
            | "string" | "mapping" | "iterable" | "sequence" | "number" | "boolean" | "integer"
            | "float" | "true" | "false" | "callable" => subject,
            "map" if by_attribute => read_level(subject)?,
            "last" | "list" | "items" | "select" | "reject" | "selectattr" | "rejectattr" => {
                read_level(subject)?
            }
            "map" | "sort" | "unique" | "groupby" | "min" | "max" | "sum" => {
                let subject = read_level(subject)?;
                read(&subject)?;
                subject
            }
            _ => {
                read(&subject)?;
                subject
            }
        };
        args[1..].iter().try_for_each(read)?;
        Ok((name, args))
    }
    fn known<T>(name: &str, result: Outcome<T>) -> Outcome<T> {
        result.map_err(|error| match (error.kind(), error.detail()) {
            (ErrorKind::UnknownFilter, None) => fail(format!("filter {name} is unknown")),
            (ErrorKind::UnknownTest, None) => fail(format!("test {name} is unknown")),
            _ => error,
        })
    }
    env.add_function("filter ", |state: &State, args: Rest<Value>| {
        let (name, args) = metered(args.0)?;
        known(&name, state.apply_filter(&name, &args))
    });
    env.add_function("test ", |state: &State, args: Rest<Value>| {
        let (name, args) = metered(args.0)?;
        known(&name, state.perform_test(&name, &args))
    });
    env.add_function("method ", |state: &State, args: Rest<Value>| {
        read(&args[0])?;
        let (name, args) = metered(args.0)?;
        args[0].call_method(state, &name, &args[1..])
    });
}

/// Comparisons, as operators (the last name) and as tests that `select` and its like run on
/// every item with the same, perhaps large, argument.
fn comparisons(env: &mut Environment<'static>) {
    type Compare = fn(&Value, &Value) -> bool;
    let list: [(&[&str], Compare); 6] = [
        (&["eq", "equalto", "=="], |a, b| a == b),
        (&["ne", "!="], |a, b| a != b),
        (&["lt", "lessthan", "<"], |a, b| a < b),
        (&["le", "<="], |a, b| a <= b),
        (&["gt", "greaterthan", ">"], |a, b| a > b),
        (&["ge", ">="], |a, b| a >= b),
    ];
    let kind = |value: &Value| match value.kind() {
        ValueKind::Bool => ValueKind::Number,
        ValueKind::Iterable => ValueKind::Seq,
        kind => kind,
    };
    for (names, compare) in list {
        let op = names[names.len() - 1];
        let compare = move |a: &Value, b: &Value| {
            read(a)?;
            read(b)?;
            let known = [ValueKind::Number, ValueKind::String, ValueKind::Seq];
            let is_ordered = kind(a) == kind(b) && known.contains(&kind(a));
            if matches!(op, "==" | "!=") || is_ordered {
                return Ok(compare(a, b));
            }
            Err(fail(format!("`{op}` cannot be applied to {} and {}", a.kind(), b.kind())))
        };
        names.iter().for_each(|name| env.add_test(*name, compare));
        env.add_function(format!("{op} "), compare);
    }
    env.add_test("in", |a: &Value, b: &Value| {
        read(b)?;
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

/// `a op b` of numbers; integers have 128 bits.
fn arithmetic(
    op: &str,
    a: &Value,
    b: &Value,
    whole: impl Fn(i128, i128) -> Option<i128>,
    real: impl Fn(f64, f64) -> f64,
) -> Outcome<Value> {
    if let (Some(a), Some(b)) = (integer(a), integer(b)) {
        let result = whole(a, b).ok_or_else(|| fail(format!("`{op}` gives too large a number")))?;
        return Ok(Value::from(result));
    }
    match (float(a), float(b)) {
        (Ok(a), Ok(b)) => Ok(Value::from(real(a, b))),
        _ => Err(fail(format!("`{op}` cannot be applied to {} and {}", a.kind(), b.kind()))),
    }
}

fn negated(value: Value) -> Outcome<Value> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Plain => {
            Ok(Value::from_object(Negated(value)))
        }
        _ => arithmetic("-", &Value::from(0), &value, i128::checked_sub, |_, x| -x),
    }
}

fn sum(a: Value, b: Value) -> Outcome<Value> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(&a) && is_list(&b) {
        let (a, b) = (read_level(a)?, read_level(b)?);
        return Ok(a.try_iter()?.chain(b.try_iter()?).collect());
    }
    arithmetic("+", &a, &b, i128::checked_add, |a, b| a + b)
}

fn product(a: &Value, b: &Value) -> Outcome<Value> {
    let (value, n) = match (integer(a), integer(b)) {
        (None, Some(n)) if a.kind() != ValueKind::Number => (a, n),
        (Some(n), None) if b.kind() != ValueKind::Number => (b, n),
        _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| a * b),
    };
    let n = usize::try_from(n.max(0)).map_err(|_| fail("`*` repeats too often"))?;
    let n_byte =
        value.as_str().map_or_else(|| value.len().map(|len| len * NODE_COST), |s| Some(s.len()));
    charge(n_byte.unwrap_or(0).saturating_mul(n))?;
    match value.as_str() {
        Some(text) => Ok(Value::from(text.repeat(n))),
        None => {
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok((0..n).flat_map(|_| items.iter().cloned()).collect())
        }
    }
}

fn remainder(a: &Value, b: &Value) -> Outcome<Value> {
    if let Some(format) = a.as_str() {
        let list = matches!(b.kind(), ValueKind::Seq | ValueKind::Iterable);
        let args = if list { b.try_iter()?.collect() } else { vec![b.clone()] };
        return Ok(Value::from(formatted(FormatStyle::Printf, format, &args)?));
    }
    if integer(b) == Some(0) {
        return Err(fail("`%` by zero"));
    }
    let whole = |a: i128, b: i128| {
        let rest = a.checked_rem(b).unwrap_or(0);
        Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
    };
    arithmetic("%", a, b, whole, |a, b| a - b * (a / b).floor())
}

/// `format` filled in. Each place may hold all of `args`, and a width makes that many spaces.
fn formatted(style: FormatStyle, format: &str, args: &[Value]) -> Outcome<String> {
    if format.contains('*') || format.split(|ch: char| !ch.is_ascii_digit()).any(|n| n.len() > 3) {
        return Err(fail("a format with a width of more than 999, or with `*`"));
    }
    let n_place = format.matches(['%', '{']).count();
    let n_byte: usize = args.iter().map(size).sum();
    charge(n_place.saturating_mul(n_byte.saturating_add(999)))?;
    format_filter(style, format, args)
}

fn slice(value: Value, start: &Value, stop: &Value, step: &Value) -> Outcome<Value> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    let value = read_level(value)?;
    let part = |part: &Value| match part.is_none() {
        true => Ok(None),
        false => i64::try_from(part.clone()).map(Some),
    };
    let (start, stop, step) = (part(start)?, part(stop)?, part(step)?.unwrap_or(1));
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::String) {
        return Err(fail(format!("{} cannot be sliced", value.kind())));
    }
    if step == 0 {
        return Err(fail("a slice with step 0"));
    }
    let items: Vec<Value> = match value.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None => value.try_iter()?.collect(),
    };
    let len = items.len() as i64;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |at: Option<i64>, open: i64| {
        at.map_or(open, |at| if at < 0 { at.saturating_add(len) } else { at }.clamp(low, high))
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    let (start, end) = (place(start, first), place(stop, last));
    let places = std::iter::successors(Some(start), |at| Some(at.saturating_add(step)))
        .take_while(|at| if step > 0 { *at < end } else { *at > end });
    let parts = places.map(|at| items[at as usize].clone());
    Ok(match value.kind() {
        ValueKind::String => Value::from(parts.map(|part| part.to_string()).collect::<String>()),
        _ => parts.collect(),
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

fn filters(env: &mut Environment<'static>) {
    env.add_filter("tojson", |value: &Value, indent: Option<usize>, named: Kwargs| {
        json(value, indent, &named)
    });
    env.add_filter("string", |value: &Value| text(value));
    env.add_filter("join", |list: &Value, glue: Option<Value>, named: Kwargs| {
        let attribute: Option<String> = named.get("attribute")?;
        let glue = match named.get::<Option<Value>>("d")?.or(glue) {
            Some(glue) => text(&glue)?,
            None => String::new(),
        };
        named.assert_all_used()?;
        joined(list, &glue, |item| match &attribute {
            Some(name) => text(&item.get_attr(name)?),
            None => text(&item),
        })
    });
    env.add_filter("replace", |value: &Value, old: &str, new: &str, n: Option<i64>| {
        replaced(&text(value)?, old, new, n.unwrap_or(-1))
    });
    env.add_filter("indent", |value: &Value, args: Rest<Value>, named: Kwargs| {
        indented(&text(value)?, &args, &named)
    });
    env.add_filter("title", |value: &str| titled(value, |ch| " -({[<\n\t".contains(ch)));
    env.add_filter("trim", |value: &Value, chars: Option<&str>| {
        let value = text(value)?;
        let is_trimmed = |ch: char| chars.map_or(ch.is_whitespace(), |chars| chars.contains(ch));
        Ok::<_, Error>(value.trim_matches(is_trimmed).to_string())
    });
    env.add_filter("upper", |value: &Value| Ok::<_, Error>(text(value)?.to_uppercase()));
    env.add_filter("lower", |value: &Value| Ok::<_, Error>(text(value)?.to_lowercase()));
    env.add_filter("wordcount", |value: &str| value.split_whitespace().count());
    env.add_filter("length", |value: &Value| match value.is_undefined() {
        true => Ok(0),
        false => value.len().ok_or_else(|| fail(format!("{} has no length", value.kind()))),
    });
    env.add_filter("items", |value: &Value| -> Outcome<Vec<Value>> {
        match value.is_undefined() {
            true => Ok(Vec::new()),
            false => pairs(value),
        }
    });
    env.add_filter("format", |format: &str, args: Rest<Value>| {
        formatted(FormatStyle::Printf, format, &args)
    });
}

fn pairs(map: &Value) -> Outcome<Vec<Value>> {
    let pair = |key: Value| Ok(Value::from(vec![key.clone(), map.get_item(&key)?]));
    map.try_iter()?.map(pair).collect()
}

/// The texts of a list, `glue` between them.
fn joined(list: &Value, glue: &str, text: impl Fn(Value) -> Outcome<String>) -> Outcome<String> {
    let mut out = String::new();
    for (idx, item) in list.try_iter()?.enumerate() {
        charge(glue.len())?;
        out.push_str(if idx > 0 { glue } else { "" });
        out.push_str(&text(item)?);
    }
    Ok(out)
}

fn replaced(value: &str, old: &str, new: &str, n: i64) -> Outcome<String> {
    let n = usize::try_from(n).unwrap_or(usize::MAX);
    let n_hit = value.matches(old).count().min(n);
    charge(value.len().saturating_add(n_hit.saturating_mul(new.len())))?;
    Ok(value.replacen(old, new, n))
}

fn indented(value: &str, args: &[Value], named: &Kwargs) -> Outcome<String> {
    let arg = |idx: usize, name: &str| -> Outcome<Option<Value>> {
        Ok(args.get(idx).cloned().or(named.get(name)?))
    };
    let margin = match arg(0, "width")? {
        Some(text) if text.as_str().is_some() => text.to_string(),
        width => {
            let width = width.map_or(Ok(4), usize::try_from)?;
            charge(width)?;
            " ".repeat(width)
        }
    };
    let is_first = arg(1, "first")?.is_some_and(|value| value.is_true());
    let is_blank = arg(2, "blank")?.is_some_and(|value| value.is_true());
    let mut out = String::new();
    for (idx, line) in value.split('\n').enumerate() {
        charge(margin.len())?;
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
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Outcome<Value> {
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
            return Err(fail("`split` needs a separator that is not empty"));
        }
        let n_part = match arg(0) {
            Some(part) => s.matches(part).count(),
            None => s.chars().filter(|ch| ch.is_whitespace()).count(),
        };
        charge(n_part * NODE_COST)?;
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
            Value::from(replaced(s, old, new, n)?)
        }
        ("join", None) if args.len() == 1 => {
            let item = |item: Value| item.as_str().map(str::to_string);
            let item = |it| item(it).ok_or_else(|| fail("`join` needs strings"));
            Value::from(joined(&args[0], s, item)?)
        }
        ("format", _) => Value::from(formatted(FormatStyle::StrFormat, s, args)?),
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
