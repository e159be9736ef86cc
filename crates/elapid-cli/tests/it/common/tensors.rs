//! Files of tensors, written and changed by hand: what others write, not what we do.

use serde_json::{Map, Value, json};
use std::path::Path;

/// A tensor in f32.
pub type Named<'a> = (&'a str, Vec<usize>, Vec<f32>);

/// Writes a safetensors file.
pub fn write(path: &Path, tensors: &[Named]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, numbers) in tensors {
        let begin = data.len();
        data.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        let about = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.to_string(), about);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
}

/// Changes the numbers of one tensor of a safetensors file.
pub fn change(path: &Path, name: &str, change: impl FnOnce(&[usize], &mut [f32])) {
    let mut bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let about = &header[name];
    assert_eq!(about["dtype"], "F32", "{name}: {about}");
    let list = |key: &str| -> Vec<usize> { serde_json::from_value(about[key].clone()).unwrap() };
    let (shape, offsets) = (list("shape"), list("data_offsets"));
    let place = 8 + length + offsets[0]..8 + length + offsets[1];
    let read = |x: &[u8]| f32::from_le_bytes(x.try_into().unwrap());
    let mut numbers: Vec<f32> = bytes[place.clone()].chunks_exact(4).map(read).collect();
    change(&shape, &mut numbers);
    let new: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    bytes[place].copy_from_slice(&new);
    std::fs::write(path, bytes).unwrap();
}

/// A PEFT adapter of rank 1 of one module, with alpha 1.
pub fn adapter(dir: &Path, module: &str, a: Vec<f32>, b: Vec<f32>) {
    let config = json!({
        "peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [module], "bias": "none",
    });
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
    let names = ["A", "B"].map(|half| format!("base_model.model.{module}.lora_{half}.weight"));
    let tensors = [(names[0].as_str(), vec![1, a.len()], a), (&names[1], vec![b.len(), 1], b)];
    write(&dir.join("adapter_model.safetensors"), &tensors);
}
