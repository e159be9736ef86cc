//! `elapid convert` and `elapid quantize`: a model in another form, and the receipt that it is the
//! same.

use crate::report::live::progress;
use crate::report::{Done, Failure, between, count, line, mebibytes, n_threads_default};
use crate::run;
use elapid::{Adapter, Conversion, Device, Form, Mix, Model, Same};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Convert a model to GGUF, a Hugging Face directory, or a package.
///
/// The name of OUTPUT decides the format: `.gguf`, `.elapid`, anything else is a directory. The
/// result is read back and compared with the original on fixed prompts; the last line says how far
/// apart they are. Adapters (PEFT directories, GGUF adapters) are converted with `--base`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid convert SmolLM2-135M model.gguf\n  \
    elapid convert model.gguf SmolLM2-135M --type f16\n  \
    elapid convert SmolLM2-135M model.elapid\n  \
    elapid convert my-adapter adapter.gguf --base SmolLM2-135M")]
pub struct Convert {
    /// Model or adapter: directory, .gguf or .elapid file
    input: PathBuf,
    /// File or directory to write
    output: PathBuf,
    /// Output format, if the name does not decide it; a package without .elapid is a directory
    #[arg(long, value_parser = ["gguf", "hf", "package"])]
    to: Option<String>,
    /// Data type of matrices: f32, f16, bf16; for GGUF and packages also q8_0, q4_k_m, ...
    #[arg(long = "type", value_name = "TYPE")]
    stored: Option<String>,
    /// Base model of an adapter
    #[arg(long)]
    base: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// Quantize a model.
///
/// Takes the types of llama.cpp and writes the same bytes: q8_0, q6_k, q5_k_m, q5_k_s, q4_k_m,
/// q4_k_s, q4_0 and others. OUTPUT is a GGUF file or a package (.elapid).
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid quantize SmolLM2-135M small.gguf --type q4_k_m\n  \
    elapid quantize model-f16.gguf small.elapid --type q8_0")]
pub struct Quantize {
    /// Model: directory, .gguf or .elapid file
    input: PathBuf,
    /// File to write
    output: PathBuf,
    /// Quantization type
    #[arg(long = "type", value_name = "TYPE")]
    stored: String,
    #[command(flatten)]
    common: Common,
}

/// Fold an adapter (LoRA, DoRA, B/C) into its base model.
///
/// Writes a model that needs no adapter, in any form that `convert` writes: so DoRA reaches
/// llama.cpp.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid merge SmolLM2-135M runs/1 merged.gguf\n  \
    elapid merge model.gguf my-adapter merged --type f16")]
pub struct Merge {
    /// Base model: directory, .gguf or .elapid file
    base: PathBuf,
    /// Adapter: PEFT directory, GGUF adapter or run
    adapter: PathBuf,
    /// File or directory to write
    output: PathBuf,
    /// Data type of matrices: f32, f16, bf16; for GGUF and packages also q8_0, q4_k_m, ...
    #[arg(long = "type", value_name = "TYPE")]
    stored: Option<String>,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// Overwrite OUTPUT if it exists
    #[arg(long)]
    force: bool,
    /// CPU threads [default: all]
    #[arg(long, value_parser = between(1, 1024))]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// By flag, else by the name of the output.
fn form_of(flag: Option<&str>, output: &Path) -> Done<Form> {
    let extension = output.extension().and_then(|extension| extension.to_str());
    match (flag, extension.map(str::to_lowercase).as_deref()) {
        (Some("gguf"), _) => Ok(Form::Gguf),
        (Some("package"), _) => Ok(Form::Package),
        (Some(_), _) => Ok(Form::Directory),
        (None, Some("safetensors" | "bin" | "json" | "pt" | "pth")) => {
            let problem = format!("cannot tell the output format from {}", output.display());
            let hint = "name a .gguf or .elapid file or a directory, or use --to";
            Err(Failure::new(problem, hint))
        }
        _ => Ok(Form::from(output)),
    }
}

impl Convert {
    pub fn run(&self) -> Done<ExitCode> {
        let form = form_of(self.to.as_deref(), &self.output)?;
        match Adapter::detect(run::usable(&self.input)?)? {
            Some(adapter) => self.adapter(&adapter, form),
            None => {
                let mix = self.stored.as_deref().map(parse_type).transpose()?;
                convert(
                    Model::open(run::usable(&self.input)?)?,
                    &self.output,
                    form,
                    mix,
                    &self.common,
                )
            }
        }
    }

