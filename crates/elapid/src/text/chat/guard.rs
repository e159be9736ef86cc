//! Makes a template safe to run: whatever it reads or writes in full is charged to a budget.
//!
//! minijinja counts instructions, but one instruction may double a string, compare shared lists
//! forever or repeat a list 10^18 times, and its operators cannot be overridden. So the compiled
//! instructions are changed: operators become calls of our functions (see `python`), which charge
//! what they read and compute as Python does; filters, tests and methods are called through one
//! function each. The names of these functions hold a space, so that no template can use them.
//!
//! This needs `unstable_machinery`, whose types change without notice: the version is pinned.

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions, Token};
use minijinja::machinery::{Span, WhitespaceConfig};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::cell::Cell;
use std::ops::Range;

/// Tokens in one tag. A chain of operators nests as deep as it is long, and is walked by
/// recursion.
const TAG_TOKEN_MAX: usize = 1000;

/// Branches of all `if`s together: each `elif` nests in the one before.
const ELIF_MAX: usize = 500;

/// Nesting of values read.
const VALUE_DEPTH_MAX: usize = 100;

/// What a value costs besides the bytes of its strings.
pub(super) const NODE_COST: usize = 64;

const SPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

thread_local! {
    /// Bytes that the rendering on this thread may still read and write.
    static BUDGET: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn with_budget<T>(n_byte: usize, f: impl FnOnce() -> T) -> T {
    let before = BUDGET.replace(n_byte);
    let result = f();
    BUDGET.set(before);
    result
}

/// What reading the whole of `value` costs.
pub(super) fn size(value: &Value) -> usize {
    with_budget(usize::MAX, || {
        // Too deep a value is an error once a template reads it.
        let _ = read(value);
        usize::MAX - BUDGET.get()
    })
}

/// Takes `n_byte` from the budget.
pub(super) fn charge(n_byte: usize) -> Result<(), Error> {
    let left = BUDGET
        .get()
        .checked_sub(n_byte)
        .ok_or_else(|| Error::new(ErrorKind::OutOfFuel, "the template handles too many bytes"))?;
    BUDGET.set(left);
    Ok(())
}

/// Charges the whole of `value`, shared parts as often as they are met.
pub(super) fn read(value: &Value) -> Result<(), Error> {
    read_part(value, VALUE_DEPTH_MAX)
}

fn read_part(value: &Value, depth: usize) -> Result<(), Error> {
    charge(NODE_COST + value.as_str().map_or(0, str::len))?;
    super::python::refuse_special(value)?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    let Some(depth) = depth.checked_sub(1) else {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep"));
    };
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            read_part(&value.get_item(&item)?, depth)?;
        }
        read_part(&item, depth)?;
    }
    Ok(())
}

/// Charges the items of `value`, not what is in them. Lazy lists are made, so that they never
/// nest.
pub(super) fn read_level(value: Value) -> Result<Value, Error> {
    super::python::refuse_special(&value)?;
    if value.kind() == ValueKind::Iterable {
        let item = |item| charge(NODE_COST).map(|()| item);
        return Ok(Value::from(value.try_iter()?.map(item).collect::<Result<Vec<_>, _>>()?));
    }
    // Of a string, a list of its characters is made.
    let n_item = value.as_str().map_or_else(|| value.len().unwrap_or(1), str::len);
    charge(n_item.saturating_mul(NODE_COST)).map(|()| value)
}

/// Checks the tokens of a template and returns its source with literals that are not constant.
///
/// Refused are tags too long for recursion over the tree, and tags about other templates. A
/// literal `x` becomes `[x][0]`, because the compiler of minijinja evaluates what is constant.
/// Training marks what the assistant says with `{% generation %}`: an `if` in its place gives the
/// same text and keeps the rules for space around tags.
pub(super) fn checked_source(source: &str) -> Result<String, Error> {
    let (mut n_tag, mut n_elif) = (0, 0);
    let mut before = Token::TemplateData("");
    // Places of literals, and of other tokens with what comes instead.
    let mut edits: Vec<(Range<usize>, Option<&str>)> = Vec::new();
    for token in machinery::tokenize(source, false, Default::default(), SPACE) {
        let (token, span) = token?;
        let place = span.start_offset as usize..span.end_offset as usize;
        let is_text = |token: &Token| matches!(token, Token::Str(_) | Token::String(_));
        let is_number = matches!(token, Token::Int(_) | Token::Int128(_) | Token::Float(_));
        match edits.last_mut() {
            // Strings beside each other are one; the 1 of `x.1` is a name.
            Some(last) if is_text(&token) && is_text(&before) => last.0.end = place.end,
            _ if is_text(&token) || is_number && !matches!(before, Token::Dot) => {
                edits.push((place.clone(), None));
            }
            _ => {}
        }
        match (&before, &token) {
            (_, Token::VariableStart | Token::BlockStart) => n_tag = 0,
            (
                Token::BlockStart,
                Token::Ident(
                    name @ ("include" | "import" | "from" | "extends" | "block" | "autoescape"),
                ),
            ) => return Err(syntax_error(format!("the tag `{name}` is not supported"), span)),
            (Token::BlockStart, Token::Ident("generation")) => edits.push((place, Some("if true"))),
            (Token::BlockStart, Token::Ident("endgeneration")) => {
                edits.push((place, Some("endif")));
            }
            (_, Token::Ident("elif")) => n_elif += 1,
            _ => n_tag += 1,
        }
        if n_tag > TAG_TOKEN_MAX {
            return Err(syntax_error(format!("a tag of more than {TAG_TOKEN_MAX} tokens"), span));
        }
        if n_elif > ELIF_MAX {
            return Err(syntax_error(format!("more than {ELIF_MAX} `elif`"), span));
        }
        before = token;
    }
    let (mut out, mut done) = (String::with_capacity(source.len() * 2), 0);
    for (place, instead) in edits {
        out.push_str(&source[done..place.start]);
        match instead {
            Some(text) => out.push_str(text),
            None => out.extend(["[", &source[place.clone()], "][0]"]),
        }
        done = place.end;
    }
    Ok(out + &source[done..])
}

