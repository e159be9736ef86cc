//! `elapid bench`: training speed against PyTorch and the limit of the machine.

mod generate;

use crate::compute::Compute;
use crate::files;
use crate::machine;
use crate::report::{Done, Failure, between, count, line};
use elapid::{Device, TrainBench};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Benchmark training steps, or prompt and decode speed of model files.
///
/// One step is forward, backward and AdamW on random tokens. The limit is the time of the matrix
/// products alone: 6 FLOPs per parameter and token at the rate measured in the same run. With
/// --torch a PyTorch script is run in turn, and ratios are printed; it takes --model, --threads,
/// --B, --T, --d, --layers, --vocab, --reps and prints one JSON object.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid bench\n  elapid bench --models mamba --reps 15\n  \
    elapid bench model.gguf --llama 'python bench_llamacpp.py'\n  \
    elapid bench --config runs/1/model/config.json --batch 4 --context 1024\n  \
    elapid bench --torch 'python lab/bench/bench_torch.py' --receipt bench.json")]
pub struct Bench {
    /// Model files: measure their prompt and decode speed instead of training
    #[arg(value_name = "MODEL")]
    files: Vec<PathBuf>,
    /// Prompt tokens, with MODEL
    #[arg(long, default_value_t = 512, value_parser = between(1, 1048576))]
    prompt: usize,
    /// Tokens to generate, with MODEL
    #[arg(long, default_value_t = 128, value_parser = between(1, 1048576))]
    gen_tokens: usize,
    /// Command that measures llama.cpp on a file, to compare with
    #[arg(long)]
    llama: Option<String>,
    /// Architectures to train, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "llama,mamba,mamba2")]
    models: Vec<String>,
    /// Train the model of this config.json instead, as that of a run
    #[arg(long, value_name = "FILE", conflicts_with_all = ["models", "torch", "d_model", "layers"])]
    config: Option<PathBuf>,
    /// Sequences per batch
    #[arg(long, default_value_t = 8, value_parser = between(1, 65536))]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 256, value_parser = between(1, 1048576))]
    context: usize,
    /// Model width
    #[arg(long, default_value_t = 384, value_parser = between(64, 65536))]
    d_model: usize,
    /// Number of layers
    #[arg(long, default_value_t = 6, value_parser = between(1, 1000))]
    layers: usize,
    /// Vocabulary size
    #[arg(long, default_value_t = 8192, value_parser = between(2, 1048576))]
    vocab: usize,
    /// Timed repetitions; the median and the best are printed
    #[arg(long, default_value_t = 9, value_parser = between(1, 1000))]
    reps: usize,
    #[command(flatten)]
    compute: Compute,
    /// Command that runs the PyTorch script, to compare with
    #[arg(long)]
    torch: Option<String>,
    /// Write every figure to this file, as JSON
    #[arg(long)]
    receipt: Option<PathBuf>,
    /// Print the time of every kernel of a step (GPU only)
    #[arg(long)]
    profile: bool,
    /// Print one JSON object per figure
    #[arg(long)]
    json: bool,
}

/// PyTorch runs to compare each of our models with: (model, further flags).
const RIVALS: &[(&str, &[&str])] = &[
    ("llama", &["--model", "llama"]),
    ("llama", &["--model", "llama", "--compile"]),
    ("mamba", &["--model", "mamba"]),
    ("mamba", &["--model", "mamba_mambapy"]),
    ("mamba", &["--model", "mambapy_native"]),
    ("mamba2", &["--model", "mamba2"]),
];

/// A product of square matrices, as large as the device does in a moment, and its size.
fn probe(device: &Device) -> (usize, impl FnMut()) {
    let n_max = if device.kind() == "cpu" { 2048 } else { 8192 };
    let mut n = 1024;
    loop {
        let mut product = device.product_probe(n, n, n);
        product();
        let begin = Instant::now();
        product();
        if n == n_max || begin.elapsed().as_millis() > 50 {
            return (n, product);
        }
        n *= 2;
    }
}

