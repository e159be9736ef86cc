//! The book in `docs/book`: what it tells people to type works, and its links lead somewhere.

use crate::common::{Scratch, root};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn source() -> PathBuf {
    root().join("docs/book/src")
}

/// Every page with its text.
fn pages() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(source()).unwrap();
    let mut names: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let page = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(path).unwrap();
        (name, text)
    };
    names.into_iter().map(page).filter(|(name, _)| name != "SUMMARY.md").collect()
}

/// The blocks of a page behind exactly this mark.
fn blocks(text: &str, mark: &str) -> Vec<String> {
    let parts = text.split("\n```").skip(1).step_by(2);
    let marked = parts.filter_map(|part| part.split_once('\n').filter(|(info, _)| *info == mark));
    marked.map(|(_, code)| code.to_string()).collect()
}

fn bash(script: &str, within: &Path) -> (bool, String) {
    let bin = Path::new(env!("CARGO_BIN_EXE_elapid")).parent().unwrap().to_path_buf();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([bin].into_iter().chain(std::env::split_paths(&path)));
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", script]).current_dir(within);
    let done = command.env("PATH", path.unwrap()).output().unwrap();
    let [out, err] = [&done.stdout, &done.stderr].map(|it| String::from_utf8_lossy(it));
    (done.status.success(), format!("{out}{err}"))
}

/// A project with a little model `tiny.gguf` in it.
const PROJECT: &str = r##"
mkdir src
for n in $(seq 24); do
    printf '"""Shapes of kind %s."""\n\n\n' $n
    printf 'def area_%s(width, height):\n    return width * height + %s\n\n\n' $n $n
    for k in $(seq 5); do
        printf 'def edge_%s_%s(shape):\n    return shape.edges[%s] * %s\n\n\n' $n $k $k $n
    done
done | split -l 40 --additional-suffix=.py - src/part_
cp src/part_aa.py src/shapes.py
git init -q . && git add src
git -c user.name=a -c user.email=a@example.org commit -qm shapes
elapid train src --steps 12 --context 128 --out seed
elapid convert seed/model tiny.gguf
rm -r seed
"##;

#[test]
fn commands_of_the_book_run() {
    if !cfg!(unix) || Command::new("bash").arg("--version").output().is_err() {
        return println!("skip: the commands of the book need bash");
    }
    let scratch = Scratch::new("book");
    let project = scratch.0.join("project");
    std::fs::create_dir(&project).unwrap();
    let (is_well, said) = bash(PROJECT, &project);
    assert!(is_well, "{said}");
    let (scratch, mut n_blocks) = (&scratch, 0);
    std::thread::scope(|scope| {
        for (name, text) in pages() {
            let blocks = blocks(&text, "sh");
            n_blocks += blocks.len();
            scope.spawn(move || {
                let (is_well, said) = bash(&format!("cp -r project '{name}'"), &scratch.0);
                assert!(is_well, "{said}");
                for block in blocks {
                    let (is_well, said) = bash(&block, &scratch.0.join(&name));
                    assert!(is_well, "{name}:\n{block}\n{said}");
                }
            });
        }
    });
    assert!(n_blocks > 12, "{n_blocks}");
}

#[test]
fn links_of_the_book_lead_to_pages_and_every_page_is_listed() {
    let targets = |text: &str| -> Vec<String> {
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        let paths = links.map(|(link, _)| link.split('#').next().unwrap_or_default().to_string());
        paths.filter(|path| !path.is_empty() && !path.contains("://")).collect()
    };
    let summary = std::fs::read_to_string(source().join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<String> = targets(&summary).into_iter().collect();
    let there: BTreeSet<String> = pages().into_iter().map(|(name, _)| name).collect();
    assert_eq!(listed, there);
    for (name, text) in pages() {
        let included = text.split("{{#include ").skip(1).filter_map(|it| it.split_once([':', '}']));
        let included = included.map(|(path, _)| path.to_string());
        for path in targets(&text).into_iter().chain(included) {
            assert!(source().join(&path).exists(), "{name}: {path}");
        }
    }
}

#[test]
fn the_book_is_built_where_mdbook_is_installed() {
    let scratch = Scratch::new("book-pages");
    let mut command = Command::new("mdbook");
    command.arg("build").arg(root().join("docs/book")).arg("--dest-dir").arg(&scratch.0);
    match command.output() {
        Err(_) => println!("skip: the pages of the book need mdbook (cargo install mdbook)"),
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success() && !said.contains("ERROR"), "{said}");
            let page = std::fs::read_to_string(scratch.0.join("performance.html")).unwrap();
            assert!(page.contains("<table>"), "the table of README.md");
        }
    }
}
