//! Grammars of llama.cpp (GBNF) as grammars of llguidance (Lark).
//!
//! llguidance has a lexer: what cannot recurse becomes one terminal, a regular expression, so that
//! a grammar without recursion means exactly what it means in llama.cpp. In one that recurses,
//! terminals take as much as they can: `[0-9]+ ws` before `"\n"` takes the line break where `ws`
//! allows it.
//!
//! Not here: tokens by name or number (`<token>`), which llama.cpp takes since 2025.

use super::error::{Answered, ApiError};
use std::collections::BTreeMap;
use std::fmt::Write;

const N_RULES_MAX: usize = 2000;
const DEPTH_MAX: usize = 64;
const N_REPEAT_MAX: u32 = 10_000;

enum Node {
    Text(String),
    /// A set of characters, as a regular expression.
    Class(String),
    Rule(usize),
    All(Vec<Node>),
    Any(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

/// The same grammar in Lark.
pub fn to_lark(text: &str) -> Answered<String> {
    let mut parser = Parser { text, at: 0, names: BTreeMap::new(), rules: Vec::new() };
    parser.rules()?;
    let Some(&root) = parser.names.get("root") else { return Err(parser.wrong("no rule `root`")) };
    let missing = |(_, idx): &(&&str, &usize)| parser.rules[**idx].is_none();
    if let Some((name, _)) = parser.names.iter().find(missing) {
        return Err(parser.wrong(&format!("there is no rule `{name}`")));
    }
    let rules: Vec<Node> = parser.rules.into_iter().flatten().collect();
    // A rule is a terminal once all that it names are: those that recurse never become one.
    let mut flat = vec![false; rules.len()];
    loop {
        let more = (0..rules.len()).filter(|idx| !flat[*idx] && is_flat(&rules[*idx], &flat));
        let more: Vec<usize> = more.collect();
        if more.is_empty() {
            break;
        }
        more.into_iter().for_each(|idx| flat[idx] = true);
    }
    let mut lark = Lark { flat, lifted: String::new(), n_lifted: 0 };
    let mut out = format!("%llguidance {{}}\nstart: {}\n", lark.name(root));
    for (idx, node) in rules.iter().enumerate() {
        let body = match lark.flat[idx] {
            true => lark.terminal(node),
            false => lark.rule(node),
        };
        let _ = writeln!(out, "{}: {body}", lark.name(idx));
    }
    Ok(out + &lark.lifted)
}

fn is_flat(node: &Node, flat: &[bool]) -> bool {
    match node {
        Node::Text(_) | Node::Class(_) => true,
        Node::Rule(idx) => flat[*idx],
        Node::All(list) | Node::Any(list) => list.iter().all(|node| is_flat(node, flat)),
        Node::Repeat(node, ..) => is_flat(node, flat),
    }
}

struct Lark {
    /// Rules that are terminals.
    flat: Vec<bool>,
    /// Terminals that stood inside rules.
    lifted: String,
    n_lifted: usize,
}

impl Lark {
    fn name(&self, idx: usize) -> String {
        format!("{}{idx}", if self.flat[idx] { 'T' } else { 'r' })
    }

    /// A node within a rule: what is a terminal gets a line of its own.
    fn rule(&mut self, node: &Node) -> String {
        if matches!(node, Node::Text(_) | Node::Rule(_)) || !is_flat(node, &self.flat) {
            return self.spelled(node, Lark::rule);
        }
        let body = self.terminal(node);
        self.n_lifted += 1;
        let _ = writeln!(self.lifted, "L{}: {body}", self.n_lifted);
        format!("L{}", self.n_lifted)
    }

    fn terminal(&mut self, node: &Node) -> String {
        self.spelled(node, Lark::terminal)
    }

    fn spelled(&mut self, node: &Node, inner: fn(&mut Lark, &Node) -> String) -> String {
        let mut all = |list: &[Node], between: &str| {
            let list: Vec<String> = list.iter().map(|node| inner(self, node)).collect();
            format!("({})", list.join(between))
        };
        match node {
            Node::Text(text) => literal(text),
            Node::Class(class) => format!("/{class}/"),
            Node::Rule(idx) => self.name(*idx),
            Node::All(list) if list.is_empty() => literal(""),
            Node::All(list) => all(list, " "),
            Node::Any(list) => all(list, " | "),
            Node::Repeat(node, least, most) => {
                let most = most.map_or(String::new(), |n| n.to_string());
                format!("({}){{{least},{most}}}", inner(self, node))
            }
        }
    }
}

/// A text as JSON writes it, but for one character that Lark does not take.
fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// Numbers of rules, also of those that are named before they come.
    names: BTreeMap<&'a str, usize>,
    rules: Vec<Option<Node>>,
}

impl<'a> Parser<'a> {
    fn wrong(&self, words: &str) -> ApiError {
        let n_line = 1 + self.text[..self.at].matches('\n').count();
        ApiError::field("grammar", format!("line {n_line}: {words}"))
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn eat(&mut self, what: &str) -> bool {
        let is_there = self.rest().starts_with(what);
        self.at += if is_there { what.len() } else { 0 };
        is_there
    }

    /// Passes over blanks and comments, and over ends of lines where they mean nothing.
    fn skip(&mut self, is_nested: bool) {
        while let Some(ch) = self.rest().chars().next() {
            match ch {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if is_nested => self.at += 1,
                '#' => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Option<usize> {
        let is_part = |ch: char| ch.is_ascii_alphanumeric() || ch == '-' || ch == '_';
        let n = self.rest().find(|ch| !is_part(ch)).unwrap_or(self.rest().len());
        let name = &self.rest()[..n];
        self.at += n;
        let n_rules = self.rules.len();
        let idx = *self.names.entry(name).or_insert(n_rules);
        if idx == n_rules {
            self.rules.push(None);
        }
        (!name.is_empty()).then_some(idx)
    }

    fn rules(&mut self) -> Answered<()> {
        self.skip(true);
        while !self.rest().is_empty() {
            let idx = self.name().ok_or_else(|| self.wrong("expected the name of a rule"))?;
            self.skip(false);
            if !self.eat("::=") {
                return Err(self.wrong("expected `::=` behind the name of a rule"));
            }
            self.skip(true);
            let node = self.alternatives(0)?;
            if self.rules[idx].replace(node).is_some() {
                return Err(self.wrong("this rule is there twice"));
            }
            if self.rules.len() > N_RULES_MAX {
                return Err(self.wrong(&format!("more than {N_RULES_MAX} rules")));
            }
            if !self.rest().is_empty() && !self.rest().starts_with(['\n', '\r']) {
                return Err(self.wrong("expected the end of the rule"));
            }
            self.skip(true);
        }
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Answered<Node> {
        if depth > DEPTH_MAX {
            return Err(self.wrong("groups are nested too deeply"));
        }
        let mut list = vec![self.sequence(depth)?];
        while self.eat("|") {
            self.skip(true);
            list.push(self.sequence(depth)?);
        }
        Ok(if list.len() == 1 { list.remove(0) } else { Node::Any(list) })
    }

    fn sequence(&mut self, depth: usize) -> Answered<Node> {
        let mut list = Vec::new();
        while let Some(ch) = self.rest().chars().next() {
            let node = match ch {
                '"' => self.quoted()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Node::Class("[\\x{0}-\\x{10FFFF}]".into())
                }
                '(' => {
                    self.at += 1;
                    self.skip(true);
                    let node = self.alternatives(depth + 1)?;
                    if !self.eat(")") {
                        return Err(self.wrong("expected `)`"));
                    }
                    node
                }
                ch if ch.is_ascii_alphanumeric() => {
                    Node::Rule(self.name().ok_or_else(|| self.wrong("expected a name"))?)
                }
                '<' | '!' => return Err(self.wrong("tokens by name are not supported")),
                _ => break,
            };
            list.push(self.repeated(node)?);
            self.skip(depth > 0);
        }
        Ok(if list.len() == 1 { list.remove(0) } else { Node::All(list) })
    }

    fn repeated(&mut self, node: Node) -> Answered<Node> {
        let (least, most) = match self.rest().chars().next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.bounds()?,
            _ => return Ok(node),
        };
        self.at += 1;
        match self.rest().starts_with(['*', '+', '?', '{']) {
            true => Err(self.wrong("two repetitions in a row")),
            false => Ok(Node::Repeat(Box::new(node), least, most)),
        }
    }

    /// `{2}`, `{2,}` or `{2,3}`, up to its last character.
    fn bounds(&mut self) -> Answered<(u32, Option<u32>)> {
        let wrong = || self.wrong("expected {n}, {n,} or {n,m}");
        let n = self.rest().find('}').ok_or_else(wrong)?;
        let number = |text: &str| {
            let number = text.trim().parse().ok().filter(|n| *n <= N_REPEAT_MAX);
            number.ok_or_else(wrong)
        };
        let bounds = match self.rest()[1..n].split_once(',') {
            None => number(&self.rest()[1..n]).map(|n| (n, Some(n))),
            Some((least, most)) if most.trim().is_empty() => number(least).map(|n| (n, None)),
            Some((least, most)) => number(least).and_then(|n| Ok((n, Some(number(most)?)))),
        }?;
        if bounds.1.is_some_and(|most| most < bounds.0) {
            return Err(wrong());
        }
        self.at += n;
        Ok(bounds)
    }

    /// The next character of a text or class, which may be escaped.
    fn char(&mut self) -> Answered<char> {
        let open = |parser: &Parser| parser.wrong("a text or class has no end");
        let mut chars = self.rest().chars();
        let first = chars.next().filter(|ch| *ch != '\n').ok_or_else(|| open(self))?;
        self.at += first.len_utf8();
        if first != '\\' {
            return Ok(first);
        }
        let kind = chars.next().ok_or_else(|| open(self))?;
        self.at += kind.len_utf8();
        let n_digits = match kind {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' => return Ok(kind),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(self.wrong("unknown escape")),
        };
        let digits = self.rest().get(..n_digits).and_then(|it| u32::from_str_radix(it, 16).ok());
        let found = digits.and_then(char::from_u32);
        let found = found.ok_or_else(|| self.wrong("this escape is no character"))?;
        self.at += n_digits;
        Ok(found)
    }

    fn quoted(&mut self) -> Answered<Node> {
        self.at += 1;
        let mut text = String::new();
        while !self.eat("\"") {
            text.push(self.char()?);
        }
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Answered<Node> {
        self.at += 1;
        let mut class = String::from(if self.eat("^") { "[^" } else { "[" });
        let n_empty = class.len();
        while !self.eat("]") {
            let (first, mut last) = (self.char()?, None);
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                last = Some(self.char()?);
            }
            if last.is_some_and(|last| last < first) {
                return Err(self.wrong("a range of characters that is none"));
            }
            let _ = write!(class, "\\x{{{:X}}}", u32::from(first));
            if let Some(last) = last {
                let _ = write!(class, "-\\x{{{:X}}}", u32::from(last));
            }
        }
        match class.len() > n_empty {
            true => Ok(Node::Class(class + "]")),
            false => Err(self.wrong("an empty class of characters")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        to_lark(text).err().unwrap().message
    }

    #[test]
    fn a_grammar_without_recursion_is_one_terminal() {
        let lark = to_lark("root ::= yes | \"no\" # either\nyes ::= \"y\" [e-s]{2,}\n").unwrap();
        let want = "%llguidance {}\nstart: T0\nT0: (T1 | \"no\")\n\
                    T1: (\"y\" (/[\\x{65}-\\x{73}]/){2,})\n";
        assert_eq!(lark, want);
    }

    #[test]
    fn rules_that_recurse_stay_rules_and_may_span_lines() {
        let text = "root ::= \"(\" (root |\n  [^)\\n]+ )? \")\"\n";
        let want = "%llguidance {}\nstart: r0\nr0: (\"(\" ((r0 | L1)){0,1} \")\")\n\
                    L1: (/[^\\x{29}\\x{A}]/){1,}\n";
        assert_eq!(to_lark(text).unwrap(), want);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        assert!(refused("root ::= a\n").contains("there is no rule `a`"));
        assert!(refused("a ::= \"x\"").contains("no rule `root`"));
        assert!(refused("root ::= \"x\"\nroot ::= \"y\"\n").contains("twice"));
        assert!(refused("root ::= \"x\" )\n").contains("end of the rule"));
        assert!(refused("root ::= (\"x\"\n").contains("line 2: expected `)`"));
        assert!(refused("root ::= \"x\n").contains("no end"));
        assert!(refused("root ::= [b-a]").contains("range"));
        assert!(refused("root ::= \"\\q\"").contains("escape"));
        assert!(refused("root ::= \"a\"{3,2}").contains("{n,m}"));
        assert!(refused("root ::= \"a\"**").contains("in a row"));
        assert!(refused("root ::= <think>").contains("tokens by name"));
        assert!(refused(&format!("root ::= {}", "(".repeat(5000))).contains("deeply"));
        assert!(refused("hello").contains("`::=`"));
        assert!(refused("é").contains("name of a rule"));
    }
}
