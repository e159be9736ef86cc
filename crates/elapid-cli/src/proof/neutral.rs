//! A fixed set of ordinary code of twelve languages, written for this purpose and from no project:
//! a model that was adapted should read it no worse than before.

use elapid::Document;

const FILES: [(&str, &str); 12] = [
    ("ring_cache.py", include_str!("../../neutral/ring_cache.py")),
    ("expression.rs", include_str!("../../neutral/expression.rs")),
    ("router.js", include_str!("../../neutral/router.js")),
    ("debounce_queue.ts", include_str!("../../neutral/debounce_queue.ts")),
    ("matrix.go", include_str!("../../neutral/matrix.go")),
    ("calendar.c", include_str!("../../neutral/calendar.c")),
    ("scheduler.cpp", include_str!("../../neutral/scheduler.cpp")),
    ("TextWrapper.java", include_str!("../../neutral/TextWrapper.java")),
    ("state_machine.rb", include_str!("../../neutral/state_machine.rb")),
    ("CsvReader.cs", include_str!("../../neutral/CsvReader.cs")),
    ("rotate_logs.sh", include_str!("../../neutral/rotate_logs.sh")),
    ("retries.md", include_str!("../../neutral/retries.md")),
];

/// The files of the set, by name.
pub fn neutral() -> Vec<Document> {
    FILES.into_iter().map(|(name, text)| Document::whole(name, text)).collect()
}

#[cfg(test)]
mod tests {
    use super::neutral;
    use std::collections::BTreeSet;

    #[test]
    fn the_set_has_a_file_of_each_language_that_training_would_take() {
        let documents = neutral();
        let languages: BTreeSet<&str> = documents.iter().map(|it| it.language).collect();
        assert_eq!((documents.len(), languages.len()), (12, 12), "{languages:?}");
        for document in documents {
            let (name, n_bytes) = (&document.name, document.n_bytes());
            assert!((2500..=5120).contains(&n_bytes), "{name}: {n_bytes}");
            let unwanted = elapid::unwanted_content(name, document.text().as_bytes());
            assert_eq!(unwanted, None, "{name}");
            assert!(crate::source::secrets::find(&document.text()).is_empty(), "{name}");
        }
    }
}
