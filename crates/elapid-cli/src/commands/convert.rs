//! `elapid convert` and `elapid quantize`: a model in another form, and the receipt that it is the
//! same.

use crate::files;
use crate::report::live::{self, counted, progress};
use crate::report::{Done, Failure, between, count, line, mebibytes, n_threads_default};
use elapid::eval::parity::{self, Parity};
use elapid::files::package;
use elapid::model::checkpoint::{Checkpoint, GGUF_FILE, TEXTS};
use elapid::model::export::{Content, Export, Mix, OutFile};
use elapid::model::weights::Weights;
use elapid::tensor::DType;
use elapid::tensor::device::Device;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write a model in another form: GGUF, Hugging Face directory, or package.
///
/// The form is taken from OUT: `.gguf`, `.elapid`, anything else is a directory. What was written
/// is read again and compared with the original on fixed prompts; the last line says how far
/// apart they are. Adapters (PEFT directories, GGUF adapters) are converted with `--base`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid convert SmolLM2-135M model.gguf\n  \
    elapid convert model.gguf SmolLM2-135M --type f16\n  \
    elapid convert SmolLM2-135M model.elapid\n  \
    elapid convert my-adapter adapter.gguf --base SmolLM2-135M")]
pub struct Convert {
    /// Directory, .gguf or .elapid file
    input: PathBuf,
    /// Where to write
    output: PathBuf,
    /// Form, where the name of OUT does not say it; a package without .elapid is a directory
    #[arg(long, value_parser = ["gguf", "hf", "package"])]
    to: Option<String>,
    /// Store matrices as this (f32, f16, bf16; for GGUF and packages also q8_0, q4_k_m, ...)
    #[arg(long = "type", value_name = "TYPE")]
    stored: Option<String>,
    /// Model that an adapter belongs to
    #[arg(long)]
    base: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Write a model with its matrices in blocks of few bits.
///
/// Types are those of llama.cpp, bytes too: q8_0, q6_k, q5_k_m, q5_k_s, q4_k_m, q4_k_s, q4_0 and
/// others. OUT is a GGUF file or a package (.elapid).
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid quantize SmolLM2-135M small.gguf --type q4_k_m\n  \
    elapid quantize model-f16.gguf small.elapid --type q8_0")]
pub struct Quantize {
    /// Directory, .gguf or .elapid file
    input: PathBuf,
    /// Where to write
    output: PathBuf,
    /// How to store the matrices
    #[arg(long = "type", value_name = "TYPE")]
    stored: String,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// Replace OUT if it is there
    #[arg(long)]
    force: bool,
    /// Threads [default: all]
    #[arg(long, value_parser = between(1, 1024))]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Gguf,
    Directory,
    Package,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Form::Gguf => "gguf",
            Form::Directory => "hf",
            Form::Package => "package",
        }
    }

    /// By flag, else by extension.
    fn of(flag: Option<&str>, output: &Path) -> Done<Form> {
        let extension = extension(output);
        match (flag, extension.as_deref()) {
            (Some("gguf"), _) | (None, Some("gguf")) => Ok(Form::Gguf),
            (Some("package"), _) | (None, Some("elapid")) => Ok(Form::Package),
            (None, Some("safetensors" | "bin" | "json" | "pt" | "pth")) => {
                let problem = format!("{} does not say which form it is to have", output.display());
                Err(Failure::new(
                    problem,
                    "name a .gguf or .elapid file or a directory, or use --to",
                ))
            }
            _ => Ok(Form::Directory),
        }
    }
}

/// In small letters.
fn extension(path: &Path) -> Option<String> {
    path.extension().and_then(|extension| extension.to_str()).map(str::to_lowercase)
}

impl Convert {
    pub fn run(&self) -> Done<ExitCode> {
        let form = Form::of(self.to.as_deref(), &self.output)?;
        if let Some(adapter) = super::adapter::detect(&self.input)? {
            if self.stored.is_some() || form == Form::Package {
                let problem = "an adapter keeps its numbers, and has no package of its own";
                return Err(Failure::new(
                    problem,
                    "leave --type out; write a .gguf or a directory",
                ));
            }
            let threads = self.common.threads.unwrap_or_else(n_threads_default);
            let base = self.base.as_deref();
            let output = super::adapter::Output {
                path: &self.output,
                gguf: form == Form::Gguf,
                force: self.common.force,
                json: self.common.json,
            };
            return super::adapter::convert(adapter, base, &output, &Device::cpu(threads)?);
        }
        let mix = self.stored.as_deref().map(parse_type).transpose()?;
        Job { input: &self.input, output: &self.output, form, mix, common: &self.common }.run()
    }
}

