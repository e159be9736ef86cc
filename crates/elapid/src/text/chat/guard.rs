//! Makes a template safe to run: every operand that is read in full passes a meter.
//!
//! minijinja counts instructions, but one instruction may double a string, compare shared lists
//! for ever or repeat a list 10^18 times, and constants are folded when a template is compiled.
//! So the tree is written anew before that: operands of operators, filters, tests and calls
//! become `meter (x)`, a function that charges the size of `x` and gives `x` back; text between
//! tags becomes an expression, so that the formatter sees it; `*`, `/`, `%`, `**`, order and
//! slices become functions of ours, which also do as Python does. Their names hold a space, so
//! that no template can name them.
//!
//! This needs `unstable_machinery`, whose types change without notice: the version is pinned.

use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt};
use minijinja::machinery::{Span, Token};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tokens in one tag. A chain of operators nests as deep as it is long, and is walked by
/// recursion.
const TAG_TOKEN_MAX: usize = 1000;

/// Branches of all `if`s together: each `elif` nests in the one before.
const ELIF_MAX: usize = 500;

/// Nesting of values read.
const VALUE_DEPTH_MAX: usize = 100;

/// What a value costs besides the bytes of its strings.
pub(super) const NODE_COST: usize = 64;

/// Bytes a rendering may still read and write.
#[derive(Debug)]
pub(super) struct Meter(AtomicUsize);

impl Meter {
    pub(super) fn new(n_byte: usize) -> Meter {
        Meter(AtomicUsize::new(n_byte))
    }

    /// What reading the whole of `value` costs.
    pub(super) fn size(value: &Value) -> usize {
        let meter = Meter::new(usize::MAX);
        // Too deep a value is an error once a template reads it.
        let _ = meter.read(value);
        usize::MAX - meter.0.into_inner()
    }

    /// Takes `n_byte` from what is left.
    pub(super) fn charge(&self, n_byte: usize) -> Result<(), Error> {
        let left = self.0.load(Ordering::Relaxed).checked_sub(n_byte).ok_or_else(|| {
            Error::new(ErrorKind::OutOfFuel, "the template handles too many bytes")
        })?;
        self.0.store(left, Ordering::Relaxed);
        Ok(())
    }

    /// Charges the whole of `value`, shared parts as often as they are met. Namespaces may not be
    /// parts: they change, so that a value could grow deep, or hold itself.
    pub(super) fn read(&self, value: &Value) -> Result<(), Error> {
        self.read_part(value, VALUE_DEPTH_MAX)
    }

    fn read_part(&self, value: &Value, depth: usize) -> Result<(), Error> {
        self.charge(NODE_COST + value.as_str().map_or(0, str::len))?;
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
            return Ok(());
        }
        let Some(depth) = depth.checked_sub(1) else {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep"));
        };
        refuse_namespace(value)?;
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                self.read_part(&value.get_item(&item)?, depth)?;
            }
            self.read_part(&item, depth)?;
        }
        Ok(())
    }

    /// Charges the items of `value`, not what is in them. What is lazy is made, so that lazy
    /// lists never nest.
    pub(super) fn read_level(&self, value: Value) -> Result<Value, Error> {
        match value.kind() {
            ValueKind::Iterable => {
                let item = |item| self.charge(NODE_COST).map(|()| item);
                Ok(Value::from(value.try_iter()?.map(item).collect::<Result<Vec<_>, _>>()?))
            }
            ValueKind::Seq | ValueKind::Map => {
                refuse_namespace(&value)?;
                let n_item = value.len().unwrap_or(0);
                self.charge(n_item.saturating_mul(NODE_COST)).map(|()| value)
            }
            // Of a string, a list of its characters is made.
            _ => {
                let n_char = value.as_str().map_or(1, str::len);
                self.charge(n_char.saturating_mul(NODE_COST)).map(|()| value)
            }
        }
    }
}

pub(super) fn refuse_namespace(value: &Value) -> Result<(), Error> {
    match value.as_object() {
        Some(object) if object.type_name().ends_with("::Namespace") => {
            Err(Error::new(ErrorKind::InvalidOperation, "a namespace is no value"))
        }
        _ => Ok(()),
    }
}

/// Looks at the tokens of a template before it is parsed.
#[derive(Default)]
pub(super) struct TokenCheck {
    n_tag: usize,
    n_elif: usize,
}

