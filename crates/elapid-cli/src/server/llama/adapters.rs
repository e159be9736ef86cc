//! `GET` and `POST /lora-adapters`: how strongly adapters act where a request does not say.

use crate::server::App;
use crate::server::body::Body;
use crate::server::error::Answered;
use crate::server::params::{Scale, scales};
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::{Arc, PoisonError};

pub async fn adapters(State(app): State<Arc<App>>) -> Json<Value> {
    Json(list(&app))
}

pub async fn set_adapters(State(app): State<Arc<App>>, body: Body) -> Answered<Json<Value>> {
    let wanted = scales(&app, "body", &body.read_any::<Vec<Scale>>("body")?)?;
    {
        let mut scales = app.scales.lock().unwrap_or_else(PoisonError::into_inner);
        scales.fill(0.0);
        for (idx, scale) in wanted {
            scales[idx] = scale;
        }
    }
    Ok(Json(list(&app)))
}

fn list(app: &App) -> Value {
    let scales = app.scales.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = |(idx, adapter): (usize, &elapid::LoadedAdapter)| {
        json!({
            "id": idx, "name": adapter.name, "path": adapter.path.display().to_string(),
            "scale": scales[idx],
        })
    };
    app.adapters.iter().enumerate().map(entry).collect()
}
