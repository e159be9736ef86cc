//! The engine for JavaScript: what the npm package in `web/` calls.
//!
//! Objects stay here and are known to JavaScript as handles; bytes and texts come in, bytes, texts
//! and JSON go out. Whatever JavaScript gives is checked: it ends in a `Failure` and never in a
//! panic. There is one thread, and calls come one after the other.
//!
//! Elsewhere than in wasm the crate is empty; `web/test/` runs it in node and in a browser.
//!
//! | file           | is                                                                |
//! |----------------|-------------------------------------------------------------------|
//! | `model.rs`     | a model: opened, made, asked, saved                                |
//! | `training.rs`  | a model that learns, step by step; checkpoints; the plan           |
//! | `measure.rs`   | bits per byte, intervals, comparisons, golden sets                 |
//! | `vocabulary.rs`| tokenizers                                                         |
//! | `folder.rs`    | which files of a folder are learned                                |
//! | `limbic.rs`    | the recurrent head                                                 |
//! | `machine.rs`   | devices, kernels, memory                                           |
//! | `failure.rs`   | errors                                                             |

#![cfg(target_family = "wasm")]

mod failure;
mod folder;
mod limbic;
mod machine;
mod measure;
mod model;
mod training;
mod vocabulary;

pub use failure::Failure;
use js_sys::{Function, Reflect, global};
use wasm_bindgen::prelude::*;

/// A panic is told to `globalThis.elapidDefect` before the module stops: a promise of it would
/// stay open forever.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|info| {
        let heard = Reflect::get(&global(), &"elapidDefect".into());
        if let Some(hears) = heard.ok().and_then(|it| it.dyn_into::<Function>().ok()) {
            // Nothing can be done about what the listener throws.
            let _ = hears.call1(&JsValue::NULL, &info.to_string().into());
        }
    }));
}
