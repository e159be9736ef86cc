//! What other files of the project say about the place of the cursor, for requests that bring no
//! files of their own.
//!
//! The prompt cache of the engine finds again what begins with the same tokens, and other files
//! come first in a prompt. If each key that is pressed brought another choice of files, every
//! request would be read from its start. So a choice is kept for a place in a file: as long as the
//! lines around the cursor are mostly the same (it moved less than about 40 lines) nothing is asked
//! of the index for 10 s; after that the choice is made anew, and replaces the old one only if at
//! least a third of it would be another. A choice that is kept was made from files as they were:
//! what is saved meanwhile is seen with the next one.
//!
//! The file is the one that the request names, or the one that has the lines around the cursor.

use crate::project::Project;
use crate::source::index::{Index, Shown};
use elapid::FimFile;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A look at the times of all files costs some milliseconds.
const LOOK_AGE_MAX: Duration = Duration::from_secs(2);
/// How long a choice is not even questioned.
const KEPT_AGE_MAX: Duration = Duration::from_secs(10);
/// Places that are remembered: windows of an editor.
const N_KEPT: usize = 8;
/// Lines before and after the cursor that a place is known by.
const N_LINES: [usize; 2] = [60, 20];

/// The index of a project, and the choices that are kept.
pub struct Nearby {
    pub repo: String,
    inner: Mutex<Inner>,
    hasher: RandomState,
}

struct Inner {
    index: Index,
    /// The last used is last.
    kept: Vec<Kept>,
}

struct Kept {
    named: Option<String>,
    lines: HashSet<u64>,
    n_bytes: usize,
    made: Instant,
    picked: Picked,
}

/// What is shown besides the file at `path`, which is empty where it is not known.
#[derive(Clone, Debug)]
pub struct Picked {
    pub path: String,
    pub files: Arc<Vec<Shown>>,
}

impl Picked {
    pub fn shown(&self) -> Vec<FimFile<'_>> {
        self.files.iter().map(|(path, text)| FimFile { path, text }).collect()
    }
}

impl Nearby {
    pub fn new(project: &Project) -> Nearby {
        let inner = Inner { index: Index::new(&project.root), kept: Vec::new() };
        Nearby { repo: project.name(), inner: Mutex::new(inner), hasher: RandomState::new() }
    }

    /// Reads the project, so that the first request need not.
    pub fn warm_up(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).index.refresh(LOOK_AGE_MAX);
    }

    /// Files for a place, in at most `n_bytes`.
    pub fn pick(&self, named: Option<&str>, around: [&str; 2], n_bytes: usize) -> Picked {
        let lines = self.lines(around);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { index, kept } = &mut *inner;
        let is_here = |kept: &Kept| {
            let n_shared = kept.lines.intersection(&lines).count();
            kept.named.as_deref() == named
                && kept.n_bytes == n_bytes
                && n_shared > 0
                && 2 * n_shared >= kept.lines.len().min(lines.len())
        };
        let known = kept.iter().rposition(is_here).map(|at| kept.remove(at));
        let mut found = match known {
            Some(known) if known.made.elapsed() < KEPT_AGE_MAX => known,
            known => {
                index.refresh(LOOK_AGE_MAX);
                let mut picked = choose(index, named, around, n_bytes);
                if let Some(known) = known.filter(|known| is_alike(&known.picked, &picked)) {
                    picked = known.picked;
                }
                let named = named.map(str::to_string);
                Kept { named, lines: HashSet::new(), n_bytes, made: Instant::now(), picked }
            }
        };
        // The place moves with the cursor.
        found.lines = lines;
        let picked = found.picked.clone();
        kept.push(found);
        if kept.len() > N_KEPT {
            kept.remove(0);
        }
        picked
    }

    fn lines(&self, [prefix, suffix]: [&str; 2]) -> HashSet<u64> {
        let before = prefix.rsplit('\n').take(N_LINES[0]);
        let lines = before.chain(suffix.split('\n').take(N_LINES[1]));
        let lines = lines.map(str::trim).filter(|line| line.len() > 2);
        lines.map(|line| self.hasher.hash_one(line)).collect()
    }
}