impl Quantize {
    pub fn run(&self) -> Done<ExitCode> {
        let mix = Some(parse_type(&self.stored)?);
        let form = match Form::of(None, &self.output)? {
            Form::Directory => {
                let problem = format!("{} is no .gguf or .elapid file", self.output.display());
                return Err(Failure::new(problem, "a directory cannot hold blocks: name a file"));
            }
            form => form,
        };
        Job { input: &self.input, output: &self.output, form, mix, common: &self.common }.run()
    }
}

fn parse_type(name: &str) -> Done<Mix> {
    Mix::from_name(&name.to_lowercase()).ok_or_else(|| {
        let hint = format!("types are {}", Mix::NAMES.join(", "));
        Failure::new(format!("there is no type {name:?}"), &hint)
    })
}

/// Fails where something is that must not be replaced, and where nothing can be.
pub fn check_output(output: &Path, force: bool) -> Done<()> {
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        let problem = format!("there is no directory {}", parent.display());
        return Err(Failure::new(problem, "make it first"));
    }
    let is_empty = |dir: &Path| std::fs::read_dir(dir).is_ok_and(|mut list| list.next().is_none());
    if !output.exists() || force || (output.is_dir() && is_empty(output)) {
        return Ok(());
    }
    let problem = format!("{} is there already", output.display());
    Err(Failure::new(problem, "choose another name, or add --force to replace it"))
}

struct Job<'a> {
    input: &'a Path,
    output: &'a Path,
    form: Form,
    mix: Option<Mix>,
    common: &'a Common,
}

