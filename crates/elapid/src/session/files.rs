//! What a session saves, as files in memory: for programs without a file system.

use super::Session;
use crate::error::Result;
use crate::files::safetensors;
use crate::model::export::{Export, OutFile};
use crate::model::peft::{self, CONFIG, TENSORS};
use crate::model::weights::Weights;
use crate::model::{gguf_lora, lora};
use crate::train::method;
use crate::{files, write_package};

/// Names and contents.
pub(crate) type Files = Vec<(String, Vec<u8>)>;

fn collected(write: impl FnOnce(&mut files::Sink) -> Result<()>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    write(&mut |more| {
        bytes.extend_from_slice(more);
        Ok(())
    })?;
    Ok(bytes)
}

impl Session {
    /// What `save` writes to a path of this name: one file for `.gguf` and `.elapid`, else those
    /// of a directory. Weights are awaited, from wherever they are.
    pub(crate) async fn files_later(&self, weights: &Weights, name: &str) -> Result<Files> {
        let here = weights.read_to_host().await;
        weights.device().check()?;
        let is = |extension: &str| name.rsplit_once('.').is_some_and(|it| it.1 == extension);
        if let Some(mut lora) = self.method.as_ref().and_then(|it| method::adapter(it, &here)) {
            lora.base = lora.base.or(self.model.is_stored().then(|| self.model.name().to_string()));
            if is("gguf") {
                let (metadata, tensors) = gguf_lora::write(&lora, self.model.model())?;
                let file = collected(|sink| files::gguf::write(&metadata, &tensors, sink))?;
                return Ok(vec![(name.into(), file)]);
            }
            let modules = lora::modules_of(self.model.model());
            let (config, tensors) = peft::write(&lora, Some(&modules))?;
            let format = &safetensors::FORMAT;
            let tensors = collected(|sink| safetensors::write(format, &tensors, sink))?;
            return Ok(vec![(TENSORS.into(), tensors), (CONFIG.into(), config.into_bytes())]);
        }
        if is("gguf") {
            let export = Export::gguf(&self.model, &here)?;
            let out = OutFile { name: name.into(), content: export.gguf_content(None)? };
            return Ok(vec![(name.into(), collected(|sink| out.write(sink))?)]);
        }
        let export = Export::directory(&self.model, &here);
        let list = export.directory_files(None)?;
        let file = |out: &OutFile| Ok((out.name.clone(), collected(|sink| out.write(sink))?));
        if !is("elapid") {
            return list.iter().map(file).collect();
        }
        let mut entries: Vec<(String, crate::PackageFile)> = Vec::new();
        for out in &list {
            entries.push((out.name.clone(), Box::new(move |sink| out.write(sink))));
        }
        let package = collected(|sink| write_package(self.model.name(), &entries, sink))?;
        Ok(vec![(name.into(), package)])
    }
}
