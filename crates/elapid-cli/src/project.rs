//! The folder of a project: where it begins, what `elapid adapt` left there, and which model a
//! command takes that was given none.
//!
//! ```text
//! ROOT/                  the nearest parent with .elapid or .git, else the directory itself
//!   .elapid/adapt/N/     a run directory, N = 1, 2, ...
//!     certificate.json   when it is finished: what was measured, what to load
//!     adapter/ or model/
//! ```
//!
//! Of a certificate the fields named here are read, and any of them may be missing: an older
//! version of the program wrote it, or a newer one.

use crate::base;
use crate::files;
use crate::report::Done;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub const FOLDER: &str = ".elapid";
pub const CERTIFICATE: &str = "certificate.json";
/// The verdict of a run whose result is used.
const BETTER: &str = "better";

#[derive(Clone)]
pub struct Project {
    pub root: PathBuf,
}

impl Project {
    /// The project that a file or directory belongs to.
    pub fn of(path: &Path) -> Project {
        let path = std::path::absolute(path).unwrap_or(path.into());
        let path = path.canonicalize().unwrap_or(path);
        let start = if path.is_dir() { &*path } else { path.parent().unwrap_or(&path) };
        Project { root: start.ancestors().find(|path| is_root(path)).unwrap_or(start).into() }
    }

    /// The same for a file that is open in an editor. Where nothing marks a project, the folder
    /// that the editor has open is one.
    pub fn of_document(path: &Path, folders: &[PathBuf]) -> Project {
        let own = Project::of(path);
        let folders = folders.iter().filter_map(|folder| folder.canonicalize().ok());
        let holding = folders.filter(|folder| own.root.starts_with(folder));
        match holding.max_by_key(|folder| folder.as_os_str().len()) {
            Some(root) if !is_root(&own.root) => Project { root },
            _ => own,
        }
    }

    /// The path of a file of it, with `/` between its parts.
    pub fn relative(&self, path: &Path) -> String {
        let path = path.canonicalize().unwrap_or(path.into());
        let path = path.strip_prefix(&self.root).unwrap_or(&path);
        let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
        parts.join("/")
    }

    /// The last part of its path.
    pub fn name(&self) -> String {
        let name = self.root.file_name().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or("project".into())
    }

    /// Where runs of `elapid adapt` lie.
    pub fn folder(&self) -> PathBuf {
        self.root.join(FOLDER).join("adapt")
    }

    /// What was adapted here, finished or not, by number.
    pub fn runs(&self) -> Vec<Adapted> {
        let entries = std::fs::read_dir(self.folder()).into_iter().flatten().flatten();
        let mut runs: Vec<Adapted> = entries
            .filter_map(|entry| Adapted::open(entry.file_name().to_str()?.parse().ok()?, &entry))
            .collect();
        runs.sort_by_key(|run| run.number);
        runs
    }

    /// The newest that is finished and was measured to be better.
    pub fn newest(&self) -> Option<Adapted> {
        self.runs().into_iter().rev().find(Adapted::is_better)
    }
}

fn is_root(path: &Path) -> bool {
    path.join(FOLDER).is_dir() || path.join(".git").exists()
}

/// A run of `elapid adapt`.
pub struct Adapted {
    pub number: u64,
    pub dir: PathBuf,
    /// None while it is not finished.
    pub certificate: Option<Value>,
}

/// What to load: a model, and an adapter on it with its scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Loadable {
    pub model: PathBuf,
    pub adapter: Option<(PathBuf, f32)>,
}

impl Adapted {
    fn open(number: u64, entry: &std::fs::DirEntry) -> Option<Adapted> {
        let dir = entry.path();
        let text = std::fs::read_to_string(dir.join(CERTIFICATE)).ok();
        let certificate = text.and_then(|text| serde_json::from_str(&text).ok());
        dir.is_dir().then_some(Adapted { number, dir, certificate })
    }

    fn field(&self, pointer: &str) -> Option<&Value> {
        self.certificate.as_ref()?.pointer(pointer)
    }

    fn text(&self, pointer: &str) -> Option<&str> {
        self.field(pointer)?.as_str()
    }

    pub fn verdict(&self) -> Option<&str> {
        self.text("/verdict")
    }

    /// RFC 3339.
    pub fn created(&self) -> Option<&str> {
        self.text("/created")
    }

    pub fn base(&self) -> Option<&str> {
        self.text("/base/name").or(self.text("/base/path"))
    }

    /// Bits per byte of held-out text, before and after.
    pub fn bits(&self) -> [Option<f64>; 2] {
        ["before", "after"].map(|when| {
            self.field(&format!("/held_out/bits_per_byte/{when}")).and_then(Value::as_f64)
        })
    }

    pub fn is_better(&self) -> bool {
        self.verdict().is_some_and(|verdict| verdict.eq_ignore_ascii_case(BETTER))
    }

    /// What to load, or in words what of it is missing.
    pub fn loadable(&self) -> Done<Result<Loadable, String>> {
        let is_full = self.text("/adapter/kind") == Some("full");
        let own = self.text("/model").unwrap_or(if is_full { "model" } else { "adapter" });
        let own = self.dir.join(own);
        if !own.exists() {
            return Ok(Err(format!("{} is not there", own.display())));
        }
        if is_full {
            return Ok(Ok(Loadable { model: own, adapter: None }));
        }
        let named = self.text("/base/path").map(PathBuf::from);
        let is_shipped = match &named {
            Some(path) => path.file_name().is_some_and(|name| *name == *base::file_name()),
            None => self.text("/base/name") == Some(base::NAME),
        };
        let model = match named {
            _ if is_shipped => base::path()?,
            Some(path) if path.exists() => path,
            Some(path) => return Ok(Err(format!("its base {} is not there", path.display()))),
            None => return Ok(Err("it does not name its base".into())),
        };
        let scale = self.field("/adapter/scale").and_then(Value::as_f64).unwrap_or(1.0);
        Ok(Ok(Loadable { model, adapter: Some((own, scale as f32)) }))
    }

