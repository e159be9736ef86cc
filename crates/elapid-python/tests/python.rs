//! Runs the Python tests (`tests/*.py`) on the package as a wheel holds it.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(program: &Path, words: &[&str], within: &Path) -> Output {
    let mut command = Command::new(program);
    command.args(words).current_dir(within).env("PYTHONDONTWRITEBYTECODE", "1");
    command.output().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    format!("{out}{err}")
}

/// The interpreter of an environment with numpy and pytest, or why there is none.
fn environment(target: &Path) -> Result<PathBuf, String> {
    let venv = target.join("python-venv");
    let python = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    if venv.join("complete").exists() {
        return Ok(python);
    }
    let system = Path::new("python3");
    let check = "import sys, ensurepip; sys.exit(sys.version_info < (3, 11))";
    match Command::new(system).args(["-c", check]).output() {
        Ok(done) if done.status.success() => {}
        _ => return Err("Python 3.11 with ensurepip is missing (python3-venv)".into()),
    }
    let made = run(system, &["-m", "venv", "--clear", venv.to_str().unwrap()], target);
    let wanted = ["-m", "pip", "install", "--quiet", "numpy", "pytest", "mypy"];
    let installed = made.status.success().then(|| run(&python, &wanted, target));
    match installed {
        Some(done) if done.status.success() => {
            std::fs::write(venv.join("complete"), "").unwrap();
            Ok(python)
        }
        _ => Err("numpy, pytest and mypy cannot be installed".into()),
    }
}

/// The package as a wheel holds it.
fn package(deps: &Path, folder: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/elapid");
    let package = folder.join("elapid");
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(&package).unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
        }
    }
    let prefix = if cfg!(windows) { "" } else { "lib" };
    let library = format!("{prefix}_native{}", std::env::consts::DLL_SUFFIX);
    let name = if cfg!(windows) { "_native.pyd" } else { "_native.abi3.so" };
    std::fs::copy(deps.join(library), package.join(name)).unwrap();
}

#[test]
fn the_package_does_what_its_tests_say() {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let built = deps.parent().unwrap();
    let python = match environment(built.parent().unwrap()) {
        Ok(python) => python,
        Err(why) => return println!("skip: the Python package: {why}"),
    };
    let folder = built.join("python-package");
    package(&deps, &folder);
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut command = Command::new(&python);
    command.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]).arg(&tests);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = [built.to_path_buf()].into_iter().chain(std::env::split_paths(&path));
    command.env("PATH", std::env::join_paths(path).unwrap());
    command.env("PYTHONPATH", &folder).env("PYTHONDONTWRITEBYTECODE", "1");
    let done = command.current_dir(&folder).output().unwrap();
    let text = said(&done);
    println!("{text}");
    assert!(done.status.success());
    // What the types promise is there, and what is there is typed.
    for words in [
        &["-m", "mypy", "--strict", "--no-incremental", "elapid"][..],
        &["-m", "mypy.stubtest", "elapid._native"],
    ] {
        let done = run(&python, words, &folder);
        assert!(done.status.success(), "{words:?}: {}", said(&done));
    }
}
