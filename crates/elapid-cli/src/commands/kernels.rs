//! `elapid kernels`: the sources that GPUs run.

use crate::files;
use crate::report::{Done, Failure, line, print};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// List the GPU kernels, print their sources, or write them to a directory.
///
/// Kernels are WGSL (Vulkan, Metal, WebGPU) and CUDA C++. Each is compiled behind the prelude of
/// its language (prelude.wgsl, prelude.cu) with constants such as THREADS set in front; the
/// mathematics is in the header of the Rust file beside it.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid kernels\n  elapid kernels head_loss\n  \
    elapid kernels attention.wgsl > attention.wgsl\n  elapid kernels --out kernels/")]
pub struct Kernels {
    /// Print the files whose path or one of whose kernels contains this
    name: Option<String>,
    /// Write the files to this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object per kernel file
    #[arg(long)]
    json: bool,
}

/// A file with what can be launched in it, and what that is given.
struct Source {
    path: &'static str,
    text: &'static str,
    /// Entries with their bindings, in CUDA the parameters.
    entries: Vec<(String, Vec<String>)>,
}

impl Source {
    fn read((path, text): (&'static str, &'static str)) -> Source {
        let entries = if path.ends_with(".cu") { cuda(text) } else { wgsl(text) };
        Source { path, text, entries }
    }
}

/// `KERNEL name(parameters) {`, or where more is said to the compiler, what stands for `KERNEL`.
fn cuda(text: &str) -> Vec<(String, Vec<String>)> {
    let behind = |(at, mark): (usize, &str)| &text[at + mark.len()..];
    let plain = text.match_indices("\nKERNEL ").map(behind);
    let bounded = text.match_indices("\nextern \"C\" __global__").map(behind);
    let bounded = bounded.filter_map(|rest| Some(rest.split_once("void")?.1));
    let found = plain.chain(bounded).filter_map(|rest| {
        let (name, rest) = rest.split_once('(')?;
        let (list, _) = rest.split_once(") {")?;
        let list = list.split(',').map(|it| it.split_whitespace().collect::<Vec<_>>().join(" "));
        Some((name.trim().to_string(), list.collect()))
    });
    found.collect()
}

/// Functions after `@compute`, each with the bindings that it names, and those that no such
/// function names: what they call does.
fn wgsl(text: &str) -> Vec<(String, Vec<String>)> {
    let bodies = text.split("@compute").skip(1);
    let bodies: Vec<&str> = bodies.map(|it| it.split("\n}").next().unwrap_or(it)).collect();
    let binding = |line: &str| {
        let (place, rest) = line.split(';').next()?.split_once(" var")?;
        let name = rest.split_once('>')?.1.split(':').next()?.trim().to_string();
        Some((name, format!("{}{rest}", place.trim_start_matches("@group(0) "))))
    };
    let bindings: Vec<(String, String)> =
        text.lines().filter(|line| line.starts_with("@group")).filter_map(binding).collect();
    let is_word = |c: char| !c.is_alphanumeric() && c != '_';
    let names = |body: &str, name: &str| body.split(is_word).any(|word| word == name);
    let entry = |body: &&str| {
        let name = body.split_once("fn ")?.1.split_once('(')?.0.trim().to_string();
        let is_given = |(name, _): &&(String, String)| {
            names(body, name) || !bodies.iter().any(|body| names(body, name))
        };
        let given = bindings.iter().filter(is_given).map(|(_, text)| text.clone());
        Some((name, given.collect()))
    };
    bodies.iter().filter_map(entry).collect()
}

impl Kernels {
    pub fn run(&self) -> Done<ExitCode> {
        let name = self.name.as_deref().unwrap_or("");
        let is_meant = |source: &Source| {
            let entries = source.entries.iter();
            source.path.contains(name) || entries.clone().any(|entry| entry.0.contains(name))
        };
        let sources = elapid::kernel_sources().iter().copied().map(Source::read);
        let sources: Vec<Source> = sources.filter(is_meant).collect();
        if sources.is_empty() {
            let hint = "`elapid kernels` lists all of them";
            return Err(Failure::new(format!("no kernel is called {name}"), hint));
        }
        for source in &sources {
            let Source { path, text, entries } = source;
            match (&self.out, self.json, &self.name) {
                (Some(dir), ..) => {
                    let to = dir.join(path);
                    files::make_directory(to.parent().unwrap_or(dir))?;
                    files::write_bytes(&to, text.as_bytes())?;
                    line(to.display());
                }
                (None, true, _) => {
                    let entries = entries.iter();
                    let entries = entries
                        .map(|(name, bindings)| json!({ "name": name, "bindings": bindings }));
                    let entries: Vec<_> = entries.collect();
                    line(json!({ "file": path, "kernels": entries, "source": text }));
                }
                (None, false, Some(_)) => print(format!("// {path}\n{text}")),
                (None, false, None) => {
                    line(path);
                    for (name, bindings) in entries {
                        line(format!("    {name:<28}{}", bindings.join(",  ")));
                    }
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
