//! `GET` and `POST /lora-adapters`: how strongly adapters act where a request does not say.

use crate::serve::App;
use crate::serve::error::{Answered, ApiError};
use crate::serve::fields::Raw;
use crate::serve::params::scales;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::{Arc, PoisonError};

pub async fn adapters(State(app): State<Arc<App>>) -> Json<Value> {
    Json(list(&app))
}

pub async fn set_adapters(State(app): State<Arc<App>>, Raw(body): Raw) -> Answered<Json<Value>> {
    let Value::Array(items) = &body else {
        return Err(ApiError::bad(r#"the body is a list like [{"id": 0, "scale": 1.0}]"#));
    };
    let wanted = scales(&app, "body", items)?;
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