    fn adapter(&self, adapter: &Adapter, form: Form) -> Done<ExitCode> {
        let refuse = |problem| Failure::new(problem, "omit --type; write a .gguf or a directory");
        if self.stored.is_some() || form == Form::Package {
            return Err(refuse("an adapter cannot be quantized or written as a package"));
        }
        if form == Form::Gguf && Form::from(self.output.as_path()) == Form::Directory {
            return Err(refuse("the name of a GGUF adapter must end in .gguf"));
        }
        check_output(&self.output, self.common.force)?;
        let device = self.common.device()?;
        // What an adapter names as its base, where nobody says.
        let base = match &self.base {
            Some(base) => Some(Model::open(run::usable(base)?)?),
            None => Model::open(&self.input).ok(),
        };
        let info = adapter.info()?;
        if base.is_none() && (form == Form::Gguf || info.form == "gguf") {
            let problem = "converting a GGUF adapter needs its base model";
            return Err(Failure::new(problem, "add --base MODEL"));
        }
        if !self.common.json {
            let (path, n_params) = (adapter.path().display(), count(info.n_params as f64));
            let (kind, n) = (info.form, info.modules.len());
            line(format!("read    {path}  {kind} adapter, {n} modules, {n_params} parameters"));
        }
        let done = adapter.convert(&self.output, base.as_ref(), &device)?;
        if let Some(base) = base.as_ref().filter(|_| form == Form::Directory) {
            for caveat in adapter.caveats(base)? {
                eprintln!("note    {caveat}");
            }
        }
        let form = if form == Form::Gguf { "gguf" } else { "peft" };
        Ok(self.common.receipt(&self.output, form, None, &done))
    }
}

impl Quantize {
    pub fn run(&self) -> Done<ExitCode> {
        let mix = Some(parse_type(&self.stored)?);
        match form_of(None, &self.output)? {
            Form::Directory => {
                let problem = format!("{} is not a .gguf or .elapid file", self.output.display());
                Err(Failure::new(problem, "directories cannot be quantized: name a file"))
            }
            form => {
                let model = Model::open(run::usable(&self.input)?)?;
                convert(model, &self.output, form, mix, &self.common)
            }
        }
    }
}

impl Merge {
    pub fn run(&self) -> Done<ExitCode> {
        let form = form_of(None, &self.output)?;
        let mix = self.stored.as_deref().map(parse_type).transpose()?;
        let model =
            Model::open(run::usable(&self.base)?)?.with_adapter(run::usable(&self.adapter)?);
        convert(model, &self.output, form, mix, &self.common)
    }
}

fn parse_type(name: &str) -> Done<Mix> {
    Ok(name.parse()?)
}

/// Fails where something is that must not be replaced, and where nothing can be.
pub fn check_output(output: &Path, force: bool) -> Done<()> {
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
        let problem = format!("there is no directory {}", parent.display());
        return Err(Failure::new(problem, "create it first"));
    }
    let is_empty = |dir: &Path| std::fs::read_dir(dir).is_ok_and(|mut list| list.next().is_none());
    if !output.exists() || force || (output.is_dir() && is_empty(output)) {
        return Ok(());
    }
    let problem = format!("{} already exists", output.display());
    Err(Failure::new(problem, "choose another name, or add --force to overwrite it"))
}

fn convert(
    model: Model,
    output: &Path,
    form: Form,
    mix: Option<Mix>,
    common: &Common,
) -> Done<ExitCode> {
    check_output(output, common.force)?;
    if !common.json {
        let info = model.info()?;
        let (path, family, n_layer) = (model.name(), &info.family, info.n_layer);
        let (n_params, dtypes) = (count(info.n_params as f64), stored(&info.dtype_bytes));
        line(format!(
            "read    {path}  {family}, {n_layer} layers, {n_params} parameters, {dtypes}"
        ));
    }
    let mut progress = progress("write", "{binary_bytes} of {binary_total_bytes}");
    let done = model.convert(output, form, mix, &common.device()?, &mut progress)?;
    drop(progress);
    if let Some(note) = done.note {
        eprintln!("note    {note}");
    }
    Ok(common.receipt(output, &form.to_string(), mix, &done))
}

impl Common {
    fn device(&self) -> Done<Device> {
        Ok(Device::cpu(self.threads.unwrap_or_else(n_threads_default))?)
    }

    fn receipt(&self, output: &Path, form: &str, mix: Option<Mix>, done: &Conversion) -> ExitCode {
        let (verdict, parity) = (done.verdict.to_string(), done.parity.as_ref());
        if self.json {
            let mut about = json!({"verdict": verdict});
            if let Some(parity) = parity {
                about["prompts"] = json!(parity.n_prompts);
                about["tokens"] = json!(parity.n_tok);
                about["logit_difference"] = json!(parity.logit_difference);
                about["top1"] = json!(parity.top1());
                about["divergence"] = json!(parity.divergence);
            }
            if let Some(difference) = done.adapter_difference {
                about["adapter_difference"] = json!(difference);
            }
            line(json!({
                "output": output.display().to_string(), "form": form,
                "type": mix.map(|it| it.to_string()),
                "bytes": done.n_bytes, "parity": about,
            }));
        } else {
            let (size, dtypes) = (mebibytes(done.n_bytes as f64), stored(&done.dtype_bytes));
            let what = match done.adapter_difference {
                Some(_) => format!(" adapter, {size}"),
                None => format!(", {size}, {dtypes}"),
            };
            line(format!("write   {}  {form}{what}", output.display()));
            let mut facts = Vec::new();
            facts.extend(parity.map(|parity| {
                let (n, n_tok, n_top1) = (parity.n_prompts, parity.n_tok, parity.n_top1);
                let (logit, divergence) = (parity.logit_difference, parity.divergence);
                let percent = 100.0 * parity.top1();
                format!(
                    "{n} prompts, {n_tok} tokens, largest logit difference {logit:.2e}, \
                     top-1 {n_top1}/{n_tok} ({percent:.1}%), divergence {divergence:.2e}"
                )
            }));
            let of_adapter = done.adapter_difference;
            facts
                .extend(of_adapter.map(|it| format!("largest difference of the adapter {it:.2e}")));
            let more =
                if parity.is_none() { "; add --base MODEL to compare logits too" } else { "" };
            line(format!("parity  {verdict}: {}{more}", facts.join(", ")));
        }
        if done.verdict == Same::Different { ExitCode::from(1) } else { ExitCode::SUCCESS }
    }
}

/// How much is stored in each way: `q4_k 61.2 MiB, f32 0.4 MiB`.
pub fn stored(by_name: &BTreeMap<&str, usize>) -> String {
    let mut list: Vec<_> = by_name.iter().collect();
    list.sort_by_key(|(name, n_bytes)| (std::cmp::Reverse(**n_bytes), **name));
    let texts = list.iter().map(|(name, n)| format!("{name} {}", mebibytes(**n as f64)));
    texts.collect::<Vec<_>>().join(", ")
}
