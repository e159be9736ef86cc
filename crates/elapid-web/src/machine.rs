//! Devices, kernels and memory.

use crate::failure::{Done, Failure};
use elapid::{Device, DeviceInfo, Precision};
use js_sys::{Reflect, global};
use serde_json::{Value, json};
use std::cell::RefCell;
use wasm_bindgen::prelude::*;

thread_local! {
    /// Devices that were opened, by name: models on one device share its buffers.
    static OPEN: RefCell<Vec<(String, Device)>> = const { RefCell::new(Vec::new()) };
}

/// Whether there is a WebGPU to ask for adapters: in a page or its worker, and nowhere else.
fn has_gpu() -> bool {
    let get = |from: &JsValue, name: &str| Reflect::get(from, &name.into()).ok();
    let scopes = ["Window", "DedicatedWorkerGlobalScope"];
    let is_page = scopes.iter().any(|name| get(&global(), name).is_some_and(|it| it.is_function()));
    let gpu = get(&global(), "navigator").filter(JsValue::is_object);
    is_page && gpu.and_then(|it| get(&it, "gpu")).is_some_and(|it| it.is_object())
}

/// The device of a name: `cpu`, `webgpu`, or `auto`.
pub async fn device(name: &str) -> Done<Device> {
    let found = OPEN.with_borrow(|open| open.iter().find(|it| it.0 == name).cloned());
    if let Some((_, device)) = found {
        return Ok(device);
    }
    let device = match name {
        "cpu" => Device::cpu(1)?,
        "auto" if !has_gpu() => Device::cpu(1)?,
        "auto" => Device::by_name("auto", Precision::default(), 1).await?,
        "webgpu" if !has_gpu() => {
            let message = "there is no WebGPU here".into();
            let hint = "use a browser with WebGPU over https or localhost, or the device `cpu`";
            return Err(Failure { code: "device", message, hint: hint.into() });
        }
        "webgpu" => Device::by_name("wgpu", Precision::default(), 1).await?,
        _ => {
            let hint = "use `auto`, `cpu` or `webgpu`";
            return Err(Failure::input(format!("there is no device `{name}`"), hint));
        }
    };
    OPEN.with_borrow_mut(|open| open.push((name.into(), device.clone())));
    Ok(device)
}

/// What is told of a device.
pub fn describe(device: &Device) -> Value {
    let id = if device.kind() == "cpu" { "cpu" } else { "webgpu" };
    let is_software = device.is_software();
    json!({ "id": id, "name": device.describe(), "features": {}, "isSoftware": is_software })
}

fn listed(info: &DeviceInfo) -> Value {
    let id = if info.id == "cpu" { "cpu" } else { "webgpu" };
    let features = info.features.iter().map(|(name, used)| ((*name).to_string(), (*used).into()));
    let features: serde_json::Map<String, Value> = features.collect();
    let is_software = info.kind.as_deref() == Some("software");
    json!({
        "id": id, "name": info.name, "bufferBytesMax": info.buffer_bytes_max,
        "bindingBytesMax": info.binding_bytes_max, "features": features,
        "isSoftware": is_software,
    })
}

/// The devices that are there, as JSON.
#[wasm_bindgen]
pub async fn devices() -> Done<String> {
    let list: Vec<Value> = match has_gpu() {
        true => Device::list(1).await?.iter().map(listed).collect(),
        false => vec![describe(&Device::cpu(1)?)],
    };
    Ok(Value::from(list).to_string())
}

/// Sources of the kernels of this target, as JSON.
#[wasm_bindgen]
pub fn kernels() -> String {
    let all = elapid::kernel_sources().iter().filter(|source| source.0.ends_with(".wgsl"));
    let list = all.map(|(path, source)| json!({ "path": path, "source": source }));
    Value::from(list.collect::<Vec<_>>()).to_string()
}

/// Bytes in use of a device.
pub fn memory(device: &Device) -> Value {
    let used = device.memory();
    json!({ "live": used.live, "peak": used.live_max, "reserved": used.reserved })
}

#[wasm_bindgen]
extern "C" {
    /// Milliseconds since any fixed moment.
    #[wasm_bindgen(js_namespace = performance, js_name = now)]
    fn now_ms() -> f64;
}

/// Seconds since any fixed moment.
pub fn now_s() -> f64 {
    now_ms() / 1e3
}
