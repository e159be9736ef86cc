//! Where the files of a call lie: in the memory of a page, or, for tests, in a folder for passing
//! things on.

#[cfg(target_arch = "wasm32")]
mod place {
    pub use elapid::take_files;
    use std::path::{Path, PathBuf};

    pub fn root() -> PathBuf {
        PathBuf::new()
    }

    /// A folder in memory needs no making.
    pub fn make(_path: &Path) {}
}

#[cfg(not(target_arch = "wasm32"))]
mod place {
    use std::fs;
    use std::path::{Path, PathBuf};

    pub fn root() -> PathBuf {
        let thread = format!("{:?}", std::thread::current().id());
        std::env::temp_dir().join(format!("elapid-web-{}-{thread}", std::process::id()))
    }

    /// A folder that cannot be made shows itself when something is written there.
    pub fn make(path: &Path) {
        let _ = fs::create_dir_all(path.join("adapter"));
    }

    pub fn take_files(path: &Path) -> Vec<(String, Vec<u8>)> {
        let mut taken = Vec::new();
        if let Ok(bytes) = fs::read(path) {
            taken.push((String::new(), bytes));
            let _ = fs::remove_file(path);
            return taken;
        }
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            for (below, bytes) in take_files(&entry.path()) {
                let dot = if below.is_empty() { "" } else { "/" };
                taken.push((format!("{name}{dot}{below}"), bytes));
            }
        }
        let _ = fs::remove_dir_all(path);
        taken.sort();
        taken
    }
}

pub use place::*;
