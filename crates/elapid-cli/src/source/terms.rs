//! What an index knows of source code in any language: identifiers and their parts, definitions,
//! lines that import, and pieces of a file that read well alone.
//!
//! No language is parsed. A definition is a word such as `fn`, `def` or `class` with a name after
//! it; `readHTTPHeader` and `read_http_header` have the parts read, http and header.

use std::ops::Range;

/// A hash of an identifier or of a part of one, in lower case. Two that collide are taken for one:
/// that costs a little relevance.
pub type Term = u32;

/// Lines of a piece: at least (but for the last one) and at most.
const PIECE_LINES: Range<usize> = 20..40;
const PIECE_BYTES_MAX: usize = 4096;

/// Words with the name of what they define behind them.
const DEFINES: [&str; 17] = [
    "class",
    "const",
    "def",
    "enum",
    "fn",
    "func",
    "function",
    "fun",
    "interface",
    "macro_rules",
    "mod",
    "module",
    "namespace",
    "static",
    "struct",
    "trait",
    "type",
];

/// Words that a line begins with which names another file.
const IMPORTS: [&str; 10] = [
    "use",
    "pub use",
    "import",
    "from",
    "#include",
    "require",
    "require_relative",
    "using",
    "mod",
    "export",
];

pub fn term(text: &str) -> Term {
    let fold = |hash: u32, byte: u8| {
        (hash ^ u32::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0193)
    };
    text.bytes().fold(0x811c_9dc5, fold)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Identifiers of two characters and more.
pub fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !is_word(c));
    words.filter(|word| word.len() > 1 && !word.starts_with(|c: char| c.is_ascii_digit()))
}

/// Gives out the terms of an identifier: itself, and its parts where it has several.
pub fn terms(identifier: &str, give: &mut impl FnMut(Term)) {
    give(term(identifier));
    let bytes = identifier.as_bytes();
    let mut start = 0;
    for at in 1..=bytes.len() {
        let is_cut = at == bytes.len() || bytes[at] == b'_' || bytes[at - 1] == b'_' || {
            let next_is_lower = bytes.get(at + 1).is_some_and(u8::is_ascii_lowercase);
            bytes[at].is_ascii_uppercase() && (bytes[at - 1].is_ascii_lowercase() || next_is_lower)
        };
        if is_cut {
            let part = &identifier.as_bytes()[start..at];
            if part.len() > 1 && part.len() < bytes.len() {
                // Cuts are beside ASCII, so between characters.
                give(term(str::from_utf8(part).unwrap_or_default()));
            }
            start = at;
        }
    }
}

/// Names that a line defines.
pub fn definition(line: &str) -> Option<&str> {
    if ["//", "/*", "*", "# ", "--"].iter().any(|mark| line.trim_start().starts_with(mark)) {
        return None;
    }
    let mut words = line.split(|c: char| !is_word(c)).filter(|word| !word.is_empty());
    let keyword = words.by_ref().take(5).find(|word| DEFINES.contains(word))?;
    // `func (r *Reader) Read(`: the name follows the receiver.
    if keyword == "func"
        && let Some(rest) = line.split_once("func (").and_then(|pair| pair.1.split_once(')'))
    {
        return identifiers(rest.1).next();
    }
    // `const fn name`, `static const char`, `function* name`.
    words.find(|word| !DEFINES.contains(word)).filter(|word| word.len() > 1)
}

/// Words of the paths that lines of this text import: `./my-parser` has my_parser.
pub fn imported(text: &str) -> Vec<Term> {
    let imports = |line: &&str| {
        let line = line.trim_start();
        let begins =
            |word: &str| line.strip_prefix(word).is_some_and(|rest| !rest.starts_with(is_word));
        IMPORTS.iter().any(|word| begins(word)) || line.contains("require(")
    };
    let words = |line: &str| -> Vec<Term> {
        let words = line.split(|c: char| !is_word(c) && c != '-');
        words.filter(|word| word.len() > 2).map(|word| term(&word.replace('-', "_"))).collect()
    };
    text.lines().filter(imports).flat_map(words).collect()
}

/// Names of files that say less than their folder does.
const EMPTY_STEMS: [&str; 5] = ["__init__", "index", "lib", "main", "mod"];

/// What a file is called where it is imported.
pub fn stem(path: &str) -> Term {
    let mut parts = path.rsplit('/');
    let own = parts.next().unwrap_or_default();
    let own = own.split('.').next().unwrap_or_default();
    let name = if EMPTY_STEMS.contains(&own) { parts.next().unwrap_or(own) } else { own };
    term(&name.replace('-', "_"))
}