fn syntax_error(problem: String, span: Span) -> Error {
    let line = span.start_line;
    Error::new(ErrorKind::SyntaxError, format!("line {line}: {problem}"))
}

pub(super) fn compiled(source: &str) -> Result<Instructions<'_>, Error> {
    let tree = machinery::parse(source, "template", Default::default(), SPACE)?;
    let mut code = CodeGenerator::new("template", source);
    code.compile_stmt(&tree);
    let (code, _) = code.finish();
    let parts: Vec<_> = (0..code.len() as u32).map(|at| guarded(&code, at)).collect();
    let starts: Vec<u32> = std::iter::once(0)
        .chain(parts.iter().scan(0, |at, part| {
            *at += part.len() as u32;
            Some(*at)
        }))
        .collect();
    let mut out = Instructions::new("template", source);
    for (at, part) in (0..).zip(parts) {
        let line = code.get_line(at).unwrap_or(0) as u16;
        for mut instruction in part {
            match &mut instruction {
                Instruction::Iterate(to)
                | Instruction::Jump(to)
                | Instruction::JumpIfFalse(to)
                | Instruction::JumpIfFalseOrPop(to)
                | Instruction::JumpIfTrueOrPop(to)
                | Instruction::BuildMacro(_, to, _) => *to = starts[*to as usize],
                _ => {}
            }
            out.add_with_line(instruction, line);
        }
    }
    Ok(out)
}

/// The end of the loop with an `else` whose next item is taken at `at`.
fn loop_with_else(code: &Instructions<'_>, at: u32) -> Option<u32> {
    let Some(Instruction::Iterate(end)) = code.get(at) else { return None };
    matches!(code.get(*end), Some(Instruction::PushDidNotIterate)).then_some(*end)
}

/// What runs in place of the instruction at `at`.
fn guarded<'a>(code: &Instructions<'a>, at: u32) -> Vec<Instruction<'a>> {
    use Instruction::*;
    let Some(instruction) = code.get(at) else { return Vec::new() };
    let same = || instruction.clone();
    let call = |name, n_arg| CallFunction(name, Some(n_arg));
    let operator = |name| vec![call(name, 2)];
    // The name of the filter, test or method becomes the last argument.
    let named = |function, name: &str, n_arg: Option<u16>| match n_arg {
        Some(n) => vec![LoadConst(Value::from(name)), call(function, n + 1)],
        // The number of arguments lies on top of them.
        None => vec![
            LoadConst(Value::from(name)),
            Swap,
            LoadConst(Value::from(1)),
            Add,
            CallFunction(function, None),
        ],
    };
    match instruction {
        EmitRaw(text) => vec![LoadConst(Value::from(*text)), Emit],
        Add => operator("add "),
        Mul => operator("mul "),
        Div => operator("div "),
        Rem => operator("rem "),
        Pow => operator("pow "),
        StringConcat => operator("concat "),
        Eq => operator("== "),
        Ne => operator("!= "),
        Lt => operator("< "),
        Lte => operator("<= "),
        Gt => operator("> "),
        Gte => operator(">= "),
        Neg => vec![call("neg ", 1)],
        Slice => vec![call("slice ", 4)],
        In | CompareAndPreserve(_) => {
            vec![BuildList(Some(2)), call("meter ", 1), UnpackList(2), Swap, same()]
        }
        GetItem => vec![call("meter ", 1), same()],
        BuildList(_) | BuildMap(_) => vec![same(), call("meter ", 1)],
        SetAttr(name) => vec![LoadConst(Value::from(*name)), call("set ", 3), DiscardTop],
        // In jinja2, `else` runs where no turn came to its end: `continue` and `break` count as
        // none. Whether one did lies on the stack while the loop runs.
        PushLoop(_) if loop_with_else(code, at + 1).is_some() => {
            vec![call("items ", 1), same(), LoadConst(Value::from(false))]
        }
        Jump(to) if loop_with_else(code, *to) == Some(at + 1) => {
            vec![DiscardTop, LoadConst(Value::from(true)), same()]
        }
        PushDidNotIterate => vec![Not],
        PushLoop(_) => vec![call("items ", 1), same()],
        ApplyFilter(name, n_arg, _) => named("filter ", name, *n_arg),
        PerformTest(name, n_arg, _) => named("test ", name, *n_arg),
        CallMethod(name, n_arg) => named("method ", name, *n_arg),
        _ => vec![same()],
    }
}
