//! `elapid plan --generate`: the memory that a model takes to answer prompts, without running it.
//!
//! ```text
//! total = program + weights + state + snapshots + activations
//! ```
//!
//! | part        | from                                                                        |
//! |-------------|-----------------------------------------------------------------------------|
//! | program     | what this process holds now, tokenizer included; none of it on a GPU        |
//! | weights     | as stored; on a GPU in bf16 a copy of matrices in f32 is kept beside them   |
//! | state       | counted: recurrent states, and a KV cache in pages of 128 tokens            |
//! | snapshots   | a recurrent state behind every 128 tokens of the prompt, within their limit |
//! | activations | of 128 tokens, as prompts are read: estimated from the widths of the layers |
//!
//! Not counted: code that is paged in while it computes.

use crate::compute::Compute;
use crate::machine;
use crate::report::text::bytes;
use crate::report::{Done, line};
use crate::run;
use elapid::{CacheType, Device, GeneratorSettings, Model, ModelInfo, Precision};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// What is asked of an estimate.
pub struct Asked {
    pub context: Option<usize>,
    /// Bytes that may be used, instead of those that are free.
    pub memory: Option<u64>,
    pub cache: CacheType,
}

/// Tokens of a prompt that are read at once, and of a page of the cache.
const PIECE: usize = 128;

/// Bytes by what they are for, at one context size.
struct Need {
    context: usize,
    state: u64,
    snapshots: u64,
    total: u64,
}

pub fn plan(path: &Path, asked: Asked, compute: &Compute, wants_json: bool) -> Done<ExitCode> {
    let model = Model::open(run::usable(path)?)?;
    let (info, device) = (model.info()?, compute.open()?);
    let is_gpu = device.kind() != "cpu";
    // Held while the memory of the process is read.
    let tokenizer = model.tokenizer();
    let program = if is_gpu { 0 } else { machine::held_bytes().unwrap_or(0) };
    drop(tokenizer);
    let stored: usize = info.dtype_bytes.values().sum();
    let held = stored as u64 + copies(&info, &device);
    let width = if device.precision() == Precision::Bf16 { 2 } else { 4 };
    let logits = 4 * info.n_vocab;
    let activations = (PIECE * info.activation_bytes_per_token / 4 * width + logits) as u64;
    let free = asked.memory.or_else(|| match is_gpu {
        true => device.free_bytes(),
        // What is held now is part of the estimate.
        false => machine::free_bytes().map(|free| free + program),
    });
    let fixed = program + held + activations;
    let needs: Vec<Need> = contexts(&info, asked.context)
        .into_iter()
        .map(|context| need(&info, &device, asked.cache, context, fixed))
        .collect();
    if wants_json {
        let each = needs.iter().map(|need| {
            json!({
                "context": need.context, "state_bytes": need.state,
                "snapshot_bytes": need.snapshots, "total_bytes": need.total,
                "fits": free.map(|free| need.total <= free),
            })
        });
        line(json!({
            "model": info.name, "family": info.family, "device": device.describe(),
            "n_params": info.n_params, "n_ctx": info.n_ctx, "n_seen": info.n_seen,
            "weight_bytes_stored": stored, "weight_bytes": held, "program_bytes": program,
            "activation_bytes": activations, "prompt_tokens": PIECE,
            "cache_type": asked.cache.to_string(), "free_bytes": free,
            "contexts": each.collect::<Vec<_>>(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let size = |n: u64| bytes(n as f64);
    line(format!("model   {}: {}", info.name, info.family));
    line(format!("device  {}", device.describe()));
    line(format!("weights {} as stored, {} in memory", size(stored as u64), size(held)));
    if program > 0 {
        line(format!("program {} with the tokenizer", size(program)));
    }
    line(format!("prompt  about {} for {PIECE} tokens at a time", size(activations)));
    for Need { context, state, snapshots, total } in &needs {
        let snapshots = match snapshots {
            0 => String::new(),
            n => format!(", snapshots {}", size(*n)),
        };
        let fits = match free {
            Some(free) if *total > free => format!(", more than the {} there are", size(free)),
            Some(free) => format!(" of {}", size(free)),
            None => String::new(),
        };
        let (state, total) = (size(*state), size(*total));
        line(format!("context {context:>7} tokens: state {state}{snapshots}, total {total}{fits}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes of copies in bf16 that products make of matrices in f32.
fn copies(info: &ModelInfo, device: &Device) -> u64 {
    match device.precision() {
        Precision::Bf16 => info.dtype_bytes.get("f32").map_or(0, |n| *n as u64 / 2),
        _ => 0,
    }
}

/// Context sizes to tell of: powers of four from 1024 to the model's own, and the one asked for.
fn contexts(info: &ModelInfo, asked: Option<usize>) -> Vec<usize> {
    let own = info.n_ctx.unwrap_or(1 << 17);
    let mut list: Vec<usize> = (5..).map(|n| 1 << (2 * n)).take_while(|n| *n < own).collect();
    list.push(own);
    list.extend(asked);
    list.sort_unstable();
    list.dedup();
    list
}

fn need(info: &ModelInfo, device: &Device, kind: CacheType, context: usize, fixed: u64) -> Need {
    // Numbers of 32 bits in f32; a GPU keeps them as activations.
    let bits = match kind {
        _ if device.precision() == Precision::Bf16 => 16.0,
        CacheType::F32 => 32.0,
        CacheType::F16 => 16.0,
        CacheType::Q8_0 => 8.5,
    };
    let n_tok = context.next_multiple_of(PIECE) as f64;
    let cache = (n_tok * info.state_bytes_per_token as f64 * bits / 32.0) as u64;
    let recurrent = info.state_bytes as u64;
    let limit = GeneratorSettings::default().snapshot_bytes_max as u64;
    let snapshots = (recurrent * (context / PIECE) as u64).min(limit.saturating_sub(cache));
    let state = recurrent + cache;
    Need { context, state, snapshots, total: fixed + state + snapshots }
}
