//! Adapters that a generator is given by their paths.

use super::{Generator, LoadedAdapter};
use crate::error::Result;
use crate::model::adapter::Adapter;
use std::path::{Path, PathBuf};

impl Generator {
    /// The adapter that the model was opened by.
    pub(super) fn with_own_adapter(mut self) -> Result<Generator> {
        if let Some(path) = self.base.adapter_path().map(Path::to_path_buf) {
            self.add_adapter(path, 1.0)?;
        }
        Ok(self)
    }

    /// Puts an adapter on the model, beside those that are there; its number.
    pub fn add_adapter(&mut self, path: impl AsRef<Path>, scale: f32) -> Result<usize> {
        let path = path.as_ref();
        let lora = Adapter::open(path)?.read(Some(&self.base), self.engine.device())?;
        let name = unique_name(path, &self.adapters);
        let number = self.engine.add_adapter(&name, lora)?;
        assert_eq!(number, self.adapters.len(), "adapters are numbered as they come");
        self.adapters.push(LoadedAdapter { name, path: path.into(), scale });
        Ok(number)
    }

    /// Takes an adapter off; requests that were taken keep it. Its number is not given again.
    pub fn remove_adapter(&mut self, number: usize) -> Result<()> {
        self.engine.remove_adapter(number)?;
        self.adapters[number] =
            LoadedAdapter { name: String::new(), path: PathBuf::new(), scale: 0.0 };
        Ok(())
    }
}

/// `a1` of `runs/a1`, of `runs/a1/adapter` and of `a1.gguf`, `runs/1` of `runs/1`; `a1-2` where
/// `a1` is taken.
fn unique_name(path: &Path, taken: &[LoadedAdapter]) -> String {
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut at = &*full;
    if at.ends_with("adapter") {
        at = at.parent().unwrap_or(at);
    }
    let mut name = last(at).unwrap_or_else(|| "adapter".into());
    if let (true, Some(of)) = (name.parse::<u64>().is_ok(), at.parent().and_then(last)) {
        name = format!("{of}/{name}");
    }
    let name = name.strip_suffix(".gguf").unwrap_or(&name).to_string();
    let is_taken = |name: &str| taken.iter().any(|adapter| adapter.name == name);
    let mut candidates = (2..).map(|n| format!("{name}-{n}"));
    match is_taken(&name) {
        false => name,
        true => candidates.find(|name| !is_taken(name)).expect("names do not run out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_adapters_are_unique() {
        let named = |name: &str| LoadedAdapter { name: name.into(), path: "x".into(), scale: 1.0 };
        assert_eq!(unique_name(Path::new("runs/a1/adapter"), &[]), "a1");
        assert_eq!(unique_name(Path::new("p/.elapid/adapt/3/adapter"), &[]), "adapt/3");
        assert_eq!(unique_name(Path::new("a1.gguf"), &[named("a1"), named("a1-2")]), "a1-3");
    }
}