impl Job<'_> {
    fn run(&self) -> Done<ExitCode> {
        check_output(self.output, self.common.force)?;
        if self.output.exists() && self.output.is_dir() != self.is_directory() {
            let kind = if self.is_directory() { "a file" } else { "a directory" };
            let problem = format!("{} is {kind}", self.output.display());
            return Err(Failure::new(problem, "choose another name"));
        }
        let threads = self.common.threads.unwrap_or_else(n_threads_default);
        let device = Device::cpu(threads)?;
        let checkpoint = files::open(self.input)?;
        let weights = checkpoint.weights(&device)?;
        self.say_input(&checkpoint, &weights);
        let n_bytes = device.run(|| self.write(&checkpoint, &weights))?;
        let written = files::open(self.output)?;
        let new_weights = written.weights(&device)?;
        let parity = device.run(|| -> Done<Parity> {
            let tokenizer = checkpoint.tokenizer()?;
            let n_vocab = checkpoint.model().config().n_vocab;
            let prompts = parity::prompts(tokenizer.as_ref(), n_vocab)?;
            let pair = [(checkpoint.model(), &weights), (written.model(), &new_weights)];
            Ok(parity::compare(pair, &prompts)?)
        })?;
        self.receipt(&new_weights, n_bytes, &parity)
    }

    fn say_input(&self, checkpoint: &Checkpoint, weights: &Weights) {
        if self.common.json {
            return;
        }
        let config = checkpoint.model().config();
        line(format!(
            "read    {}  {}, {} layers, {} parameters, {}",
            self.input.display(),
            config.family,
            config.layers.len(),
            count(weights.n_elem() as f64),
            dtypes(weights)
        ));
    }

    /// Matrices in a directory: one of three dtypes.
    fn plain(&self) -> Done<Option<DType>> {
        let Some(mix) = self.mix else { return Ok(None) };
        match mix.name() {
            "f32" => Ok(Some(DType::F32)),
            "f16" => Ok(Some(DType::F16)),
            "bf16" => Ok(Some(DType::BF16)),
            other => Err(Failure::new(
                format!("a directory cannot hold {other}"),
                "use f32, f16 or bf16, or write a .gguf or .elapid file",
            )),
        }
    }

    fn write(&self, checkpoint: &Checkpoint, weights: &Weights) -> Done<u64> {
        match self.form {
            Form::Directory => {
                let export = Export::directory(checkpoint, weights);
                let out = export.directory_files(self.plain()?)?;
                self.write_directory(&out, None)
            }
            Form::Gguf => {
                let export = Export::gguf(checkpoint, weights)?;
                let content = export.gguf_content(self.mix)?;
                self.write_file(&OutFile { name: String::new(), content })
            }
            Form::Package => {
                let keeps_blocks = self.mix.is_none() && has_blocks(weights);
                let plain = self.plain();
                let (blocks, floats);
                let list = match plain {
                    Ok(dtype) if !keeps_blocks => {
                        floats = Export::directory(checkpoint, weights);
                        floats.directory_files(dtype)?
                    }
                    _ => {
                        blocks = Export::gguf(checkpoint, weights)?;
                        blocks.package_files(self.mix)?
                    }
                };
                self.write_package(checkpoint, weights, list)
            }
        }
    }

    fn write_file(&self, out: &OutFile) -> Done<u64> {
        let bar = progress("write", live::BYTES, content_bytes(&out.content));
        files::write(self.output, |sink| out.write(&mut counted(&bar, sink)))
    }

    fn write_package(
        &self,
        checkpoint: &Checkpoint,
        weights: &Weights,
        mut list: Vec<OutFile>,
    ) -> Done<u64> {
        if !list.iter().any(|out| out.name == CARD) {
            let content = Content::Bytes(card(checkpoint, weights).into_bytes());
            list.insert(0, OutFile { name: CARD.into(), content });
        }
        let total = list.iter().map(|out| content_bytes(&out.content)).sum();
        if self.is_directory() {
            return self.write_directory(&list, Some(checkpoint.name()));
        }
        let bar = progress("write", live::BYTES, total);
        let mut entries: Vec<(String, package::OutFile)> = Vec::new();
        for out in &list {
            entries.push((out.name.clone(), Box::new(move |sink| out.write(sink))));
        }
        let name = checkpoint.name();
        files::write(self.output, |sink| package::write(name, &entries, &mut counted(&bar, sink)))
    }

    /// Whether OUT is to be a directory: a package is one where its name does not end in .elapid.
    fn is_directory(&self) -> bool {
        let is_file = extension(self.output).as_deref() == Some("elapid");
        self.form == Form::Directory || (self.form == Form::Package && !is_file)
    }

    /// Files of the model that was there before, which the new one does not have.
    fn remove_others(&self, list: &[OutFile]) -> Done<()> {
        let stays = |name: &str| list.iter().any(|out| out.name == name);
        let is_ours = |name: &str| {
            TEXTS.contains(&name)
                || ["config.json", GGUF_FILE, package::MANIFEST, package::MANIFEST_HASH]
                    .contains(&name)
                || (name.starts_with("model") && name.contains(".safetensors"))
        };
        let Ok(entries) = std::fs::read_dir(self.output) else { return Ok(()) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if is_ours(name) && !stays(name) {
                std::fs::remove_file(&path).map_err(|error| {
                    let problem = format!("cannot remove {}: {error}", path.display());
                    Failure::new(problem, "look at the rights of the directory")
                })?;
            }
        }
        Ok(())
    }

    /// With a name the directory becomes a package.
    fn write_directory(&self, list: &[OutFile], package_name: Option<&str>) -> Done<u64> {
        let dir = self.output;
        std::fs::create_dir_all(dir).map_err(|error| {
            let hint = "look at the rights of the directory above";
            Failure::new(format!("cannot make {}: {error}", dir.display()), hint)
        })?;
        let total = list.iter().map(|out| content_bytes(&out.content)).sum();
        let bar = progress("write", live::BYTES, total);
        let mut n_bytes = 0;
        for out in list {
            let path = dir.join(&out.name);
            n_bytes += files::write(&path, |sink| out.write(&mut counted(&bar, sink)))?;
        }
        // Not before: the model that is converted may lie in the same directory.
        self.remove_others(list)?;
        if let Some(name) = package_name {
            let map = |out: &OutFile| files::map(&dir.join(&out.name));
            let bytes = list.iter().map(map).collect::<Result<Vec<_>, _>>()?;
            let names = list.iter().map(|out| out.name.as_str());
            let all: Vec<(&str, &[u8])> = names.zip(bytes.iter().map(|b| (**b).as_ref())).collect();
            let [manifest, hash] = package::manifest_of_directory(name, &all)?;
            for (name, bytes) in [(package::MANIFEST, manifest), (package::MANIFEST_HASH, hash)] {
                n_bytes += files::write(&dir.join(name), |sink| sink(&bytes))?;
            }
        }
        Ok(n_bytes)
    }

    fn receipt(&self, weights: &Weights, n_bytes: u64, parity: &Parity) -> Done<ExitCode> {
        // Without blocks or shorter floats nothing but rounding may differ.
        let is_exact = !has_blocks(weights) && self.mix.is_none_or(|mix| mix.name() == "f32");
        let same = parity.logit_difference <= 1e-3;
        let verdict = match (parity.logit_difference == 0.0, same, is_exact) {
            (true, _, _) => "equal",
            (_, true, _) => "same",
            (_, _, false) if parity.logit_difference.is_finite() => "close",
            _ => "DIFFERENT",
        };
        if self.common.json {
            line(json!({
                "output": self.output.display().to_string(), "form": self.form.name(),
                "type": self.mix.map(Mix::name), "bytes": n_bytes,
                "parity": {
                    "verdict": verdict, "prompts": parity.n_prompts, "tokens": parity.n_tok,
                    "logit_difference": parity.logit_difference, "top1": parity.top1(),
                    "divergence": parity.divergence,
                },
            }));
        } else {
            line(format!(
                "write   {}  {}, {}, {}",
                self.output.display(),
                self.form.name(),
                mebibytes(n_bytes as f64),
                dtypes(weights)
            ));
            line(format!(
                "parity  {verdict}: {} prompts, {} tokens, largest logit difference {:.2e}, top-1 \
                 {}/{} ({:.1}%), divergence {:.2e}",
                parity.n_prompts,
                parity.n_tok,
                parity.logit_difference,
                parity.n_top1,
                parity.n_tok,
                100.0 * parity.top1(),
                parity.divergence
            ));
        }
        Ok(if verdict == "DIFFERENT" { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }
}

/// The model card of a package.
const CARD: &str = "README.md";

/// A card for a model that came without one: what is known for certain.
fn card(checkpoint: &Checkpoint, weights: &Weights) -> String {
    let config = checkpoint.model().config();
    let name = checkpoint.name();
    let mut lines = vec![
        format!("# {name}"),
        String::new(),
        format!("A {} model of {} layers.", config.family, config.layers.len()),
        String::new(),
        "| | |".into(),
        "|---|---|".into(),
        format!("| parameters | {} |", count(weights.n_elem() as f64)),
        format!("| width | {} |", config.d_model),
        format!("| vocabulary | {} |", config.n_vocab),
        format!("| stored as | {} |", dtypes(weights)),
    ];
    if let Some(n_ctx) = config.n_ctx {
        lines.push(format!("| context | {n_ctx} tokens |"));
    }
    let more = "What it was trained on, for what and under which licence, its maker must say here.";
    lines.extend([String::new(), more.into(), String::new()]);
    lines.join("\n")
}

fn has_blocks(weights: &Weights) -> bool {
    weights.ids().any(|id| matches!(weights.tensor(id).dtype(), DType::Block(_)))
}

/// Bytes that will be written, nearly: for the progress alone.
fn content_bytes(content: &Content) -> u64 {
    let of = |tensors: &[elapid::files::Outgoing]| {
        let n_bytes = |t: &elapid::files::Outgoing| t.dtype.n_bytes(t.shape.iter().product());
        tensors.iter().filter_map(n_bytes).sum::<usize>() as u64
    };
    match content {
        Content::Bytes(bytes) => bytes.len() as u64,
        Content::SafeTensors(tensors) | Content::Gguf(_, tensors) => of(tensors),
    }
}

fn dtypes(weights: &Weights) -> String {
    let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
    for id in weights.ids() {
        let tensor = weights.tensor(id);
        *by_name.entry(tensor.dtype().name()).or_default() += tensor.n_bytes();
    }
    stored(&by_name)
}

/// How much is stored in each way: `q4_k 61.2 MiB, f32 0.4 MiB`.
pub fn stored(by_name: &BTreeMap<&str, usize>) -> String {
    let mut list: Vec<_> = by_name.iter().collect();
    list.sort_by_key(|(name, n_bytes)| (std::cmp::Reverse(**n_bytes), **name));
    let texts = list.iter().map(|(name, n)| format!("{name} {}", mebibytes(**n as f64)));
    texts.collect::<Vec<_>>().join(", ")
}
