//! `GET /metrics`: counters for Prometheus, under llama.cpp's names and some of our own.

use crate::machine;
use crate::server::App;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use std::fmt::Write;
use std::sync::Arc;

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut text = String::new();
    for (name, help, value) in list(&app) {
        // Prometheus' rule for names, but for one of llama.cpp's.
        let is_counter = name.ends_with("_total") || name.ends_with(":n_tokens_max");
        let kind = if is_counter { "counter" } else { "gauge" };
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    }
    let version = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, version)], text).into_response()
}

fn list(app: &App) -> [(&'static str, &'static str, f64); 25] {
    let board = app.worker.board();
    let (stats, totals) = (&board.stats, &board.totals);
    let (prompt_s, answer_s) = (totals.prompt_time.as_secs_f64(), totals.answer_time.as_secs_f64());
    let (n_prompt, n_answer) = (stats.n_prompt_tok as f64, stats.n_answer_tok as f64);
    let (n_steps, n_busy) = (totals.n_steps as f64, totals.n_busy as f64);
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let n_cached = stats.n_cached_tok as f64;
    let held = machine::held_bytes().unwrap_or(0) as f64;
    let healthy = f64::from(u8::from(board.broken.is_none()));
    let per_step = ratio(n_busy, n_steps);
    let (read_rate, answer_rate) = (ratio(n_prompt, prompt_s), ratio(n_answer, answer_s));
    let (n_running, n_waiting) = (stats.running.len() as f64, stats.n_waiting as f64);
    [
        ("llamacpp:prompt_tokens_total", "Prompt tokens computed.", n_prompt),
        ("llamacpp:prompt_seconds_total", "Time spent on prompts.", prompt_s),
        ("llamacpp:tokens_predicted_total", "Answer tokens.", n_answer),
        ("llamacpp:tokens_predicted_seconds_total", "Time spent on answers.", answer_s),
        ("llamacpp:n_decode_total", "Steps of the engine.", n_steps),
        ("llamacpp:n_tokens_max", "Most tokens of a sequence.", totals.n_tok_max as f64),
        ("llamacpp:n_busy_slots_per_decode", "Slots in use per step, on average.", per_step),
        ("llamacpp:prompt_tokens_seconds", "Prompt tokens per second, on average.", read_rate),
        ("llamacpp:predicted_tokens_seconds", "Answer tokens per second, on average.", answer_rate),
        ("llamacpp:requests_processing", "Requests running.", n_running),
        ("llamacpp:requests_deferred", "Requests waiting.", n_waiting),
        ("elapid_cached_tokens_total", "Prompt tokens from snapshots.", n_cached),
        ("elapid_snapshots", "Snapshots held.", stats.n_snapshots as f64),
        ("elapid_snapshot_bytes", "Bytes of snapshots.", stats.snapshot_bytes as f64),
        ("elapid_state_bytes", "Bytes of running sequences.", stats.state_bytes as f64),
        ("elapid_resident_bytes", "Bytes that the process holds.", held),
        ("elapid_requests_total", "Requests taken.", totals.n_taken as f64),
        ("elapid_requests_refused_total", "Requests with the queue full.", totals.n_full as f64),
        ("elapid_requests_gone_total", "Requests whose client left.", totals.n_gone as f64),
        ("elapid_requests_late_total", "Requests that timed out.", totals.n_late as f64),
        ("elapid_requests_failed_total", "Requests that failed.", totals.n_failed as f64),
        ("elapid_out_of_memory_total", "Of them, out of memory.", totals.n_out_of_memory as f64),
        ("elapid_embeddings_total", "Texts embedded.", totals.n_embedded as f64),
        ("elapid_healthy", "0 once nothing is answered any more.", healthy),
        ("elapid_uptime_seconds", "Time since the start.", app.started.elapsed().as_secs_f64()),
    ]
}