impl TokenCheck {
    /// Refuses tags too long for recursion over the tree, and tags about other templates.
    pub(super) fn check(&mut self, token: &Token, span: Span) -> Result<(), Error> {
        match token {
            Token::VariableStart | Token::BlockStart => self.n_tag = 0,
            Token::Ident(
                name @ ("include" | "import" | "from" | "extends" | "block" | "autoescape"),
            ) if self.n_tag == 0 => {
                return Err(syntax_error(format!("the tag `{name}` is not supported"), span));
            }
            Token::Ident("elif") => self.n_elif += 1,
            _ => self.n_tag += 1,
        }
        if self.n_tag > TAG_TOKEN_MAX {
            return Err(syntax_error(format!("a tag of more than {TAG_TOKEN_MAX} tokens"), span));
        }
        if self.n_elif > ELIF_MAX {
            return Err(syntax_error(format!("more than {ELIF_MAX} `elif`"), span));
        }
        Ok(())
    }
}

fn syntax_error(problem: String, span: Span) -> Error {
    let line = span.start_line;
    Error::new(ErrorKind::SyntaxError, format!("line {line}: {problem}"))
}

fn call<'a>(name: &'static str, args: Vec<Expr<'a>>, span: Span) -> Expr<'a> {
    let expr = Expr::Var(Spanned::new(ast::Var { id: name }, span));
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Call(Spanned::new(ast::Call { expr, args }, span))
}

fn constant<'a>(value: Value, span: Span) -> Expr<'a> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

/// `expr`, charged where its value can be large.
fn metered<'a>(expr: &Expr<'a>) -> Expr<'a> {
    let span = expr.span();
    match expr {
        Expr::Const(c) if c.value.is_number() || c.value.is_none() => self::expr(expr),
        _ => call("meter ", vec![self::expr(expr)], span),
    }
}

/// The value of a filter or test, charged for as much of it as that reads.
fn subject<'a>(name: &str, args: &[CallArg<'a>], x: &Expr<'a>) -> Expr<'a> {
    let by_attribute = args.iter().all(|arg| matches!(arg, CallArg::Kwarg(..)));
    match name {
        "length" | "count" | "first" | "default" | "d" | "defined" | "undefined" | "none"
        | "string" | "mapping" | "iterable" | "sequence" | "number" | "boolean" | "integer"
        | "float" | "true" | "false" | "callable" => expr(x),
        "map" if by_attribute => level(x),
        "last" | "list" | "items" | "select" | "reject" | "selectattr" | "rejectattr" => level(x),
        "map" | "sort" | "unique" | "groupby" | "min" | "max" | "sum" => {
            call("meter ", vec![level(x)], x.span())
        }
        _ => metered(x),
    }
}

fn level<'a>(x: &Expr<'a>) -> Expr<'a> {
    call("level ", vec![expr(x)], x.span())
}

fn args<'a>(list: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let one = |arg: &CallArg<'a>| match arg {
        CallArg::Pos(x) => CallArg::Pos(metered(x)),
        CallArg::Kwarg(name, x) => CallArg::Kwarg(name, metered(x)),
        CallArg::PosSplat(x) => CallArg::PosSplat(metered(x)),
        CallArg::KwargSplat(x) => CallArg::KwargSplat(metered(x)),
    };
    list.iter().map(one).collect()
}

fn exprs<'a>(list: &[Expr<'a>]) -> Vec<Expr<'a>> {
    list.iter().map(expr).collect()
}

fn binary<'a>(x: &ast::BinOp<'a>, span: Span) -> Expr<'a> {
    let name = match x.op {
        BinOpKind::ScAnd | BinOpKind::ScOr => {
            let (left, right) = (expr(&x.left), expr(&x.right));
            return Expr::BinOp(Spanned::new(ast::BinOp { op: x.op, left, right }, span));
        }
        BinOpKind::Add => return call("add ", vec![expr(&x.left), expr(&x.right)], span),
        BinOpKind::Mul => "mul ",
        BinOpKind::Div => "div ",
        BinOpKind::Rem => "rem ",
        BinOpKind::Pow => "pow ",
        BinOpKind::Concat => "concat ",
        BinOpKind::Lt => return order(&x.left, "<", &x.right, span),
        BinOpKind::Lte => return order(&x.left, "<=", &x.right, span),
        BinOpKind::Gt => return order(&x.left, ">", &x.right, span),
        BinOpKind::Gte => return order(&x.left, ">=", &x.right, span),
        _ => {
            let (left, right) = (metered(&x.left), metered(&x.right));
            return Expr::BinOp(Spanned::new(ast::BinOp { op: x.op, left, right }, span));
        }
    };
    call(name, vec![metered(&x.left), metered(&x.right)], span)
}

fn order<'a>(left: &Expr<'a>, op: &str, right: &Expr<'a>, span: Span) -> Expr<'a> {
    let op = constant(Value::from(op), span);
    call("order ", vec![metered(left), op, metered(right)], span)
}