impl Bench {
    pub fn run(&self) -> Done<ExitCode> {
        let mut figures = Vec::new();
        for path in &self.files {
            figures.extend(generate::run(path, self)?);
        }
        // One process per model: peak memory is a property of a process.
        match self.models.as_slice() {
            _ if !self.files.is_empty() => {}
            _ if self.config.is_some() => {
                figures.push(self.measure("config")?);
                self.print(&figures[0]);
            }
            [model] if self.torch.is_none() => {
                figures.push(self.measure(model)?);
                self.print(&figures[0]);
            }
            models => {
                for model in models {
                    figures.extend(self.beside(model)?);
                }
            }
        }
        if let Some(path) = &self.receipt {
            let text = json!({
                "version": env!("CARGO_PKG_VERSION"), "commit": commit(),
                "machine": machine::cpu(), "figures": figures,
            });
            std::fs::write(path, format!("{text:#}\n")).map_err(|error| {
                let problem = format!("cannot write {}: {error}", path.display());
                Failure::new(problem, "choose another --receipt")
            })?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Ours in a process of its own, then PyTorch's, with ratios.
    fn beside(&self, model: &str) -> Done<Vec<Value>> {
        let own = std::env::current_exe()
            .map_err(|error| Failure::new(error, "run one model at a time: --models llama"))?;
        let sizes = [
            ("--batch", "--B", self.batch),
            ("--context", "--T", self.context),
            ("--d-model", "--d", self.d_model),
            ("--layers", "--layers", self.layers),
            ("--vocab", "--vocab", self.vocab),
            ("--reps", "--reps", self.reps),
            ("--threads", "--threads", self.compute.n_threads()),
        ];
        let mut command = Command::new(own);
        command.args(["bench", "--json", "--models", model]);
        let ours = figures_of(command, &sizes.map(|(flag, _, size)| (flag, size)))?;
        self.print(&ours);
        let mut figures = vec![ours];
        let Some(torch) = &self.torch else { return Ok(figures) };
        for (_, flags) in RIVALS.iter().filter(|rival| rival.0 == model) {
            let mut command = command_of("--torch", torch)?;
            command.args(*flags);
            let theirs = figures_of(command, &sizes.map(|(_, flag, size)| (flag, size)))?;
            print_rival(&flags[1..].join(" "), &figures[0], &theirs);
            figures.push(theirs);
        }
        Ok(figures)
    }

    fn measure(&self, name: &str) -> Done<Value> {
        let device = self.compute.open()?;
        let mut bench = TrainBench::new(&self.config(name)?, self.batch, self.context, &device)?;
        let n_params = bench.n_params();
        let (mut times_ms, mut rates) = (Vec::new(), Vec::new());
        bench.step()?;
        let tape_bytes = bench.step()?;
        let live_max = device.memory().live_max;
        // Products are timed between the steps, so that both see the same machine.
        let (n, mut product) = probe(&device);
        for _ in 0..self.reps {
            let begin = Instant::now();
            bench.step()?;
            times_ms.push(begin.elapsed().as_secs_f64() * 1e3);
            let begin = Instant::now();
            product();
            rates.push(2.0 * (n as f64).powi(3) / begin.elapsed().as_secs_f64() / 1e9);
        }
        if self.profile {
            for kernel in bench.profile()? {
                let (name, n, ms) = (&kernel.name, kernel.n_launches, kernel.ms);
                let us = 1e3 * ms / n as f64;
                line(format!("kernel  {ms:9.3} ms  {n:5} times  {us:9.1} us  {name}"));
            }
        }
        let n_tok = (self.batch * self.context) as f64;
        let [best_ms, median_ms] = best_and_median(times_ms);
        let [_, gflops] = best_and_median(rates);
        let limit = gflops * 1e9 / (6.0 * n_params as f64);
        let tok_s = n_tok / median_ms * 1e3;
        Ok(json!({
            "bench": "train", "engine": "elapid", "model": name, "params": n_params,
            "device": device.describe(), "threads": self.compute.n_threads(), "B": self.batch,
            "T": self.context, "d": self.d_model, "layers": self.layers, "vocab": self.vocab,
            "step_min_ms": best_ms, "step_med_ms": median_ms,
            "tok_s_best": n_tok / best_ms * 1e3, "tok_s_med": tok_s,
            "gemm_gflops": gflops, "limit_tok_s": limit, "share_of_limit": tok_s / limit,
            "tape_mb": tape_bytes as f64 / (1 << 20) as f64, "peak_rss_mb": match device.kind() {
                "cpu" => peak_mib(),
                _ => Some(live_max as f64 / (1 << 20) as f64),
            },
        }))
    }

    fn print(&self, figure: &Value) {
        if self.json {
            line(figure);
            return;
        }
        let [params, step_ms, tok_s, best] =
            numbers(figure, ["params", "step_med_ms", "tok_s_med", "tok_s_best"]);
        let [share, limit, gflops, peak] =
            numbers(figure, ["share_of_limit", "limit_tok_s", "gemm_gflops", "peak_rss_mb"]);
        let (name, n, percent) = (text(figure, "model"), count(params), 100.0 * share);
        line(format!(
            "train   {name:<7} {n} params  {step_ms:.0} ms  {tok_s:.0} tok/s (best {best:.0})  \
             {percent:.0}% of the product limit {limit:.0} tok/s at {gflops:.0} GFLOP/s  \
             peak {peak:.0} MB",
        ));
    }

    /// The shapes of the PyTorch script.
    fn config(&self, name: &str) -> Done<String> {
        if let Some(path) = &self.config {
            return Ok(files::read_text(path)?);
        }
        let (d, layers, vocab) = (self.d_model, self.layers, self.vocab);
        let mut config = json!({
            "model_type": name, "vocab_size": vocab, "hidden_size": d, "num_hidden_layers": layers,
            "tie_word_embeddings": true, "initializer_range": 0.02, "state_size": 16, "expand": 2,
        });
        match name {
            "llama" => {
                config["intermediate_size"] = json!(d * 8 / 3);
                config["num_attention_heads"] = json!(d / 64);
                config["num_key_value_heads"] = json!(d / 64);
                config["max_position_embeddings"] = json!(self.context);
            }
            "mamba" => {}
            "mamba2" => {
                config["state_size"] = json!(128);
                config["head_dim"] = json!(64);
                config["num_heads"] = json!(d * 2 / 64);
                config["n_groups"] = json!(1);
            }
            other => {
                let problem = format!("unknown architecture `{other}`");
                return Err(Failure::new(problem, "known architectures are llama, mamba, mamba2"));
            }
        }
        Ok(config.to_string())
    }
}

fn text<'a>(figure: &'a Value, key: &str) -> &'a str {
    figure[key].as_str().unwrap_or_default()
}

