//! The documents of a run, and their copy in the run directory: what a run learned from stays what
//! it was, whatever happens to the files meanwhile.

use crate::files;
use crate::report::{Done, Failure};
use crate::source::compress;
use elapid::Sink;
use elapid::{Document, Part};
use elapid::{Package, PackageFile as OutFile};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// What a run learns from and is measured on.
pub struct Data {
    /// To learn from.
    pub training: Vec<Document>,
    /// To measure on.
    pub held_out: Vec<Document>,
    /// What is said about both.
    pub facts: Facts,
}

/// What is said about the documents of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Facts {
    /// How the held-out ones were chosen, in words.
    pub split: String,
    /// What was left out, by reason.
    pub left_out: Value,
    /// Bits per byte that `gzip -9` makes of the held-out documents, one by one.
    pub gzip: Option<f64>,
    /// Bits per byte that `zstd -19` makes of them, with the training ones as a dictionary.
    pub zstd: Option<f64>,
    /// What that dictionary is.
    pub zstd_dictionary: String,
}

/// A document as it is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    name: String,
    language: String,
    parts: Vec<KeptPart>,
}

#[derive(Serialize, Deserialize)]
struct KeptPart {
    text: String,
    learned: bool,
    special: bool,
}

/// What `zstd -19` may take with a large dictionary.
const ZSTD_BYTES: u64 = 1 << 30;

const FILE: &str = "data.elapid";
const PARTS: [&str; 3] = ["training.jsonl", "held-out.jsonl", "facts.json"];

impl Data {
    /// Measures what compressors make of the held-out documents, where memory allows it.
    pub fn compress(&mut self, limit: u64) {
        self.facts.gzip = compress::gzip_bits_per_byte(&self.held_out);
        if limit < ZSTD_BYTES {
            self.facts.zstd_dictionary = "zstd was not measured: it takes much memory".into();
        } else if let Some((bits_per_byte, dictionary)) =
            compress::zstd_bits_per_byte(&self.training, &self.held_out)
        {
            self.facts.zstd = Some(bits_per_byte);
            self.facts.zstd_dictionary = dictionary.into();
        }
    }

    /// Copies the documents into the run directory.
    pub fn write(&self, dir: &Path) -> Done<()> {
        let facts = serde_json::to_vec(&self.facts)
            .map_err(|error| Failure::new(error, "this is a defect of Elapid"))?;
        let files: Vec<(String, OutFile)> = vec![
            (PARTS[0].into(), Box::new(|sink| lines(&self.training, sink))),
            (PARTS[1].into(), Box::new(|sink| lines(&self.held_out, sink))),
            (PARTS[2].into(), Box::new(move |sink| sink(&facts))),
        ];
        files::write(&dir.join(FILE), |sink| elapid::write_package("documents", &files, sink))?;
        Ok(())
    }

    /// Those of a run directory.
    pub fn read(dir: &Path) -> Done<Data> {
        let path = dir.join(FILE);
        let file = path.display().to_string();
        let package = Package::parse(&file, files::map(&path)?)?;
        package.verify()?;
        let hint = "the run may be of another version of Elapid";
        let part = |name: &str| {
            let missing = || Failure::new(format!("{file} holds no {name}"), hint);
            package.get(name).ok_or_else(missing)
        };
        let documents = |name: &str| -> Done<Vec<Document>> {
            let bytes = part(name)?;
            let lines =
                (*bytes).as_ref().split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            let parse = |line| {
                let kept: Kept = serde_json::from_slice(line)
                    .map_err(|error| Failure::new(format!("{file}: {name}: {error}"), hint))?;
                Ok(kept.into_document())
            };
            lines.map(parse).collect()
        };
        let facts = serde_json::from_slice((*part(PARTS[2])?).as_ref())
            .map_err(|error| Failure::new(format!("{file}: {error}"), hint))?;
        Ok(Data { training: documents(PARTS[0])?, held_out: documents(PARTS[1])?, facts })
    }
}

impl Kept {
    fn into_document(self) -> Document {
        let part =
            |part: KeptPart| Part { text: part.text, learned: part.learned, special: part.special };
        // What stands behind the name says which part of a file it is.
        let name = self.name.split(" (").next().unwrap_or_default();
        let language = match self.language.as_str() {
            "chat" => "chat",
            "text" => "text",
            _ => elapid::language_of_path(name),
        };
        Document { language, name: self.name, parts: self.parts.into_iter().map(part).collect() }
    }
}

fn lines(documents: &[Document], sink: &mut Sink) -> Result<(), elapid::Error> {
    for document in documents {
        let part = |part: &Part| KeptPart {
            text: part.text.clone(),
            learned: part.learned,
            special: part.special,
        };
        let kept = Kept {
            name: document.name.clone(),
            language: document.language.into(),
            parts: document.parts.iter().map(part).collect(),
        };
        let line = serde_json::to_vec(&kept).expect("texts are JSON");
        sink(&line)?;
        sink(b"\n")?;
    }
    Ok(())
}
