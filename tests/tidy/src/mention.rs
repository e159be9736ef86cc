//! Paths and macros that a piece of code names, also inside of macros and attributes.
//!
//! Works on tokens, so that nothing in comments or strings is found. What is for tests alone is
//! left out.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path of at least two names, the name behind `use`, or a macro.
#[derive(Debug, PartialEq)]
pub struct Mention {
    /// `*` stands for all names of a module.
    pub path: Vec<String>,
    pub line: usize,
    pub is_macro: bool,
}

/// Everything that `tokens` mention.
pub fn mentions(tokens: TokenStream) -> Vec<Mention> {
    let mut list = Vec::new();
    scan(tokens, &mut list);
    list
}

/// Whether an attribute keeps what follows it out of everything but tests and fuzzing:
/// `cfg(test)`, `cfg(all(test, ...))`, `cfg(any(test, fuzzing))`.
pub fn is_for_tests(attribute: &syn::Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    list.path.is_ident("cfg") && wants_test(list.tokens.clone())
}

fn wants_test(condition: TokenStream) -> bool {
    let tokens: Vec<_> = condition.into_iter().collect();
    match &tokens[..] {
        [TokenTree::Ident(name)] => name == "test" || name == "fuzzing",
        [TokenTree::Ident(name), TokenTree::Group(group)] if name == "all" => {
            conditions(group.stream()).into_iter().any(wants_test)
        }
        [TokenTree::Ident(name), TokenTree::Group(group)] if name == "any" => {
            conditions(group.stream()).into_iter().all(wants_test)
        }
        _ => false,
    }
}

fn conditions(list: TokenStream) -> Vec<TokenStream> {
    let mut parts = vec![Vec::new()];
    for token in list {
        if is_punct(Some(&token), ',') {
            parts.push(Vec::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(token);
        }
    }
    let parts = parts.into_iter().filter(|part| !part.is_empty());
    parts.map(|part| part.into_iter().collect()).collect()
}

fn is_punct(token: Option<&TokenTree>, want: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == want)
}

fn is_braces(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

fn is_path_separator(tokens: &[TokenTree], at: usize) -> bool {
    is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':')
}

fn scan(stream: TokenStream, list: &mut Vec<Mention>) {
    let tokens: Vec<_> = stream.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(end) = test_item_end(&tokens, at) {
            at = end;
            continue;
        }
        match &tokens[at] {
            TokenTree::Ident(_) => {
                let follows_use =
                    at > 0 && matches!(&tokens[at - 1], TokenTree::Ident(word) if word == "use");
                let n_before = list.len();
                let end = path(&tokens, at, &[], list);
                let is_one_name = list.len() == n_before + 1
                    && list[n_before].path.len() == 1
                    && !list[n_before].is_macro;
                if is_one_name && !follows_use {
                    list.truncate(n_before);
                }
                at = end;
            }
            TokenTree::Group(group) => {
                scan(group.stream(), list);
                at += 1;
            }
            TokenTree::Literal(literal) => {
                at += 1;
                if let Some(named) = path_in_string(&literal.to_string()) {
                    let line = literal.span().start().line;
                    list.push(Mention { path: named, line, is_macro: false });
                }
            }
            TokenTree::Punct(_) => at += 1,
        }
    }
}

/// Behind the item that an attribute at `at` leaves to tests.
fn test_item_end(tokens: &[TokenTree], at: usize) -> Option<usize> {
    let is_attribute = |at: usize| {
        is_punct(tokens.get(at), '#') && matches!(tokens.get(at + 1), Some(TokenTree::Group(_)))
    };
    if !is_attribute(at) {
        return None;
    }
    let TokenTree::Group(group) = &tokens[at + 1] else { return None };
    let inside: Vec<_> = group.stream().into_iter().collect();
    let [TokenTree::Ident(name), TokenTree::Group(condition)] = &inside[..] else { return None };
    if name != "cfg" || !wants_test(condition.stream()) {
        return None;
    }
    let mut end = at + 2;
    while is_attribute(end) {
        end += 2;
    }
    // A comma ends a field or a variant, but not the first parameter of `fn f<A, B>`.
    let mut is_item = false;
    while let Some(token) = tokens.get(end) {
        end += 1;
        is_item |= matches!(token, TokenTree::Ident(word) if word == "fn" || word == "impl");
        let is_end = is_punct(Some(token), ';') || (is_punct(Some(token), ',') && !is_item);
        if is_end || is_braces(token) {
            break;
        }
    }
    Some(end)
}