fn numbers<const N: usize>(figure: &Value, keys: [&str; N]) -> [f64; N] {
    keys.map(|key| figure[key].as_f64().unwrap_or(f64::NAN))
}

/// Of times; of rates the first is the lowest.
fn best_and_median(mut list: Vec<f64>) -> [f64; 2] {
    list.sort_by(f64::total_cmp);
    [list[0], list[list.len() / 2]]
}

fn print_rival(name: &str, ours: &Value, theirs: &Value) {
    const KEYS: [&str; 3] = ["tok_s_med", "tok_s_best", "peak_rss_mb"];
    let ([tok_s, best, peak], [our_tok_s, our_best, our_peak]) =
        (numbers(theirs, KEYS), numbers(ours, KEYS));
    line(format!(
        "torch   {name:<16} {tok_s:.0} tok/s (best {best:.0})  peak {peak:.0} MB  we are {:.2}x as \
         fast (best {:.2}x) in {:.2}x the memory",
        our_tok_s / tok_s,
        our_best / best,
        our_peak / peak,
    ));
}

/// The program that a flag names, with its first arguments.
fn command_of(flag: &str, text: &str) -> Done<Command> {
    let mut words = text.split_whitespace();
    let program = words.next().ok_or_else(|| {
        let hint = format!("give the command, as in {flag} 'python script.py'");
        Failure::new(format!("{flag} is empty"), &hint)
    })?;
    let mut command = Command::new(program);
    command.args(words);
    Ok(command)
}

/// Runs a program with these sizes and reads the last line of its output that is a JSON object.
fn figures_of(mut command: Command, sizes: &[(&str, usize)]) -> Done<Value> {
    for (flag, size) in sizes {
        command.args([flag, &size.to_string()[..]]);
    }
    let shown = format!("{command:?}");
    let output = command.output().map_err(|error| {
        Failure::new(format!("cannot run {shown}: {error}"), "check the command")
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let read = |line| serde_json::from_str::<Value>(line).ok().filter(Value::is_object);
    let figures = text.lines().rev().find_map(read).filter(|_| output.status.success());
    figures.ok_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or_default();
        Failure::new(format!("{shown} printed no figures: {last}"), "run it by itself")
    })
}

/// The commit of the working directory, where it is a repository.
fn commit() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// The most memory this process ever held, in MiB.
fn peak_mib() -> Option<f64> {
    machine::peak_bytes().map(|n| (n as f64 / (1 << 20) as f64).round())
}