    pub fn n_bytes(&self) -> u64 {
        files::n_bytes_in(&self.dir)
    }
}

/// What a command loads that was given no model, and why, in a sentence.
pub struct Choice {
    pub load: Loadable,
    pub why: String,
}

/// The newest adapter of a project with its base, else the shipped model.
pub fn choose(project: &Project) -> Done<Choice> {
    let name = project.name();
    let Some(newest) = project.newest() else {
        let why = match project.runs().is_empty() {
            true => format!("nothing is adapted in {name} yet (`elapid adapt`)"),
            false => format!("no run in {name} made it better (`elapid list`)"),
        };
        return shipped(&why);
    };
    let place = format!("{FOLDER}/adapt/{}", newest.number);
    match newest.loadable()? {
        Err(missing) => shipped(&format!("{place} of {name} cannot be used: {missing}")),
        Ok(load) => {
            let of = newest.base().unwrap_or("its base");
            let gain = match newest.bits() {
                [Some(before), Some(after)] => format!(", {before:.3} to {after:.3} bits per byte"),
                _ => String::new(),
            };
            let why = format!("{place} on {of}: the newest of {name} that is better{gain}");
            Ok(Choice { load, why })
        }
    }
}

/// The shipped model.
pub fn shipped(reason: &str) -> Done<Choice> {
    let load = Loadable { model: base::path()?, adapter: None };
    Ok(Choice { load, why: format!("{}: {reason}", base::NAME) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;
    use serde_json::json;

    fn run(project: &Project, number: u64, certificate: Option<Value>) {
        let dir = project.folder().join(number.to_string());
        std::fs::create_dir_all(dir.join("adapter")).unwrap();
        std::fs::create_dir_all(dir.join("model")).unwrap();
        if let Some(certificate) = certificate {
            std::fs::write(dir.join(CERTIFICATE), certificate.to_string()).unwrap();
        }
    }

    #[test]
    fn a_project_begins_at_the_nearest_parent_with_a_mark() {
        let dir = scratch("project-root").canonicalize().unwrap();
        std::fs::create_dir_all(dir.join("a/.git")).unwrap();
        std::fs::create_dir_all(dir.join("a/b/.elapid")).unwrap();
        std::fs::create_dir_all(dir.join("a/b/c")).unwrap();
        std::fs::create_dir_all(dir.join("a/d")).unwrap();
        std::fs::write(dir.join("a/d/x.rs"), "x").unwrap();
        assert_eq!(Project::of(&dir.join("a/b/c")).root, dir.join("a/b"));
        assert_eq!(Project::of(&dir.join("a/d/x.rs")).root, dir.join("a"));
        assert_eq!(Project::of(&dir.join("a/d")).name(), "a");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_newest_finished_run_that_is_better_is_taken_and_ten_comes_after_nine() {
        let project = Project { root: scratch("project-newest") };
        assert!(project.newest().is_none());
        let kind = |kind: &str| json!({"verdict": "better", "adapter": {"kind": kind}});
        run(&project, 9, Some(kind("lora")));
        run(&project, 10, Some(kind("full")));
        run(&project, 11, Some(json!({"verdict": "not better"})));
        run(&project, 12, None);
        std::fs::write(project.folder().join("11").join(CERTIFICATE), "{").unwrap();
        std::fs::create_dir_all(project.folder().join("notes")).unwrap();
        let numbers: Vec<u64> = project.runs().iter().map(|run| run.number).collect();
        assert_eq!(numbers, [9, 10, 11, 12]);
        let newest = project.newest().unwrap();
        let load = newest.loadable().unwrap().unwrap();
        assert_eq!((newest.number, load.adapter), (10, None));
        assert_eq!(load.model, project.folder().join("10/model"));
        std::fs::remove_dir_all(&project.root).unwrap();
    }

    #[test]
    fn an_adapter_is_loaded_on_the_base_it_names_and_its_absence_is_said() {
        let project = Project { root: scratch("project-base") };
        let base = project.root.join("base.gguf");
        let made = |base: Value| {
            let adapter = json!({"kind": "lora", "scale": 0.5});
            json!({"verdict": "better", "base": base, "adapter": adapter})
        };
        run(&project, 1, Some(made(json!({"name": "m", "path": base}))));
        assert!(project.newest().unwrap().loadable().unwrap().unwrap_err().contains("base.gguf"));
        std::fs::write(&base, "x").unwrap();
        let load = project.newest().unwrap().loadable().unwrap().unwrap();
        assert_eq!(load.model, base);
        assert_eq!(load.adapter, Some((project.folder().join("1/adapter"), 0.5)));
        run(&project, 2, Some(made(json!({"name": "elapid-code"}))));
        let load = project.newest().unwrap().loadable().unwrap().unwrap();
        assert_eq!(load.model, base::path().unwrap());
        let choice = choose(&project).unwrap();
        assert!(choice.why.starts_with(".elapid/adapt/2 on elapid-code"), "{}", choice.why);
        std::fs::remove_dir_all(&project.root).unwrap();
    }
}