/// The paths that begin with the name at `at`, each behind `prefix`; returns what comes after them.
fn path(tokens: &[TokenTree], mut at: usize, prefix: &[String], list: &mut Vec<Mention>) -> usize {
    let line = tokens[at].span().start().line;
    let mut names = prefix.to_vec();
    while let Some(TokenTree::Ident(name)) = tokens.get(at) {
        names.push(name.to_string().trim_start_matches("r#").to_string());
        at += 1;
        if !is_path_separator(tokens, at) {
            break;
        }
        match tokens.get(at + 2) {
            Some(TokenTree::Ident(_)) => at += 2,
            Some(token @ TokenTree::Group(group)) if is_braces(token) => {
                use_group(group.stream(), &names, list);
                return at + 3;
            }
            Some(TokenTree::Punct(punct)) if punct.as_char() == '*' => {
                names.push("*".to_string());
                at += 3;
                break;
            }
            _ => break,
        }
    }
    let is_macro = is_punct(tokens.get(at), '!')
        && matches!(tokens.get(at + 1), Some(TokenTree::Group(_) | TokenTree::Ident(_)));
    list.push(Mention { path: names, line, is_macro });
    at
}

/// The trees between the braces of a `use`.
fn use_group(stream: TokenStream, prefix: &[String], list: &mut Vec<Mention>) {
    for tree in conditions(stream) {
        let tokens: Vec<_> = tree.into_iter().collect();
        let line = tokens[0].span().start().line;
        match &tokens[0] {
            TokenTree::Ident(name) if name == "self" => {
                list.push(Mention { path: prefix.to_vec(), line, is_macro: false });
            }
            TokenTree::Ident(_) => {
                path(&tokens, 0, prefix, list);
            }
            _ => {
                let path = [prefix, &["*".to_string()]].concat();
                list.push(Mention { path, line, is_macro: false });
            }
        }
    }
}

/// The path in a string of an attribute: `#[serde(with = "crate::a::b")]`.
fn path_in_string(literal: &str) -> Option<Vec<String>> {
    let text = literal.strip_prefix('"')?.strip_suffix('"')?;
    let names: Vec<_> = text.split("::").map(str::to_string).collect();
    let is_name = |name: &String| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let is_ours = ["crate", "self", "super"].contains(&names[0].as_str());
    (is_ours && names.len() > 1 && names.iter().all(is_name)).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(code: &str) -> Vec<String> {
        let list = mentions(code.parse().unwrap()).into_iter();
        let name = |one: Mention| one.path.join("::") + if one.is_macro { "!" } else { "" };
        list.map(name).collect()
    }

    #[test]
    fn finds_every_form_of_a_path() {
        assert_eq!(
            named("use a::{b, c::{self, d as e}, f::*};"),
            ["a::b", "a::c", "a::c::d", "a::f::*"]
        );
        assert_eq!(named("use tokio; use {std::fs, x::y};"), ["tokio", "std::fs", "x::y"]);
        assert_eq!(
            named("fn f(x: &crate::a::B<super::C>) -> u8 { x.y }"),
            ["crate::a::B", "super::C"]
        );
        assert_eq!(named("let x = <crate::a::B as c::D>::e(1);"), ["crate::a::B", "c::D"]);
        assert_eq!(
            named("vec![crate::a::b(1), { super::super::c }]"),
            ["vec!", "crate::a::b", "super::super::c"]
        );
        assert_eq!(named("#[serde(with = \"crate::a::b\")] struct S;"), ["crate::a::b"]);
        assert_eq!(
            named("std::println!(); macro_rules! m { () => {} } a != b;"),
            ["std::println!", "macro_rules!"]
        );
        assert_eq!(
            named("/// crate::a::b\nfn f() { let x = \"see crate::a::b\"; } // std::fs"),
            [""; 0]
        );
    }

    #[test]
    fn leaves_out_what_is_for_tests_alone() {
        assert_eq!(named("#[cfg(test)] #[allow(x)] fn f() { a::b() } c::d()"), ["c::d"]);
        assert_eq!(named("#[cfg(test)] fn f<A, B>(a: a::A) {} c::d()"), ["c::d"]);
        assert_eq!(named("struct S { #[cfg(test)] a: a::A, b: c::d }"), ["c::d"]);
        assert_eq!(named("#[cfg(all(unix, test))] use a::b; use c::d;"), ["c::d"]);
        assert_eq!(named("#[cfg(any(fuzzing, test))] use a::b; use c::d;"), ["c::d"]);
        assert_eq!(named("#[cfg(any(unix, test))] use a::b;"), ["a::b"]);
        assert_eq!(named("#[cfg(not(test))] use a::b;"), ["a::b"]);
    }
}
