//! `/lora-adapters`: which adapters a model has, how strongly they act, loaded and unloaded while
//! the server runs.
//!
//! | request                             | does                                                |
//! |-------------------------------------|-----------------------------------------------------|
//! | `GET`, `?model=NAME`                | lists them                                          |
//! | `POST [{"id": 0, "scale": 0.5}]`    | scales where a request does not say; others are off |
//! | `POST {"load": PATH, "scale": 0.5}` | loads one; without a scale it is off unless named   |
//! | `POST {"unload": 0}`, or its name   | unloads one                                         |
//!
//! The last two take `"model"`. A path must be below a directory that the server was started with:
//! whoever may send requests may not read all files. An answer under way keeps the adapters it
//! began with; a load that fails changes nothing.

use super::info::Which;
use crate::server::body::{Body, Num};
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::{Held, Models};
use crate::server::params::{Scale, scales};
use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

fn told(adapters: &[Option<Held>]) -> Json<Value> {
    let entry = |(idx, held): (usize, &Option<Held>)| {
        let held = held.as_ref()?;
        let path = held.path.display().to_string();
        Some(json!({"id": idx, "name": held.name, "path": path, "scale": held.scale}))
    };
    Json(adapters.iter().enumerate().filter_map(entry).collect())
}

pub async fn adapters(
    State(models): State<Arc<Models>>,
    Query(which): Query<Which>,
) -> Answered<Json<Value>> {
    Ok(told(&models.find(which.model.as_deref())?.adapters()))
}

#[derive(Deserialize)]
struct Change {
    load: Option<PathBuf>,
    scale: Option<Num<-10_000, 10_000>>,
    unload: Option<Value>,
    #[serde(rename = "model")]
    _model: Option<String>,
}

pub async fn set_adapters(
    State(models): State<Arc<Models>>,
    Query(which): Query<Which>,
    body: Body,
) -> Answered<Json<Value>> {
    let app = models.open(body.model().or(which.model.as_deref())).await?;
    if !body.is_object() {
        let wanted = scales(&app, "body", &body.read_any::<Vec<Scale>>("body")?)?;
        let mut adapters = app.entry.adapters();
        adapters.iter_mut().flatten().for_each(|held| held.scale = 0.0);
        for (idx, scale) in wanted {
            adapters[idx].iter_mut().for_each(|held| held.scale = scale);
        }
        return Ok(told(&adapters));
    }
    let change: Change = body.read()?;
    body.refuse_others(&[names::<Change>()])?;
    match (change.load, change.unload) {
        (Some(path), None) => {
            let path = allowed(&models, path)?;
            let scale = change.scale.map(|scale| scale.0 as f32);
            app.load_adapter(path, scale.unwrap_or(1.0), scale.unwrap_or(0.0)).await?;
        }
        (None, Some(which)) => {
            let is_it = |(idx, held): &(usize, &Option<Held>)| {
                let name = held.as_ref().map(|held| &held.name[..]);
                name.is_some() && (which.as_u64() == Some(*idx as u64) || which.as_str() == name)
            };
            let found = app.entry.adapters().iter().enumerate().find(is_it).map(|pair| pair.0);
            let idx = found.ok_or_else(|| {
                ApiError::field("unload", format!("there is no adapter {which}; see GET"))
            })?;
            app.entry.adapters()[idx] = None;
            app.worker.unload_adapter(idx).await?;
        }
        _ => return Err(ApiError::bad("give either `load` or `unload`, or a list of scales")),
    }
    Ok(told(&app.entry.adapters()))
}

/// The path of an adapter, if it is below a directory that is allowed.
fn allowed(models: &Models, path: PathBuf) -> Answered<PathBuf> {
    let dirs = &models.shared.settings.adapter_dirs;
    let full = dirs.iter().filter_map(|dir| dir.join(&path).canonicalize().ok());
    full.into_iter().find(|full| dirs.iter().any(|dir| full.starts_with(dir))).ok_or_else(|| {
        let hint = match dirs.is_empty() {
            true => "; this server loads none: start it with --adapter-dir DIR".to_string(),
            false => String::new(),
        };
        let words = format!("{} is not below a directory of --adapter-dir{hint}", path.display());
        let error = ApiError::field("load", words).with_code("path_not_allowed");
        ApiError { status: StatusCode::FORBIDDEN, ..error }
    })
}
