//! The rules. An exception is a comment in the file, `tidy: allow RULE`, with its reason;
//! `grep -rn 'tidy: allow'` lists them all.

use crate::mention::{is_for_tests, mentions};
use crate::source::{Source, layers, sources, text, tree};
use crate::tree::{Crate, attributes};
use crate::{layers, public, words};
use proc_macro2::{Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::spanned::Spanned;

/// Public items of the library, to become 300; `cargo run -q -p tidy -- public` lists them.
const N_PUBLIC_MAX: usize = 300;

/// Modules right below the root of the library.
const N_MODULES_MAX: usize = 12;

/// Whether an upward import in the commands is a failure; until then it is printed.
const COMMANDS_ARE_LAYERED: bool = true;

/// Fails with every offence, one per line.
fn assert_none(rule: &str, offences: Vec<String>) {
    assert!(offences.is_empty(), "{rule}:\n{}", offences.join("\n"));
}

fn under(prefix: &str) -> Vec<Source> {
    let mut list = sources(&["rs"]);
    list.retain(|source| source.path.starts_with(prefix));
    assert!(!list.is_empty(), "no sources under {prefix}");
    list
}

/// Where `tree` mentions something of other crates, the standard library or macros: `std::fs` is
/// a path and all below it, `print!` is a macro.
fn forbidden(tree: &Crate, names: &[&str]) -> Vec<String> {
    let mut list = Vec::new();
    for module in &tree.modules {
        for item in &module.items {
            for mention in mentions(item.to_token_stream()) {
                let path = mention.path.join("::");
                let is_named = |name: &&&str| match name.strip_suffix('!') {
                    Some(name) => mention.is_macro && mention.path.ends_with(&[name.to_string()]),
                    None => path
                        .strip_prefix(**name)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::")),
                };
                if let Some(name) = names.iter().find(is_named) {
                    list.push(format!("{}:{}: {name}", module.file, mention.line));
                }
            }
        }
    }
    list
}

/// All tokens with their lines, those inside of brackets too.
fn tokens(stream: TokenStream) -> Vec<(usize, TokenTree)> {
    let mut list = Vec::new();
    for token in stream {
        list.push((token.span().start().line, token.clone()));
        if let TokenTree::Group(group) = token {
            list.extend(tokens(group.stream()));
        }
    }
    list
}

/// Lines on which a keyword or name stands.
fn lines_of(code: TokenStream, name: &str) -> Vec<usize> {
    let is_named = |token: &TokenTree| matches!(token, TokenTree::Ident(ident) if ident == name);
    tokens(code).into_iter().filter(|pair| is_named(&pair.1)).map(|pair| pair.0).collect()
}

fn parsed(source: &Source) -> TokenStream {
    source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path))
}

/// Lines of a Rust file without its tests.
fn n_production_lines(text: &str) -> usize {
    let file = syn::parse_file(text).unwrap();
    let tests = file.items.iter().filter(|item| attributes(item).iter().any(is_for_tests));
    let n_lines = |item: &syn::Item| item.span().end().line + 1 - item.span().start().line;
    text.lines().count() - tests.map(n_lines).sum::<usize>()
}

/// Lines of text files that contain one of `words`.
fn find(sources: &[Source], words: &[String]) -> Vec<String> {
    let mut list = Vec::new();
    for source in sources {
        for (idx, line) in source.text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                list.push(format!("{}:{}: {word}", source.path, idx + 1));
            }
        }
    }
    list
}

#[test]
fn each_file_says_what_it_is_for() {
    let silent = sources(&["rs"]).into_iter().filter(|source| !source.text.starts_with("//! "));
    assert_none("begins with `//!`", silent.map(|source| source.path).collect());
}

#[test]
fn the_engine_is_layered_as_drawn() {
    let tree = tree("elapid");
    let n_modules = tree.top_modules().len();
    assert!(n_modules <= N_MODULES_MAX, "{n_modules} modules, {N_MODULES_MAX} are allowed");
    assert_none("imports only what stands below", layers::offences(&tree, &layers("elapid")));
    assert!(layers::cycles(&layers::edges(&tree)).is_empty());
}

#[test]
fn the_commands_are_layered_as_drawn() {
    let offences = layers::offences(&tree("elapid-cli"), &layers("elapid-cli"));
    if COMMANDS_ARE_LAYERED {
        assert_none("imports only what stands below", offences);
    } else {
        println!("{} imports do not point downward:\n{}", offences.len(), offences.join("\n"));
    }
}