fn compare<'a>(x: &ast::Compare<'a>, span: Span) -> Expr<'a> {
    let op = |op: &ast::CompareOp<'a>| ast::CompareOp { op: op.op, expr: metered(&op.expr) };
    let compare = ast::Compare { expr: metered(&x.expr), ops: x.ops.iter().map(op).collect() };
    Expr::Compare(Spanned::new(compare, span))
}

fn expr<'a>(node: &Expr<'a>) -> Expr<'a> {
    let span = node.span();
    match node {
        Expr::Var(x) => Expr::Var(Spanned::new(ast::Var { id: x.id }, span)),
        Expr::Const(x) => constant(x.value.clone(), span),
        Expr::Slice(x) => {
            let part = |part: &Option<Expr<'a>>| match part {
                Some(part) => expr(part),
                None => constant(Value::from(()), span),
            };
            let parts = vec![level(&x.expr), part(&x.start), part(&x.stop), part(&x.step)];
            call("slice ", parts, span)
        }
        Expr::UnaryOp(x) => {
            // The kind can neither be copied nor moved.
            let is_not = matches!(x.op, ast::UnaryOpKind::Not);
            let op = if is_not { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: expr(&x.expr) }, span))
        }
        Expr::BinOp(x) => binary(x, span),
        Expr::Compare(x) => compare(x, span),
        Expr::IfExpr(x) => {
            let (test_expr, true_expr) = (expr(&x.test_expr), expr(&x.true_expr));
            let false_expr = x.false_expr.as_ref().map(expr);
            Expr::IfExpr(Spanned::new(ast::IfExpr { test_expr, true_expr, false_expr }, span))
        }
        Expr::Filter(x) => {
            let expr = x.expr.as_ref().map(|expr| subject(x.name, &x.args, expr));
            let args = args(&x.args);
            Expr::Filter(Spanned::new(ast::Filter { name: x.name, expr, args }, span))
        }
        Expr::Test(x) => {
            let (expr, args) = (subject(x.name, &x.args, &x.expr), args(&x.args));
            Expr::Test(Spanned::new(ast::Test { name: x.name, expr, args }, span))
        }
        Expr::GetAttr(x) => after_minus(&x.expr, &|expr| {
            Expr::GetAttr(Spanned::new(ast::GetAttr { expr, name: x.name }, span))
        }),
        Expr::GetItem(x) => after_minus(&x.expr, &|expr| {
            let subscript_expr = metered(&x.subscript_expr);
            Expr::GetItem(Spanned::new(ast::GetItem { expr, subscript_expr }, span))
        }),
        Expr::Call(x) => Expr::Call(call_of(x)),
        Expr::List(x) => {
            let items = x.items.iter().map(metered).collect();
            Expr::List(Spanned::new(ast::List { items }, span))
        }
        Expr::Map(x) => {
            let all = |list: &[Expr<'a>]| list.iter().map(metered).collect();
            let (keys, values) = (all(&x.keys), all(&x.values));
            Expr::Map(Spanned::new(ast::Map { keys, values }, span))
        }
    }
}

/// What is assigned to: names, `namespace.name`, or a list of them.
fn target<'a>(node: &Expr<'a>) -> Expr<'a> {
    match node {
        Expr::List(x) => {
            let items = x.items.iter().map(target).collect();
            Expr::List(Spanned::new(ast::List { items }, x.span()))
        }
        other => expr(other),
    }
}

fn call_of<'a>(x: &Spanned<ast::Call<'a>>) -> Spanned<ast::Call<'a>> {
    let target = match &x.expr {
        Expr::GetAttr(method) => {
            let (expr, name) = (metered(&method.expr), method.name);
            Expr::GetAttr(Spanned::new(ast::GetAttr { expr, name }, method.span()))
        }
        other => expr(other),
    };
    Spanned::new(ast::Call { expr: target, args: args(&x.args) }, x.span())
}

fn macro_of<'a>(x: &Spanned<ast::Macro<'a>>) -> Spanned<ast::Macro<'a>> {
    let (args, defaults, body) = (exprs(&x.args), exprs(&x.defaults), body(&x.body));
    Spanned::new(ast::Macro { name: x.name, args, defaults, body }, x.span())
}

fn body<'a>(list: &[Stmt<'a>]) -> Vec<Stmt<'a>> {
    list.iter().filter_map(statement).collect()
}

