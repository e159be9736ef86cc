//! House rules that the compiler cannot check. `cargo test -p tidy` checks them; this prints what
//! they count:
//!
//! ```text
//! cargo run -q -p tidy -- public      public items of the library, and where they are
//! cargo run -q -p tidy -- layers      which module imports which, cycles, what points upward
//! cargo run -q -p tidy -- words       words to replace, and where they are
//! ```

mod layers;
mod mention;
mod public;
#[cfg(test)]
mod rules;
mod source;
mod tree;
mod words;

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("public") => print_public(),
        Some("layers") => {
            print_layers("elapid");
            println!();
            print_layers("elapid-cli");
        }
        Some("words") => print_words(),
        _ => {
            eprintln!("usage: cargo run -q -p tidy -- public|layers|words");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn print_public() {
    let items = public::public(&source::tree("elapid")).items;
    let mut counts = std::collections::BTreeMap::new();
    for ((kind, path), place) in &items {
        println!("{kind:<7} {path}  {place}");
        *counts.entry(kind).or_insert(0) += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    println!("{} public items: {}", items.len(), counts.join(", "));
}

fn print_layers(name: &str) {
    let tree = source::tree(name);
    let edges = layers::edges(&tree);
    println!("{name}: {} modules", tree.top_modules().len());
    for ((from, to), count) in layers::counts(&edges) {
        println!("{from:>12} -> {to:<12} {count:4}");
    }
    let cycles = layers::cycles(&edges);
    println!("{} cycles", cycles.len());
    for cycle in cycles {
        println!("  {}", cycle.into_iter().collect::<Vec<_>>().join(", "));
    }
    let upward = layers::offences(&tree, &source::layers(name));
    println!("{} that do not point downward", upward.len());
    for offence in upward {
        println!("  {offence}");
    }
}

fn print_words() {
    let sources = source::sources(words::EXTENSIONS);
    for word in words::WORDS {
        let places = words::places(&sources, word);
        println!("{:5}  {}: {}", places.len(), word.not, word.but);
        for place in places {
            println!("              {place}");
        }
    }
}
