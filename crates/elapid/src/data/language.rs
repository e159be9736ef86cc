//! The language of a path, by its name or extension, for tables that people read.
//!
//! Not here: a look at the text. `.h` is C, `.m` Objective-C and `.pl` Perl, whatever they hold.

/// Files known by their whole name, in lower case.
const NAMES: &[(&str, &str)] = &[
    (".bash_profile", "Shell"),
    (".bashrc", "Shell"),
    (".clang-format", "YAML"),
    (".editorconfig", "INI"),
    (".gitattributes", "text"),
    (".gitconfig", "INI"),
    (".gitignore", "text"),
    (".profile", "Shell"),
    (".vimrc", "Vim script"),
    (".zshrc", "Shell"),
    ("build.bazel", "Starlark"),
    ("cmakelists.txt", "CMake"),
    ("containerfile", "Dockerfile"),
    ("dockerfile", "Dockerfile"),
    ("gemfile", "Ruby"),
    ("gnumakefile", "Makefile"),
    ("go.mod", "Go module"),
    ("jenkinsfile", "Groovy"),
    ("justfile", "Just"),
    ("makefile", "Makefile"),
    ("meson.build", "Meson"),
    ("pkgbuild", "Shell"),
    ("rakefile", "Ruby"),
    ("sconstruct", "Python"),
    ("snakefile", "Python"),
    ("vagrantfile", "Ruby"),
    ("workspace.bazel", "Starlark"),
];

/// Extensions in lower case.
const EXTENSIONS: &[(&str, &str)] = &[
    ("ada", "Ada"),
    ("adb", "Ada"),
    ("adoc", "AsciiDoc"),
    ("ads", "Ada"),
    ("asm", "Assembly"),
    ("awk", "Awk"),
    ("bash", "Shell"),
    ("bat", "Batch"),
    ("bib", "BibTeX"),
    ("bzl", "Starlark"),
    ("c", "C"),
    ("cc", "C++"),
    ("cfg", "INI"),
    ("cjs", "JavaScript"),
    ("clj", "Clojure"),
    ("cljs", "Clojure"),
    ("cmake", "CMake"),
    ("coffee", "CoffeeScript"),
    ("cpp", "C++"),
    ("cr", "Crystal"),
    ("cs", "C#"),
    ("css", "CSS"),
    ("csv", "CSV"),
    ("cts", "TypeScript"),
    ("cu", "CUDA"),
    ("cuh", "CUDA"),
    ("cxx", "C++"),
    ("d", "D"),
    ("dart", "Dart"),
    ("diff", "Diff"),
    ("el", "Emacs Lisp"),
    ("elm", "Elm"),
    ("erl", "Erlang"),
    ("ex", "Elixir"),
    ("exs", "Elixir"),
    ("f", "Fortran"),
    ("f90", "Fortran"),
    ("fish", "Shell"),
    ("frag", "GLSL"),
    ("fs", "F#"),
    ("fsx", "F#"),
    ("glsl", "GLSL"),
    ("go", "Go"),
    ("gradle", "Groovy"),
    ("graphql", "GraphQL"),
    ("groovy", "Groovy"),
    ("h", "C"),
    ("hcl", "HCL"),
    ("hh", "C++"),
    ("hlsl", "HLSL"),
    ("hpp", "C++"),
    ("hrl", "Erlang"),
    ("hs", "Haskell"),
    ("htm", "HTML"),
    ("html", "HTML"),
    ("hxx", "C++"),
    ("ini", "INI"),
    ("ino", "C++"),
    ("ipynb", "Jupyter"),
    ("java", "Java"),
    ("jl", "Julia"),
    ("js", "JavaScript"),
    ("json", "JSON"),
    ("json5", "JSON"),
    ("jsonc", "JSON"),
    ("jsonl", "JSON"),
    ("jsx", "JavaScript"),
    ("kt", "Kotlin"),
    ("kts", "Kotlin"),
    ("less", "CSS"),
    ("lisp", "Lisp"),
    ("lua", "Lua"),
    ("m", "Objective-C"),
    ("markdown", "Markdown"),
    ("md", "Markdown"),
    ("mdx", "Markdown"),
    ("metal", "Metal"),
    ("mjs", "JavaScript"),
    ("mk", "Makefile"),
    ("ml", "OCaml"),
    ("mli", "OCaml"),
    ("mm", "Objective-C"),
    ("mts", "TypeScript"),
    ("nim", "Nim"),
    ("nix", "Nix"),
    ("odin", "Odin"),
    ("org", "Org"),
    ("pas", "Pascal"),
    ("patch", "Diff"),
    ("php", "PHP"),
    ("pl", "Perl"),
    ("pm", "Perl"),
    ("properties", "INI"),
    ("proto", "Protocol Buffers"),
    ("ps1", "PowerShell"),
    ("py", "Python"),
    ("pyi", "Python"),
    ("pyx", "Cython"),
    ("qml", "QML"),
    ("r", "R"),
    ("rb", "Ruby"),
    ("rkt", "Racket"),
    ("rmd", "Markdown"),
    ("rs", "Rust"),
    ("rst", "reStructuredText"),
    ("s", "Assembly"),
    ("sass", "CSS"),
    ("scala", "Scala"),
    ("scm", "Scheme"),
    ("scss", "CSS"),
    ("sh", "Shell"),
    ("sol", "Solidity"),
    ("sql", "SQL"),
    ("sv", "Verilog"),
    ("svelte", "Svelte"),
    ("svg", "SVG"),
    ("swift", "Swift"),
    ("tcl", "Tcl"),
    ("tex", "TeX"),
    ("tf", "HCL"),
    ("toml", "TOML"),
    ("ts", "TypeScript"),
    ("tsv", "CSV"),
    ("tsx", "TypeScript"),
    ("typ", "Typst"),
    ("v", "Verilog"),
    ("vala", "Vala"),
    ("vert", "GLSL"),
    ("vhd", "VHDL"),
    ("vhdl", "VHDL"),
    ("vim", "Vim script"),
    ("vue", "Vue"),
    ("wat", "WebAssembly"),
    ("wgsl", "WGSL"),
    ("xml", "XML"),
    ("xsl", "XML"),
    ("yaml", "YAML"),
    ("yml", "YAML"),
    ("zig", "Zig"),
    ("zsh", "Shell"),
];

/// The language of a path; what is not known is "text".
pub fn of_path(path: &str) -> &'static str {
    let name = file_name(path).to_ascii_lowercase();
    let find = |list: &[(&str, &'static str)], key: &str| {
        let at = list.binary_search_by_key(&key, |pair| pair.0).ok()?;
        Some(list[at].1)
    };
    let by_extension = || find(EXTENSIONS, extension(&name)?);
    // `Dockerfile.dev`, `Makefile.am`: the first word says more than the second.
    let by_stem = || find(NAMES, name.split('.').next()?);
    find(NAMES, &name).or_else(by_extension).or_else(by_stem).unwrap_or("text")
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
    fn the_lists_are_sorted_and_without_doubles() {
        for list in [NAMES, EXTENSIONS] {
            assert!(list.windows(2).all(|pair| pair[0].0 < pair[1].0));
            assert!(list.iter().all(|pair| pair.0 == pair.0.to_ascii_lowercase()));
        }
        assert!(EXTENSIONS.len() > 60);
    }
}
