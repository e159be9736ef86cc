//! `GET /health`, `/props`, `/slots`: what this server is and what it is doing.

use crate::server::App;
use crate::server::error::Answered;
use crate::server::params::{Common, LLAMA, Params};
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

/// 200 while requests are answered; 503 with the reason once none will be.
pub async fn health(State(app): State<Arc<App>>) -> Answered<Json<Value>> {
    let board = app.worker.board();
    if let Some(why) = board.broken {
        return Err(why);
    }
    let n_busy = board.stats.running.len();
    let n_idle = app.n_slots.saturating_sub(n_busy);
    Ok(Json(json!({"status": "ok", "slots_idle": n_idle, "slots_processing": n_busy})))
}

pub async fn props(State(app): State<Arc<App>>) -> Json<Value> {
    let text = |id: Option<u32>| id.and_then(|id| app.tokenizer.token(id)).unwrap_or_default();
    let params = Params::new(&app, Common::default(), &LLAMA, app.default_adapters());
    let mut settings = params.map_or(Value::Null, |params| params.settings(app.settings.n_tok_max));
    settings["seed"] = json!(u32::MAX);
    settings["n_predict"] = json!(-1);
    Json(json!({
        "default_generation_settings": {
            "id": 0, "n_ctx": app.context, "is_processing": false, "params": settings,
        },
        "total_slots": app.n_slots,
        "model_alias": app.name,
        "model_path": app.path,
        "modalities": {"vision": false, "audio": false},
        "chat_template": app.chat_source.as_deref().unwrap_or(""),
        "bos_token": text(app.tokenizer.bos()),
        "eos_token": text(app.tokenizer.eos()),
        "build_info": concat!("elapid ", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
        "infill": app.fim.is_some(),
        "n_vocab": app.info.n_vocab,
        "n_params": app.info.n_params,
        "device": app.device.describe(),
    }))
}

pub async fn slots(State(app): State<Arc<App>>) -> Json<Value> {
    let running = app.worker.board().stats.running;
    let slot = |idx: usize| {
        let mut value = json!({
            "id": idx, "n_ctx": app.context, "speculative": app.settings.n_lookup > 0,
            "is_processing": idx < running.len(),
        });
        if let Some(slot) = running.get(idx) {
            value["id_task"] = json!(slot.id.0);
            value["n_prompt_tokens"] = json!(slot.n_prompt);
            value["n_prompt_tokens_processed"] = json!(slot.n_read);
            value["next_token"] = json!({
                "has_next_token": true, "n_decoded": slot.n_tok,
                "n_remain": slot.n_max.saturating_sub(slot.n_tok),
            });
        }
        value
    };
    Json((0..app.n_slots).map(slot).collect())
}