/// A loop. In jinja2, `else` runs where no turn came to its end: `continue` counts as none.
fn for_loop<'a>(x: &Spanned<ast::ForLoop<'a>>) -> Stmt<'a> {
    let span = x.span();
    let mut for_loop = ast::ForLoop {
        target: target(&x.target),
        iter: call("items ", vec![expr(&x.iter)], x.iter.span()),
        filter_expr: x.filter_expr.as_ref().map(expr),
        recursive: x.recursive,
        body: body(&x.body),
        else_body: Vec::new(),
    };
    if x.else_body.is_empty() {
        return Stmt::ForLoop(Spanned::new(for_loop, span));
    }
    let ran = || Expr::Var(Spanned::new(ast::Var { id: "ran " }, span));
    let flag = || Expr::GetAttr(Spanned::new(ast::GetAttr { expr: ran(), name: "yes" }, span));
    let set = ast::Set { target: flag(), expr: constant(Value::from(true), span) };
    for_loop.body.push(Stmt::Set(Spanned::new(set, span)));
    let cond = ast::IfCond { expr: flag(), true_body: Vec::new(), false_body: body(&x.else_body) };
    let block = ast::WithBlock {
        assignments: vec![(ran(), call("namespace ", Vec::new(), span))],
        body: vec![
            Stmt::ForLoop(Spanned::new(for_loop, span)),
            Stmt::IfCond(Spanned::new(cond, span)),
        ],
    };
    Stmt::WithBlock(Spanned::new(block, span))
}

/// The statement, metered; none for the tags that `TokenCheck` refuses.
pub(super) fn statement<'a>(node: &Stmt<'a>) -> Option<Stmt<'a>> {
    Some(match node {
        Stmt::Template(x) => {
            Stmt::Template(Spanned::new(ast::Template { children: body(&x.children) }, x.span()))
        }
        Stmt::EmitExpr(x) => {
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: expr(&x.expr) }, x.span()))
        }
        Stmt::EmitRaw(x) => {
            let expr = constant(Value::from(x.raw), x.span());
            Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, x.span()))
        }
        Stmt::ForLoop(x) => for_loop(x),
        Stmt::IfCond(x) => {
            let (true_body, false_body) = (body(&x.true_body), body(&x.false_body));
            let cond = ast::IfCond { expr: expr(&x.expr), true_body, false_body };
            Stmt::IfCond(Spanned::new(cond, x.span()))
        }
        Stmt::WithBlock(x) => {
            let assignments = x.assignments.iter().map(|(a, b)| (target(a), expr(b))).collect();
            let block = ast::WithBlock { assignments, body: body(&x.body) };
            Stmt::WithBlock(Spanned::new(block, x.span()))
        }
        Stmt::Set(x) => {
            let value = expr(&x.expr);
            let value = match x.target {
                Expr::GetAttr(_) => call("plain ", vec![value], x.expr.span()),
                _ => value,
            };
            let set = ast::Set { target: target(&x.target), expr: value };
            Stmt::Set(Spanned::new(set, x.span()))
        }
        Stmt::SetBlock(x) => {
            let (target, filter) = (target(&x.target), x.filter.as_ref().map(expr));
            let block = ast::SetBlock { target, filter, body: body(&x.body) };
            Stmt::SetBlock(Spanned::new(block, x.span()))
        }
        Stmt::FilterBlock(x) => {
            let block = ast::FilterBlock { filter: expr(&x.filter), body: body(&x.body) };
            Stmt::FilterBlock(Spanned::new(block, x.span()))
        }
        Stmt::Macro(x) => Stmt::Macro(macro_of(x)),
        Stmt::CallBlock(x) => {
            let block =
                ast::CallBlock { call: call_of(&x.call), macro_decl: macro_of(&x.macro_decl) };
            Stmt::CallBlock(Spanned::new(block, x.span()))
        }
        Stmt::Continue(x) => Stmt::Continue(Spanned::new(ast::Continue, x.span())),
        Stmt::Break(x) => Stmt::Break(Spanned::new(ast::Break, x.span())),
        Stmt::Do(x) => Stmt::Do(Spanned::new(ast::Do { call: call_of(&x.call) }, x.span())),
        _ => return None,
    })
}

/// Takes a part of a value: minijinja reads `-x[1]` as `(-x)[1]`, jinja2 takes the item first.
fn after_minus<'a>(value: &Expr<'a>, part: &dyn Fn(Expr<'a>) -> Expr<'a>) -> Expr<'a> {
    match value {
        Expr::UnaryOp(minus) if matches!(minus.op, ast::UnaryOpKind::Neg) => {
            let (op, expr) = (ast::UnaryOpKind::Neg, after_minus(&minus.expr, part));
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr }, minus.span()))
        }
        other => part(expr(other)),
    }
}
