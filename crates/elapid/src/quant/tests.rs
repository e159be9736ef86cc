//! Against values decoded by gguf-py: ours in `golden/quants.safetensors`, and more where
//! golden values lie beside the project.

use super::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor of a safetensors file: rows, and the bytes of all of them.
struct Stored {
    n_rows: usize,
    bytes: Vec<u8>,
}

impl Stored {
    fn f32(&self) -> Vec<f32> {
        self.bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }
}

fn load(path: &Path) -> BTreeMap<String, Stored> {
    let file = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (length, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let stored = tensors.map(|(name, entry)| {
        let number = |value: &serde_json::Value| value.as_u64().unwrap() as usize;
        let range = number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1]);
        (name, Stored { n_rows: number(&entry["shape"][0]), bytes: data[range].to_vec() })
    });
    stored.collect()
}

/// Decodes all of `raw` at once, then row by row; both must have the bits of `want`.
fn expect_decoded(block: BlockType, raw: &Stored, want: &Stored, what: &str) {
    let want = want.f32();
    let mut whole = vec![f32::NAN; want.len()];
    block.decode(&raw.bytes, &mut whole);
    let mut by_rows = vec![f32::NAN; want.len()];
    let (bytes, elems) = (raw.bytes.len() / raw.n_rows, want.len() / raw.n_rows);
    for (raw, row) in raw.bytes.chunks(bytes).zip(by_rows.chunks_mut(elems)) {
        block.decode(raw, row);
    }
    for i in 0..want.len() {
        for got in [whole[i], by_rows[i]] {
            let equal = got.to_bits() == want[i].to_bits();
            assert!(equal, "{what}: number {i} is {got:e}, not {:e}", want[i]);
        }
    }
    println!("{what}: {} numbers", want.len());
}

#[test]
fn decoding_gives_the_bits_of_ggml() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/quants.safetensors");
    let stored = load(&path);
    for block in BlockType::ALL {
        let name = block.name();
        let (raw, values) = (&stored[&format!("{name}.raw")], &stored[&format!("{name}.values")]);
        assert!(raw.n_rows >= 5, "{name}: {} rows", raw.n_rows);
        expect_decoded(block, raw, values, name);
    }
}

#[test]
fn encoding_q8_0_gives_the_bytes_of_ggml() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/quants.safetensors");
    let stored = load(&path);
    let mut bytes = vec![0; stored["q8_0.encoded"].bytes.len()];
    encode_q8_0(&stored["q8_0.source"].f32(), &mut bytes);
    assert!(bytes == stored["q8_0.encoded"].bytes);
}

/// Where golden values lie beside the project; `None`, said aloud, where they do not.
fn more_goldens() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden/quants");
    if !root.is_dir() {
        eprintln!("skipped: no further quant goldens at {}", root.display());
        return None;
    }
    Some(root)
}

#[test]
fn decoding_gives_the_bits_of_more_goldens_where_they_are() {
    let Some(root) = more_goldens() else { return };
    let real = load(&root.join("real_rows.safetensors"));
    for block in BlockType::ALL {
        let name = block.name().to_uppercase();
        let stored = load(&root.join(format!("{name}.safetensors")));
        expect_decoded(block, &stored["raw"], &stored["deq"], &name);
        expect_decoded(block, &stored["raw_rand"], &stored["deq_rand"], &name);
        if let Some(raw) = real.get(&format!("{name}.raw")) {
            expect_decoded(block, raw, &real[&format!("{name}.deq")], &name);
        }
        if block == BlockType::Q8_0 {
            let mut bytes = vec![0; stored["raw"].bytes.len()];
            encode_q8_0(&stored["src"].f32(), &mut bytes);
            assert!(bytes == stored["raw"].bytes, "encoding as q8_0");
        }
    }
}

#[test]
fn a_format_is_found_by_its_number() {
    for block in BlockType::ALL {
        assert_eq!(BlockType::from_ggml_id(block.ggml_id()), Some(block));
    }
    for id in [0, 1, 4, 5, 9, 15, 30, u32::MAX] {
        assert_eq!(BlockType::from_ggml_id(id), None);
    }
}

#[test]
#[should_panic(expected = "q4_k: 143 bytes for 256 numbers")]
fn a_torn_block_panics() {
    BlockType::Q4K.decode(&[0; 143], &mut [0.0; 256]);
}

#[test]
fn encoding_q8_0_makes_nan_zero_and_an_infinity_spoils_its_own_block_only() {
    let mut x = [1.0; 96];
    x[3] = f32::NAN;
    x[40] = f32::NEG_INFINITY;
    let mut bytes = [0; 3 * 34];
    encode_q8_0(&x, &mut bytes);
    let mut y = [0.0; 96];
    BlockType::Q8_0.decode(&bytes, &mut y);
    for (idx, y) in y.into_iter().enumerate() {
        match idx {
            3 => assert_eq!(y, 0.0),
            // The scale is infinite: no number of the block can be taken for a good one.
            32..64 => assert!(y.is_nan(), "number {idx} is {y}"),
            _ => assert!((y - 1.0).abs() < 1e-3, "number {idx} is {y}"),
        }
    }
}
