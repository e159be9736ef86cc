//! Prompt and decode speed of a model file, beside llama.cpp and beside the limits of the machine.
//!
//! Decoding reads every weight once per token, and the state: the limit is the bytes of both at the
//! read bandwidth measured in the same run. A prompt is bound by products: the limit is two flops
//! per weight and token at the measured rate of f32 products, which products of small integers can
//! exceed.

use super::{Bench, best_and_median, command_of, figures_of, numbers, peak_mib, text};
use crate::report::{Done, line};
use crate::run;
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
    let theirs = figures_of(command, &sizes)?;
    if !flags.json {
        let [decode, decode_best, prompt, prompt_best] =
            numbers(&theirs, ["decode_median", "decode_best", "prompt_median", "prompt_best"]);
        let [our_decode, our_prompt] = numbers(&ours, ["decode_tok_s_med", "prompt_tok_s_med"]);
        line(format!(
            "llama   decode {decode:.1} tok/s (best {decode_best:.1})  prompt {prompt:.0} tok/s \
             (best {prompt_best:.0})  we are {:.2}x in decoding, {:.2}x in prompts",
            our_decode / decode,
            our_prompt / prompt,
        ));
    }
    Ok(vec![ours, theirs])
}

fn print(figure: &Value) {
    line(format!("model   {}", text(figure, "model")));
    let [tok_s, best, bytes, share, read_gb_s] = numbers(
        figure,
        ["decode_tok_s_med", "decode_tok_s_best", "token_bytes", "decode_share", "read_gb_s"],
    );
    let (mb, percent) = (bytes / 1e6, 100.0 * share);
    line(format!(
        "decode  {tok_s:.1} tok/s (best {best:.1})  {mb:.1} MB a token, {percent:.0}% of the read \
         bandwidth {read_gb_s:.1} GB/s",
    ));
    let [tok_s, best, share] =
        numbers(figure, ["prompt_tok_s_med", "prompt_tok_s_best", "prompt_share"]);
    let [gflops, first_ms, peak] =
        numbers(figure, ["gemm_gflops", "first_token_ms", "peak_rss_mb"]);
    let percent = 100.0 * share;
    line(format!(
        "prompt  {tok_s:.0} tok/s (best {best:.0})  {percent:.0}% of f32 products at {gflops:.0} \
         GFLOP/s  first token after {first_ms:.0} ms  peak {peak:.0} MB",
    ));
}

fn measure(path: &Path, flags: &Bench) -> Done<Value> {
    let begin = Instant::now();
    let device = flags.compute.open()?;
    let mut bench = GenerateBench::new(Model::open(run::usable(path)?)?, &device)?;
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