fn choose(index: &Index, named: Option<&str>, [prefix, suffix]: [&str; 2], n: usize) -> Picked {
    let named = named.map(|named| Path::new(named.strip_prefix("file://").unwrap_or(named)));
    let path = named.and_then(|named| relative(index.root(), named));
    if path.is_none() && named.is_some_and(Path::is_absolute) {
        // A file of another project has nothing to do with this one.
        return Picked { path: String::new(), files: Arc::default() };
    }
    let path = path.or_else(|| index.file_of(prefix, suffix).map(str::to_string));
    let path = path.unwrap_or_default();
    let files = Arc::new(index.context(&path, prefix, suffix, n));
    Picked { path, files }
}

/// The path below `root` of a file that is there or may be new.
fn relative(root: &Path, named: &Path) -> Option<String> {
    let path = root.join(named);
    let path = path.canonicalize().unwrap_or(path);
    let part = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    };
    let parts: Option<Vec<String>> = path.strip_prefix(root).ok()?.components().map(part).collect();
    Some(parts?.join("/"))
}

/// Whether at least two thirds of the text of `new` are in `old`.
fn is_alike(old: &Picked, new: &Picked) -> bool {
    let size = |files: &[&Shown]| files.iter().map(|file| file.1.len()).sum::<usize>();
    let all: Vec<&Shown> = new.files.iter().collect();
    let shared: Vec<&Shown> = new.files.iter().filter(|file| old.files.contains(file)).collect();
    old.path == new.path && !old.files.is_empty() && 3 * size(&shared) >= 2 * size(&all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;

    fn text(name: &str) -> String {
        let line = |n: usize| format!("    {name}_value_{n} = {name}_of({n})\n");
        format!("def {name}(x):\n{}", (0..30).map(line).collect::<String>())
    }

    #[test]
    fn a_choice_is_kept_while_somebody_types_and_made_anew_elsewhere() {
        let root = scratch("nearby").canonicalize().unwrap();
        for name in ["alpha", "beta", "gamma"] {
            std::fs::write(root.join(format!("{name}.py")), text(name)).unwrap();
        }
        let nearby = Nearby::new(&Project { root: root.clone() });
        let prefix = format!("{}    y = beta(", text("alpha"));
        let first = nearby.pick(None, [&prefix, ""], 4000);
        assert_eq!(first.path, "alpha.py");
        assert_eq!(first.files.last().unwrap().0, "beta.py");
        let typed = format!("{prefix}1)\n    z = gamma(");
        let next = nearby.pick(None, [&typed, ""], 4000);
        assert!(Arc::ptr_eq(&first.files, &next.files), "the same choice");
        let other = nearby.pick(None, [&text("gamma"), ""], 4000);
        assert_eq!(other.path, "gamma.py");
        assert!(!Arc::ptr_eq(&first.files, &other.files));
        let named = nearby.pick(Some("beta.py"), [&prefix, ""], 4000);
        assert_eq!(named.path, "beta.py", "what a request says goes first");
        let full = root.join("beta.py");
        let full = nearby.pick(full.to_str(), [&prefix, ""], 4000);
        assert_eq!(full.path, "beta.py");
        let new = nearby.pick(Some("deep/new.py"), [&prefix, ""], 4000);
        assert_eq!((&new.path[..], new.files.is_empty()), ("deep/new.py", false));
        let up = nearby.pick(Some("../new.py"), [&prefix, ""], 4000);
        assert_eq!(up.path, "alpha.py", "a path that leads out of the project is no name");
        let elsewhere = nearby.pick(Some("/elsewhere/alpha.py"), [&prefix, ""], 4000);
        assert!(elsewhere.files.is_empty(), "{elsewhere:?}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_choice_that_is_two_thirds_the_same_counts_as_the_same() {
        let picked = |list: &[(&str, usize)]| {
            let file = |(path, n): &(&str, usize)| (path.to_string(), "x".repeat(*n));
            Picked { path: "a".into(), files: Arc::new(list.iter().map(file).collect()) }
        };
        let old = picked(&[("b", 200), ("c", 100)]);
        assert!(is_alike(&old, &picked(&[("d", 100), ("b", 200)])));
        assert!(!is_alike(&old, &picked(&[("d", 101), ("b", 200)])));
        assert!(!is_alike(&picked(&[]), &picked(&[("b", 200)])));
    }
}
