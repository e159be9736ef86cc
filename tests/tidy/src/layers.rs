//! Which modules of a crate import which, and whether each imports only what stands below it.
//!
//! The order is the picture in ARCHITECTURE.md: a block that begins with ```` ```layers CRATE ````,
//! one line a layer, the highest first; names, then two spaces and what they are for.

use crate::mention::mentions;
use crate::tree::{Crate, Meaning};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};

/// A mention of one top module in another.
pub struct Edge {
    pub from: String,
    /// `the root` for what the root itself defines, and for all of its names.
    pub to: String,
    /// File, line and what is written there.
    pub place: String,
}

pub const ROOT: &str = "the root";

/// All mentions between different top modules. The root may mention everything.
pub fn edges(tree: &Crate) -> Vec<Edge> {
    let tops = tree.top_modules();
    let mut list = Vec::new();
    for module in tree.modules.iter().filter(|module| !module.path.is_empty()) {
        for item in module.items.iter() {
            for mention in mentions(item.to_token_stream()) {
                let Some(path) = absolute(&module.path, &mention.path) else { continue };
                let to = match path.first() {
                    Some(name) if tops.contains(name.as_str()) => name.clone(),
                    Some(name) => top_of(tree, name),
                    None => ROOT.to_string(),
                };
                let from = module.path[0].clone();
                if from != to {
                    let written = mention.path.join("::");
                    let place = format!("{}:{}: {written}", module.file, mention.line);
                    list.push(Edge { from, to, place });
                }
            }
        }
    }
    list
}

/// Names from the root, of a path that does not begin with a name in scope.
pub fn absolute(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let mut at = match path[0].as_str() {
        "crate" => Vec::new(),
        "self" => module.to_vec(),
        "super" => module[..module.len() - 1].to_vec(),
        _ => return None,
    };
    for name in &path[1..] {
        match name.as_str() {
            "super" => drop(at.pop()),
            name => at.push(name.to_string()),
        }
    }
    Some(at)
}

/// The top module of what the root re-exports under `name`.
fn top_of(tree: &Crate, name: &str) -> String {
    let meanings = tree.resolve(&[], &[name.to_string()]);
    let top = meanings.iter().find_map(|meaning| match meaning {
        Meaning::Module(path) => path.first(),
        Meaning::Item(module, _) => tree.modules[*module].path.first(),
        Meaning::Foreign(_) => None,
    });
    top.map_or(ROOT.to_string(), String::clone)
}

/// The layers that a document draws for a crate, the highest first.
pub fn drawn(document: &str, name: &str) -> Vec<Vec<String>> {
    let start = format!("```layers {name}");
    let lines = document.lines().skip_while(|line| line.trim() != start).skip(1);
    let lines = lines.take_while(|line| !line.starts_with("```"));
    let names = |line: &str| -> Vec<String> {
        let names = line.split("  ").next().unwrap_or("");
        names.split(',').map(|name| name.trim().to_string()).collect()
    };
    lines.filter(|line| !line.trim().is_empty()).map(names).collect()
}

/// Every edge that does not point downward, and every module that is drawn or there but not both.
pub fn offences(tree: &Crate, layers: &[Vec<String>]) -> Vec<String> {
    let height = |name: &str| layers.iter().rev().position(|layer| layer.iter().any(|n| n == name));
    let drawn: BTreeSet<&str> = layers.iter().flatten().map(String::as_str).collect();
    let tops = tree.top_modules();
    let missing = tops.difference(&drawn).map(|name| format!("{name}: not in the picture"));
    let gone =
        drawn.difference(&tops).map(|name| format!("{name}: in the picture, not in the code"));
    let mut list: Vec<String> = missing.chain(gone).collect();
    for edge in edges(tree) {
        let is_downward = edge.to != ROOT
            && match (height(&edge.from), height(&edge.to)) {
                (Some(from), Some(to)) => to < from,
                _ => true, // said above
            };
        if !is_downward {
            list.push(format!("{} ({} imports {})", edge.place, edge.from, edge.to));
        }
    }
    list
}

/// Numbers of mentions between pairs of top modules.
pub fn counts(edges: &[Edge]) -> BTreeMap<(&str, &str), usize> {
    let mut counts = BTreeMap::new();
    for edge in edges {
        *counts.entry((edge.from.as_str(), edge.to.as_str())).or_default() += 1;
    }
    counts
}

/// Modules that `from` imports, and those that they import.
fn reached<'a>(edges: &'a [Edge], from: &'a str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(at) = open.pop() {
        let next = edges.iter().filter(|edge| edge.from == at).map(|edge| edge.to.as_str());
        open.extend(next.filter(|name| reached.insert(*name)));
    }
    reached
}

