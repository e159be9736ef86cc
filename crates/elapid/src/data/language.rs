//! The language of a path, by its name or extension, for tables that people read.
//!
//! Not here: a look at the text. `.h` is C, `.m` Objective-C and `.pl` Perl, whatever they hold.

/// Languages and the files known by their whole name, in lower case.
const NAMES: &str = "\
    CMake: cmakelists.txt; Dockerfile: containerfile dockerfile; Go module: go.mod; \
    Groovy: jenkinsfile; INI: .editorconfig .gitconfig; Just: justfile; \
    Makefile: gnumakefile makefile; Meson: meson.build; Python: sconstruct snakefile; \
    Ruby: gemfile rakefile vagrantfile; Shell: .bash_profile .bashrc .profile .zshrc pkgbuild; \
    Starlark: build.bazel workspace.bazel; text: .gitattributes .gitignore; Vim script: .vimrc; \
    YAML: .clang-format";

/// Languages and their extensions, in lower case.
const EXTENSIONS: &str = "\
    Ada: ada adb ads; AsciiDoc: adoc; Assembly: asm s; Awk: awk; Batch: bat; BibTeX: bib; C: c h; \
    C#: cs; C++: cc cpp cxx hh hpp hxx ino; Clojure: clj cljs; CMake: cmake; CoffeeScript: coffee; \
    Crystal: cr; CSS: css less sass scss; CSV: csv tsv; CUDA: cu cuh; Cython: pyx; D: d; \
    Dart: dart; Diff: diff patch; Elixir: ex exs; Elm: elm; Emacs Lisp: el; Erlang: erl hrl; \
    F#: fs fsx; Fortran: f f90; GLSL: frag glsl vert; Go: go; GraphQL: graphql; \
    Groovy: gradle groovy; Haskell: hs; HCL: hcl tf; HLSL: hlsl; HTML: htm html; \
    INI: cfg ini properties; Java: java; JavaScript: cjs js jsx mjs; JSON: json json5 jsonc jsonl; \
    Julia: jl; Jupyter: ipynb; Kotlin: kt kts; Lisp: lisp; Lua: lua; Makefile: mk; \
    Markdown: markdown md mdx rmd; Metal: metal; Nim: nim; Nix: nix; Objective-C: m mm; \
    OCaml: ml mli; Odin: odin; Org: org; Pascal: pas; Perl: pl pm; PHP: php; PowerShell: ps1; \
    Protocol Buffers: proto; Python: py pyi; QML: qml; R: r; Racket: rkt; reStructuredText: rst; \
    Ruby: rb; Rust: rs; Scala: scala; Scheme: scm; Shell: bash fish sh zsh; Solidity: sol; \
    SQL: sql; Starlark: bzl; Svelte: svelte; SVG: svg; Swift: swift; Tcl: tcl; TeX: tex; \
    TOML: toml; TypeScript: cts mts ts tsx; Typst: typ; Vala: vala; Verilog: sv v; VHDL: vhd vhdl; \
    Vim script: vim; Vue: vue; WebAssembly: wat; WGSL: wgsl; XML: xml xsl; YAML: yaml yml; \
    Zig: zig";

/// The language of a path; what is not known is "text".
pub fn of_path(path: &str) -> &'static str {
    let name = file_name(path).to_ascii_lowercase();
    let find = |list: &'static str, key: &str| {
        let mut languages = list.split("; ").filter_map(|entry| entry.split_once(": "));
        languages.find(|(_, keys)| keys.split(' ').any(|known| known == key)).map(|pair| pair.0)
    };
    let by_extension = || find(EXTENSIONS, extension(&name)?);
    // `Dockerfile.dev`, `Makefile.am`: the first word says more than the second.
    let by_stem = || find(NAMES, name.split('.').next()?);
    find(NAMES, &name).or_else(by_extension).or_else(by_stem).unwrap_or("text")
}

/// A language by its name as [`of_path`] and the records give it.
pub(super) fn by_name(name: &str) -> &'static str {
    let entries = [NAMES, EXTENSIONS].into_iter().flat_map(|list| list.split("; "));
    let mut names = entries.filter_map(|entry| Some(entry.split_once(": ")?.0)).chain(["chat"]);
    names.find(|known| *known == name).unwrap_or("text")
}

/// What follows the last slash, of either kind.
pub(super) fn file_name(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// What follows the last dot of a file's name, unless the name begins with it.
pub(super) fn extension(name: &str) -> Option<&str> {
    name.rsplit_once('.').filter(|pair| !pair.0.is_empty()).map(|pair| pair.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_known_by_name_and_by_extension() {
        for (path, want) in [
            ("src/main.rs", "Rust"),
            ("a/b.test.PY", "Python"),
            ("C:\\x\\Main.Java", "Java"),
            ("Dockerfile", "Dockerfile"),
            ("Dockerfile.dev", "Dockerfile"),
            ("CMakeLists.txt", "CMake"),
            ("go.mod", "Go module"),
            (".gitignore", "text"),
            (".rs", "text"),
            ("notes.txt", "text"),
            ("LICENSE", "text"),
            ("", "text"),
            ("dir.rs/", "text"),
            ("data.jsonl:12", "text"),
        ] {
            assert_eq!(of_path(path), want, "{path}");
        }
    }

    #[test]
    fn the_lists_are_in_lower_case_and_without_doubles() {
        for (list, n_least) in [(NAMES, 20), (EXTENSIONS, 100)] {
            let keys =
                list.split("; ").flat_map(|entry| entry.split_once(": ").unwrap().1.split(' '));
            let keys: Vec<&str> = keys.collect();
            let unique: std::collections::HashSet<_> = keys.iter().collect();
            assert!(unique.len() == keys.len() && keys.len() > n_least, "{keys:?}");
            assert!(keys.iter().all(|key| *key == key.to_ascii_lowercase() && !key.is_empty()));
        }
    }
}
