//! Prompt and decode speed of a model file, beside llama.cpp and beside the limits of the machine.
//!
//! Decoding reads every weight once per token, and the state: the limit is the bytes of both at the
//! read bandwidth measured in the same run. A prompt is bound by products: the limit is two flops
//! per weight and token at the measured rate of f32 products, which products of small integers can
//! exceed.

use super::{Bench, best_and_median, command_of, last_json_line, number, peak_mib};
use crate::report::{Done, line};
use elapid::{GenerateBench, Model};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// Bytes that the read probe goes through: more than caches hold.
const PROBE_BYTES: usize = 256 << 20;

/// Measures one file; prints and returns the figures, llama.cpp's behind ours.
pub fn run(path: &Path, flags: &Bench) -> Done<Vec<Value>> {
    let ours = measure(path, flags)?;
    match flags.json {
        true => line(&ours),
        false => print(&ours),
    }
    let Some(llama) = &flags.llama else { return Ok(vec![ours]) };
    let mut command = command_of("--llama", llama)?;
    command.arg(path);
    let sizes = [
        ("--threads", flags.compute.n_threads()),
        ("--prompt", flags.prompt),
        ("--gen", flags.gen_tokens),
        ("--reps", flags.reps),
    ];
    for (flag, size) in sizes {
        command.args([flag, &size.to_string()]);
    }
    let theirs = last_json_line(command)?;
    if !flags.json {
        let ratio = |ours_key: &str, key: &str| number(&ours, ours_key) / number(&theirs, key);
        line(format!(
            "llama   decode {:.1} tok/s (best {:.1})  prompt {:.0} tok/s (best {:.0})  we are \
             {:.2}x in decoding, {:.2}x in prompts",
            number(&theirs, "decode_median"),
            number(&theirs, "decode_best"),
            number(&theirs, "prompt_median"),
            number(&theirs, "prompt_best"),
            ratio("decode_tok_s_med", "decode_median"),
            ratio("prompt_tok_s_med", "prompt_median"),
        ));
    }
    Ok(vec![ours, theirs])
}

fn print(figure: &Value) {
    line(format!("model   {}", figure["model"].as_str().unwrap_or_default()));
    line(format!(
        "decode  {:.1} tok/s (best {:.1})  {:.1} MB a token, {:.0}% of the read bandwidth \
         {:.1} GB/s",
        number(figure, "decode_tok_s_med"),
        number(figure, "decode_tok_s_best"),
        number(figure, "token_bytes") / 1e6,
        100.0 * number(figure, "decode_share"),
        number(figure, "read_gb_s"),
    ));
    line(format!(
        "prompt  {:.0} tok/s (best {:.0})  {:.0}% of f32 products at {:.0} GFLOP/s  first token \
         after {:.0} ms  peak {:.0} MB",
        number(figure, "prompt_tok_s_med"),
        number(figure, "prompt_tok_s_best"),
        100.0 * number(figure, "prompt_share"),
        number(figure, "gemm_gflops"),
        number(figure, "first_token_ms"),
        number(figure, "peak_rss_mb"),
    ));
}

fn measure(path: &Path, flags: &Bench) -> Done<Value> {
    let begin = Instant::now();
    let device = flags.compute.open()?;
    let mut bench = GenerateBench::new(Model::open(path)?, &device)?;
    bench.read(&[0])?;
    let first_token_ms = begin.elapsed().as_secs_f64() * 1e3;
    let peak_mb = peak_mib();
    let prompt = bench.random_prompt(flags.prompt);
    let mut read = device.read_probe(PROBE_BYTES);
    let mut product = device.product_probe(1024, 1024, 1024);
    let [mut prompt_s, mut token_s, mut read_s, mut product_s] = [const { Vec::new() }; 4];
    for rep in 0..=flags.reps {
        bench.restart();
        let mut clock = Instant::now();
        let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed().as_secs_f64();
        bench.read(&prompt)?;
        let of_prompt = lap();
        bench.restart();
        let mut id = bench.read(&prompt[..4.min(prompt.len())])?;
        lap();
        for _ in 0..flags.gen_tokens {
            id = bench.read(&[id])?;
        }
        let of_answer = lap();
        read();
        let of_read = lap();
        product();
        // The first round warms up.
        if rep > 0 {
            prompt_s.push(of_prompt);
            token_s.push(of_answer / flags.gen_tokens as f64);
            read_s.push(of_read);
            product_s.push(lap());
        }
    }
    let [prompt_s, token_s, read_s, product_s] =
        [prompt_s, token_s, read_s, product_s].map(best_and_median);
    let (n_prompt, read_gb_s) = (flags.prompt as f64, PROBE_BYTES as f64 / read_s[0] / 1e9);
    let gflops = 2.0 * 1024f64.powi(3) / product_s[0] / 1e9;
    let (token_bytes, n_multiplied) = bench.read_per_token();
    let (decode, prompt_rate) = (1.0 / token_s[1], n_prompt / prompt_s[1]);
    Ok(json!({
        "bench": "generate", "engine": "elapid", "model": path.display().to_string(),
        "device": device.describe(), "threads": flags.compute.n_threads(),
        "decode_tok_s_med": decode, "decode_tok_s_best": 1.0 / token_s[0],
        "prompt_tok_s_med": prompt_rate, "prompt_tok_s_best": n_prompt / prompt_s[0],
        "token_bytes": token_bytes, "read_gb_s": read_gb_s,
        "decode_share": decode * token_bytes as f64 / read_gb_s / 1e9,
        "gemm_gflops": gflops,
        "prompt_share": prompt_rate * 2.0 * n_multiplied as f64 / gflops / 1e9,
        "first_token_ms": first_token_ms, "peak_rss_mb": peak_mb,
    }))
}
