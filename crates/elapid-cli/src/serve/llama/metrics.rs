//! `GET /metrics`: counters for Prometheus, under llama.cpp's names and some of our own.

use crate::machine;
use crate::serve::App;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use std::fmt::Write;
use std::sync::Arc;

enum Kind {
    Counter,
    Gauge,
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut text = String::new();
    for (kind, name, help, value) in list(&app) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    }
    let version = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, version)], text).into_response()
}

fn list(app: &App) -> Vec<(Kind, &'static str, &'static str, f64)> {
    use Kind::{Counter, Gauge};
    let board = app.worker.board();
    let (stats, totals) = (&board.stats, &board.totals);
    let (prompt_s, answer_s) = (totals.prompt_time.as_secs_f64(), totals.answer_time.as_secs_f64());
    let (n_prompt, n_answer) = (stats.n_prompt_tok as f64, stats.n_answer_tok as f64);
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let n_running = stats.running.len() as f64;
    vec![
        (Counter, "llamacpp:prompt_tokens_total", "Prompt tokens that were computed.", n_prompt),
        (Counter, "llamacpp:prompt_seconds_total", "Time spent on prompts.", prompt_s),
        (Counter, "llamacpp:tokens_predicted_total", "Answer tokens.", n_answer),
        (Counter, "llamacpp:tokens_predicted_seconds_total", "Time spent on answers.", answer_s),
        (Counter, "llamacpp:n_decode_total", "Steps of the engine.", totals.n_steps as f64),
        (Counter, "llamacpp:n_tokens_max", "Most tokens of a sequence.", totals.n_tok_max as f64),
        (
            Gauge,
            "llamacpp:n_busy_slots_per_decode",
            "Slots in use in a step, on average.",
            ratio(totals.n_busy as f64, totals.n_steps as f64),
        ),
        (
            Gauge,
            "llamacpp:prompt_tokens_seconds",
            "Prompt tokens per second, on average.",
            ratio(n_prompt, prompt_s),
        ),
        (
            Gauge,
            "llamacpp:predicted_tokens_seconds",
            "Answer tokens per second, on average.",
            ratio(n_answer, answer_s),
        ),
        (Gauge, "llamacpp:requests_processing", "Requests that run.", n_running),
        (Gauge, "llamacpp:requests_deferred", "Requests that wait.", stats.n_waiting as f64),
        (
            Counter,
            "elapid_cached_tokens_total",
            "Prompt tokens that came from snapshots.",
            stats.n_cached_tok as f64,
        ),
        (Gauge, "elapid_snapshots", "Snapshots that are kept.", stats.n_snapshots as f64),
        (Gauge, "elapid_snapshot_bytes", "Bytes of snapshots.", stats.snapshot_bytes as f64),
        (Gauge, "elapid_state_bytes", "Bytes of running sequences.", stats.state_bytes as f64),
        (
            Gauge,
            "elapid_resident_bytes",
            "Bytes that the process holds.",
            machine::held_bytes().unwrap_or(0) as f64,
        ),
        (Counter, "elapid_requests_total", "Requests that were taken.", totals.n_taken as f64),
        (
            Counter,
            "elapid_requests_refused_total",
            "Requests that found the queue full.",
            totals.n_full as f64,
        ),
        (
            Counter,
            "elapid_requests_gone_total",
            "Requests whose client went away.",
            totals.n_gone as f64,
        ),
        (
            Counter,
            "elapid_requests_late_total",
            "Requests whose time was over.",
            totals.n_late as f64,
        ),
        (Counter, "elapid_requests_failed_total", "Requests that failed.", totals.n_failed as f64),
        (Counter, "elapid_embeddings_total", "Texts made vectors.", totals.n_embedded as f64),
        (
            Gauge,
            "elapid_uptime_seconds",
            "Time since the start.",
            app.started.elapsed().as_secs_f64(),
        ),
    ]
}