#[test]
fn public_items_are_few() {
    let n_public = public::public(&tree("elapid")).items.len();
    assert!(
        n_public <= N_PUBLIC_MAX,
        "{n_public} public items, {N_PUBLIC_MAX} are allowed; list: cargo run -q -p tidy -- public"
    );
    println!("{n_public} public items, {N_PUBLIC_MAX} are allowed");
}

#[test]
fn the_engine_sees_no_terminal_network_environment_clock_and_files_in_few_places() {
    let outside = [
        "std::env",
        "std::net",
        "std::process",
        "std::time",
        "print!",
        "println!",
        "eprint!",
        "eprintln!",
        "tokio",
        "clap",
    ];
    let tree = tree("elapid");
    let mut found = forbidden(&tree, &outside);
    // The name of a file that is being written.
    found.retain(|place| !place.contains("files/disk.rs") || !place.ends_with("std::process"));
    assert_none("outside the engine", found);
    let disk = ["error.rs", "files/disk.rs", "files/memory.rs"];
    let mut found = forbidden(&tree, &["std::fs", "std::io", "memmap2"]);
    found.retain(|place| {
        !disk.iter().any(|file| place.starts_with(&format!("crates/elapid/src/{file}:")))
    });
    // Maps without a file: memory that is given back to the system whole.
    found.retain(|place| !place.contains("tensor/cpu/pool.rs") || !place.ends_with("memmap2"));
    assert_none(&format!("only in {disk:?}"), found);
}

#[test]
fn commands_see_no_ops_and_no_kernels() {
    let names =
        ["elapid::ops", "elapid::tensor::cpu", "elapid::tensor::quant", "pulp", "rayon", "gemm"];
    assert_none("inside the engine", forbidden(&tree("elapid-cli"), &names));
}

#[test]
fn only_the_client_of_the_hub_opens_a_connection() {
    let clients = [
        "hyper::client",
        "hyper_util::client",
        "std::net::TcpStream::connect",
        "std::net::UdpSocket",
        "tokio::net::TcpSocket",
        "tokio::net::TcpStream::connect",
        "tokio::net::UdpSocket",
        "TcpStream::connect",
        "ureq",
    ];
    let mut found = forbidden(&tree("elapid-cli"), &clients);
    let n_all = found.len();
    found.retain(|place| !place.starts_with("crates/elapid-cli/src/hub/client.rs:"));
    assert!(n_all > found.len(), "the client is not seen");
    assert_none("only in hub/client.rs", found);
}

#[test]
fn kernels_know_numbers_alone() {
    let tree = tree("elapid");
    let is_kernel = |path: &[String]| {
        path.len() > 1 && path[0] == "tensor" && ["cpu", "quant"].contains(&path[1].as_str())
    };
    let mut offences = Vec::new();
    for module in tree.modules.iter().filter(|module| is_kernel(&module.path)) {
        for mention in module.items.iter().flat_map(|item| mentions(item.to_token_stream())) {
            let path = layers::absolute(&module.path, &mention.path);
            let is_number = |path: &[String]| {
                path.len() > 1
                    && path[0] == "tensor"
                    && ["shelf", "DType"].contains(&path[1].as_str())
            };
            if path.is_some_and(|path| !is_kernel(&path) && !is_number(&path)) {
                let written = mention.path.join("::");
                offences.push(format!("{}:{}: {written}", module.file, mention.line));
            }
        }
    }
    assert_none("kernels mention kernels", offences);
}

/// Lines with a string that begins with the name of a family.
fn families(code: TokenStream) -> Vec<usize> {
    let families = ["falcon", "granite", "jamba", "bamba", "qwen", "mixtral", "olmoe"];
    let is_family = |token: &TokenTree| {
        let TokenTree::Literal(literal) = token else { return false };
        let Ok(syn::Lit::Str(text)) = syn::parse_str(&literal.to_string()) else { return false };
        families.iter().any(|family| text.value().starts_with(family))
    };
    tokens(code).into_iter().filter(|pair| is_family(&pair.1)).map(|pair| pair.0).collect()
}