/// Sets of modules that all reach each other.
pub fn cycles(edges: &[Edge]) -> BTreeSet<BTreeSet<&str>> {
    let all: BTreeMap<&str, BTreeSet<&str>> =
        edges.iter().map(|edge| (edge.from.as_str(), reached(edges, &edge.from))).collect();
    let circle = |name: &str| -> BTreeSet<&str> {
        let back = |other: &&&str| all.get(**other).is_some_and(|reached| reached.contains(name));
        all[name].iter().filter(back).copied().collect()
    };
    all.keys().map(|name| circle(name)).filter(|circle| !circle.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::of;

    fn found(files: &[(&str, &str)], picture: &str) -> Vec<String> {
        let document = format!("text\n```layers x\n{picture}```\nmore");
        offences(&of(files), &drawn(&document, "x"))
    }

    const PICTURE: &str = "high  what uses it\nmiddle, beside\nlow\n";
    const ROOT_FILE: (&str, &str) = ("src/lib.rs", "mod low; mod middle; mod beside; mod high;");

    fn with_low(low: &str) -> Vec<String> {
        let rest = [("src/high.rs", ""), ("src/middle/mod.rs", ""), ("src/beside.rs", "")];
        found(&[&[ROOT_FILE, ("src/low/mod.rs", low)], &rest[..]].concat(), PICTURE)
    }

    #[test]
    fn catches_what_points_upward() {
        let planted = "use crate::middle::A;";
        assert_eq!(with_low(planted), ["src/low/mod.rs:1: crate::middle::A (low imports middle)"]);
        for planted in [
            "\nfn f() { super::high::g() }",
            "\nuse super::{high, low::x};",
            "\nuse crate::high as h;",
            "\nfn f() -> Vec<crate::high::A> { Vec::new() }",
            "\nfn f() { println!(\"{}\", crate::high::A) }",
            "\nmod inner { use super::super::high::A; }",
            "\n#[cfg(not(test))] use crate::high::A;",
            "\nfn f() { use crate::high::*; }",
        ] {
            let list = with_low(planted);
            assert_eq!(list.len(), 1, "{planted}: {list:?}");
            assert!(list[0].starts_with("src/low/mod.rs:2: "), "{list:?}");
            assert!(list[0].ends_with("(low imports high)"), "{list:?}");
        }
        let sideways = [
            ROOT_FILE,
            ("src/low.rs", ""),
            ("src/high.rs", "use crate::{low::A, middle::B, beside::C};"),
            ("src/middle.rs", "use crate::beside::A;"),
            ("src/beside.rs", "use crate::low::A;"),
        ];
        let place = "src/middle.rs:1: crate::beside::A (middle imports beside)";
        assert_eq!(found(&sideways, PICTURE), [place]);
    }

    #[test]
    fn lets_pass_what_is_below_or_for_tests_alone() {
        let fine = "#[cfg(test)] mod tests { use crate::high::A; }\n\
            mod inner { use super::B; fn f(self: &crate::low::C) { self.high::<u8>() } }\n\
            pub(super) struct B; // crate::high\n\
            impl B { #[cfg(test)] fn f() { crate::high::g() } }";
        assert_eq!(with_low(fine), [""; 0]);
    }

    #[test]
    fn sees_through_the_root() {
        let root = "mod low; mod high; pub use low::A; pub use high::B; pub struct C;";
        let high = ("src/high.rs", "pub struct B;");
        let use_root = |code| [("src/lib.rs", root), ("src/low.rs", code), high];
        let check = |code| found(&use_root(code), "high\nlow\n");
        assert_eq!(check("struct A; use crate::A as D;"), [""; 0]);
        assert_eq!(check("use crate::B;"), ["src/low.rs:1: crate::B (low imports high)"]);
        assert_eq!(check("use crate::C;"), ["src/low.rs:1: crate::C (low imports the root)"]);
        assert_eq!(check("use super::*;"), ["src/low.rs:1: super::* (low imports the root)"]);
    }

    #[test]
    fn picture_and_code_have_the_same_modules() {
        let files = [("src/lib.rs", "mod a; mod b;"), ("src/a.rs", ""), ("src/b.rs", "")];
        let list = found(&files, "c\na\n");
        assert_eq!(list, ["b: not in the picture", "c: in the picture, not in the code"]);
    }

    #[test]
    fn finds_cycles() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("src/a.rs", "use crate::b::B;"),
            ("src/b.rs", "use crate::c::C;"),
            ("src/c.rs", "use crate::a::A;"),
            ("src/d.rs", "use crate::a::A;"),
        ];
        let list = edges(&of(&files));
        assert_eq!(cycles(&list), BTreeSet::from([BTreeSet::from(["a", "b", "c"])]));
        assert!(
            cycles(&edges(&of(&[
                files[0],
                ("src/a.rs", ""),
                files[2],
                ("src/c.rs", ""),
                files[4]
            ])))
            .is_empty()
        );
    }
}