/// Cuts a file into pieces, at blank lines before something new where there are some.
pub fn pieces(text: &str) -> Vec<Range<usize>> {
    let mut starts = vec![0];
    starts.extend(text.match_indices('\n').map(|(at, _)| at + 1));
    if starts.last() != Some(&text.len()) {
        starts.push(text.len());
    }
    let n_lines = starts.len() - 1;
    let line = |n: usize| &text[starts[n]..starts[n + 1]];
    let (mut pieces, mut first) = (Vec::new(), 0);
    while first < n_lines {
        let bytes_end = starts[first] + PIECE_BYTES_MAX;
        let mut end = n_lines.min(first + PIECE_LINES.end);
        if starts[end] > bytes_end {
            end = starts.partition_point(|start| *start <= bytes_end).max(first + 2) - 1;
        }
        if end < n_lines {
            end = cut(first, end, &line);
        }
        pieces.push(starts[first]..starts[end]);
        first = end;
    }
    pieces
}

/// Where a piece from line `first` ends that may not reach past line `end`.
fn cut<'a>(first: usize, end: usize, line: &impl Fn(usize) -> &'a str) -> usize {
    let is_blank = |n: usize| line(n).trim().is_empty();
    let is_outer = |n: usize| !line(n).starts_with([' ', '\t', '}', ')', ']', '\n', '\r']);
    let mut range = first + PIECE_LINES.start.min(end - first)..=end;
    let outer = range.clone().find(|&n| is_blank(n - 1) && is_outer(n));
    let blank = || range.clone().rev().find(|&n| is_blank(n - 1));
    outer.or_else(blank).or_else(|| range.find(|&n| definition(line(n)).is_some())).unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(identifier: &str) -> Vec<Term> {
        let mut list = Vec::new();
        terms(identifier, &mut |term| list.push(term));
        list
    }

    #[test]
    fn identifiers_have_the_same_parts_in_every_spelling() {
        let parts = ["read", "http", "header"].map(term);
        assert_eq!(all("readHTTPHeader")[1..], parts);
        assert_eq!(all("read_http_header")[1..], parts);
        assert_eq!(all("READ_HTTP_HEADER")[1..], parts);
        assert_eq!(all("plain"), [term("plain")]);
        assert_eq!(all("größe_Übung")[0], term("größe_Übung"));
        let list: Vec<&str> = identifiers("let x1 = foo.bar(a, 0xff);").collect();
        assert_eq!(list, ["let", "x1", "foo", "bar"]);
    }

    #[test]
    fn definitions_are_known_in_many_languages() {
        let lines = [
            ("pub(crate) async fn name(x: u8) {", Some("name")),
            ("    def name(self):", Some("name")),
            ("export default class Name extends X {", Some("Name")),
            ("func (r *Reader) Name(p []byte) {", Some("Name")),
            ("func Name(p []byte) {", Some("Name")),
            ("export const name = () => {", Some("name")),
            ("pub const fn name() {", Some("name")),
            ("    name(1);", None),
            ("return type", None),
            ("// the function of this", None),
        ];
        for (line, want) in lines {
            assert_eq!(definition(line), want, "{line}");
        }
    }

    #[test]
    fn imports_name_the_files_that_they_mean() {
        let text = "import { x } from './my-parser'\nuse crate::text::lexer;\nlet other = 1;\n\
                    const z = require(\"../zipper\")\n#include \"vector.h\"\nfrom .models import A";
        let words = imported(text);
        for path in ["src/my-parser.ts", "lexer.rs", "zipper/index.js", "vector.h", "models.py"] {
            assert!(words.contains(&stem(path)), "{path}");
        }
        assert!(!words.contains(&stem("other.rs")));
    }

    #[test]
    fn pieces_cover_a_file_and_begin_where_something_begins() {
        let function = |n: usize| format!("fn f{n}() {{\n{}}}\n\n", "    a();\n".repeat(9));
        let text: String = (0..10).map(function).collect();
        let pieces = pieces(&text);
        let starts = pieces.iter().map(|piece| piece.start);
        assert!(starts.clone().all(|start| text[start..].starts_with("fn f")), "{pieces:?}");
        let joined: String = pieces.iter().map(|piece| &text[piece.clone()]).collect();
        assert_eq!(joined, text);
        let long = format!("{}\n", "x ".repeat(9000)).repeat(3) + "no end";
        let pieces = super::pieces(&long);
        let joined: String = pieces.iter().map(|piece| &long[piece.clone()]).collect();
        assert_eq!((joined, pieces.len()), (long, 4));
        assert!(super::pieces("").is_empty());
    }
}