#[test]
fn only_config_knows_families() {
    let known = [
        "crates/elapid/src/model/config/",
        "crates/elapid/src/model/adapter.rs", // families whose adapters PEFT treats otherwise
        "crates/elapid/src/text/vocab.rs",    // the pre-tokenizer that a GGUF file does not name
    ];
    let mut offences = Vec::new();
    for module in &tree("elapid").modules {
        if !known.iter().any(|prefix| module.file.starts_with(prefix)) {
            let code = module.items.iter().map(|item| item.to_token_stream()).collect();
            let lines = families(code).into_iter();
            offences.extend(lines.map(|line| format!("{}:{line}", module.file)));
        }
    }
    assert_none("only in model/config/", offences);
}

#[test]
fn every_op_is_checked_against_finite_differences() {
    // An op is a file, or a folder whose files are taken together.
    let mut ops: std::collections::BTreeMap<String, bool> = Default::default();
    for source in under("crates/elapid/src/ops/") {
        let op = source.path.trim_start_matches("crates/elapid/src/ops/").split('/').next();
        let is_checked =
            !lines_of(parsed(&source), "check_gradients").is_empty() || source.allows("unchecked");
        *ops.entry(op.unwrap().to_string()).or_default() |= is_checked;
    }
    ops.remove("mod.rs");
    let unchecked = ops.into_iter().filter(|op| !op.1).map(|op| op.0).collect();
    assert_none("calls check_gradients", unchecked);
}

#[test]
fn unsafe_code_is_where_it_must_be() {
    let allowed = [
        "crates/elapid/src/files/disk.rs",      // memory maps of files
        "crates/elapid/src/tensor/cpu/gemm.rs", // the matrix product
        "crates/elapid/src/tensor/gpu/cuda/",   // calls of the driver
        "crates/elapid/src/tensor/quant/dot/",  // instructions of particular machines
    ];
    let mut list = sources(&["rs"]);
    list.retain(|source| !allowed.iter().any(|prefix| source.path.starts_with(prefix)));
    list.retain(|source| !source.allows("unsafe"));
    let places = |source: &Source| -> Vec<String> {
        let lines = lines_of(parsed(source), "unsafe").into_iter();
        lines.map(|line| format!("{}:{line}", source.path)).collect()
    };
    assert_none("unsafe", list.iter().flat_map(places).collect());
}

#[test]
fn lines_and_files_fit() {
    let mut offences = Vec::new();
    for source in sources(&["rs", "wgsl", "cu", "cpp", "h"]) {
        for (idx, line) in source.text.lines().enumerate() {
            if line.chars().count() > 100 && !line.contains("http") {
                offences.push(format!("{}:{}: over 100 columns", source.path, idx + 1));
            }
        }
        let n_lines = match &source.path {
            path if path.ends_with("/tests.rs") => 0,
            path if path.ends_with(".rs") => n_production_lines(&source.text),
            _ => source.text.lines().count(),
        };
        if n_lines > 600 && !source.allows("long") {
            offences.push(format!("{}: {n_lines} lines", source.path));
        }
    }
    assert_none("100 columns, 600 lines", offences);
}

/// Lines with a macro or attribute that a finished program does not have.
fn unfinished(code: TokenStream) -> Vec<usize> {
    let list = tokens(code);
    let pairs = list.iter().zip(list.iter().skip(1));
    let is_unfinished = |(a, b): &(&(usize, TokenTree), &(usize, TokenTree))| match (&a.1, &b.1) {
        (TokenTree::Ident(name), TokenTree::Punct(punct)) => {
            let is_macro = punct.as_char() == '!' && punct.spacing() == Spacing::Alone;
            is_macro && ["todo", "unimplemented", "dbg"].iter().any(|word| name == word)
        }
        (TokenTree::Punct(punct), TokenTree::Group(group)) if punct.as_char() == '#' => {
            !lines_of(group.stream(), "ignore").is_empty()
        }
        _ => false,
    };
    pairs.filter(is_unfinished).map(|(_, b)| b.0).collect()
}

#[test]
fn nothing_is_left_unfinished_or_skipped() {
    // Put together here so that this file does not find itself.
    let words = [["FIX", "ME"].concat(), ["XX", "X"].concat(), ["TO", "DO"].concat()];
    let mut offences = find(&sources(&["rs", "py", "toml", "yml", "cu", "wgsl"]), &words);
    for source in sources(&["rs"]) {
        let lines = unfinished(parsed(&source)).into_iter();
        offences.extend(lines.map(|line| format!("{}:{line}", source.path)));
    }
    assert_none("finished", offences);
}

#[test]
fn every_dependency_is_explained() {
    let manifest = text("Cargo.toml");
    let contributing = text("CONTRIBUTING.md");
    let list = manifest.split("[workspace.dependencies]").nth(1).unwrap();
    let list = list.split("\n[").next().unwrap();
    let names = list.lines().filter_map(|line| line.split_once(" = ")).map(|pair| pair.0);
    let silent = names
        .filter(|name| !name.starts_with('#') && *name != "elapid")
        .filter(|name| !contributing.contains(&format!("`{name}`")));
    assert_none("CONTRIBUTING.md says what it is for", silent.map(str::to_string).collect());
}

#[test]
fn no_machine_is_named() {
    let words = [
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
        ["/wo", "rk/"].concat(),
        ["/op", "t/"].concat(),
        ["crates", ".io"].concat(),
        ["pypi", ".org"].concat(),
    ];
    let list = sources(&["rs", "md", "py", "toml", "json", "sh"]);
    assert_none("names of machines and registries", find(&list, &words));
}

#[test]
fn words_are_those_that_readers_know() {
    let list = sources(words::EXTENSIONS);
    let offences = words::WORDS.iter().flat_map(|word| {
        let words::Word { not, but } = word;
        let places = words::places(&list, word).into_iter();
        places.map(move |place| format!("{place}: `{not}`, say `{but}`"))
    });
    assert_none("plain words", offences.collect());
}

mod planted {
    use super::*;
    use crate::tree::tests::of;

    #[test]
    fn what_the_engine_may_not_see() {
        let names = ["std::fs", "std::io", "tokio", "print!", "println!"];
        let found = |code| forbidden(&of(&[("src/lib.rs", code)]), &names);
        for code in [
            "use std::{fs, sync::Arc};",
            "use std::fs as files;",
            "fn f() { std::fs::read(a); }",
            "use tokio;",
            "fn f() { std::println!(\"\") }",
            "fn f() { if a { vec![println!(\"\")] } }",
        ] {
            assert_eq!(found(code).len(), 1, "{code}");
        }
        assert_eq!(found("\nuse std::io::Read;"), ["src/lib.rs:2: std::io"]);
        let fine = "use std::ioctl; use tokio_stream::S; // println!(\n\
            fn print() -> &'static str { \"std::fs println!()\" }\n\
            #[cfg(test)] mod tests { fn f() { std::fs::read(a); } }";
        assert_eq!(found(fine), [""; 0]);
    }

    #[test]
    fn unsafe_code() {
        let lines = |code: &str| lines_of(code.parse().unwrap(), "unsafe");
        assert_eq!(
            lines("fn f() {\nunsafe {} }\nunsafe impl A for B {}\nunsafe fn g() {}"),
            [2, 3, 4]
        );
        assert_eq!(lines("m!(unsafe { x })"), [1]);
        assert_eq!(
            lines("// unsafe {}\n/// unsafe fn\nfn f() { \"unsafe {}\"; is_unsafe() }"),
            [0; 0]
        );
    }

    #[test]
    fn families_outside_of_the_config() {
        let lines = |code: &str| families(code.parse().unwrap());
        assert_eq!(lines("fn f() { x == \"qwen2\" || matches!(x, \"jamba\") }"), [1, 1]);
        assert_eq!(lines("/// \"qwen2\"\nfn f() { \"not qwen\"; mixtral() }"), [0; 0]);
    }

    #[test]
    fn unfinished_code() {
        let lines = |code: &str| unfinished(code.parse().unwrap());
        let macros = ["todo", "unimplemented", "dbg"].map(|name| format!("fn f() {{ {name}!() }}"));
        for code in macros {
            assert_eq!(lines(&code), [1], "{code}");
        }
        assert_eq!(lines("#[test]\n#[ignore]\nfn f() {}"), [2]);
        assert_eq!(
            lines("// todo!()\nfn ignore() { self.ignore(); f(ignore, todo != 1) }"),
            [0; 0]
        );
    }

    #[test]
    fn lines_of_tests_do_not_count() {
        assert_eq!(
            n_production_lines("fn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n"),
            2
        );
        assert_eq!(n_production_lines("fn f() {}\n#[cfg(test)]\nfn g() {\n}\nfn h() {}\n"), 2);
    }
}
