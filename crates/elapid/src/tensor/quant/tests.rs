//! Against values decoded by gguf-py and blocks encoded by ggml: ours in
//! `golden/quants.safetensors`, and more where golden values lie beside the project.

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

/// Encodes all of `source` at once, then block by block, then without vectors; each must give the
/// bytes `want`.
fn expect_encoded(block: BlockType, source: &Stored, want: &Stored, what: &str) {
    let (x, n_bytes) = (source.f32(), block.n_bytes());
    let mut whole = vec![0xaa; want.bytes.len()];
    block.encode(&x, &mut whole);
    let mut by_blocks = vec![0xaa; want.bytes.len()];
    for (x, bytes) in x.chunks(block.n_elem()).zip(by_blocks.chunks_mut(n_bytes)) {
        block.encode(x, bytes);
    }
    let mut scalar = vec![0xaa; want.bytes.len()];
    Code { block, job: Job::Encode(&x, &mut scalar) }.with_simd(pulp::Scalar::new());
    for (idx, want) in want.bytes.chunks(n_bytes).enumerate() {
        for bytes in [&whole, &by_blocks, &scalar] {
            let got = &bytes[idx * n_bytes..][..n_bytes];
            let x = &x[idx * block.n_elem()..][..block.n_elem()];
            assert!(got == want, "{what}: block {idx}, {x:?}, is {got:?}, not {want:?}");
        }
    }
    println!("{what}: {} blocks", want.bytes.len() / n_bytes);
}

#[test]
fn encoding_gives_the_bytes_of_ggml() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/quants.safetensors");
    let stored = load(&path);
    for block in BlockType::ALL {
        let name = block.name();
        expect_encoded(block, &stored["source"], &stored[&format!("{name}.encoded")], name);
    }
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
fn more_goldens_agree_where_they_are() {
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
        expect_encoded(block, &stored["src"], &stored["raw"], &name);
    }
}

#[test]
fn a_format_is_found_by_its_number() {
    for block in BlockType::ALL {
        assert_eq!(block.ggml_id().and_then(BlockType::from_ggml_id), Some(block));
        assert_eq!(BlockType::from_name(block.name()), Some(block));
    }
    for id in [0, 1, 4, 5, 9, 15, 30, u32::MAX] {
        assert_eq!(BlockType::from_ggml_id(id), None);
    }
}

#[test]
#[should_panic(expected = "q4_k: 256 numbers in 143 bytes")]
fn a_torn_block_panics() {
    BlockType::Q4K.decode(&[0; 143], &mut [0.0; 256]);
}

#[test]
#[should_panic(expected = "q6_k: 512 numbers in 210 bytes")]
fn blocks_without_room_panic() {
    BlockType::Q6K.encode(&[0.0; 512], &mut [0; 210]);
}

#[test]
fn numbers_that_are_not_finite_stay_in_their_block() {
    for block in BlockType::ALL {
        let (n_elem, n_bytes) = (block.n_elem(), block.n_bytes());
        let good: Vec<f32> = (0..3 * n_elem).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut want = vec![0; 3 * n_bytes];
        block.encode(&good, &mut want);
        for odd in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN] {
            for at in [n_elem..n_elem + 1, n_elem + 5..n_elem + 20, n_elem..2 * n_elem] {
                let mut x = good.clone();
                x[at].fill(odd);
                let mut bytes = vec![0; 3 * n_bytes];
                block.encode(&x, &mut bytes);
                let (first, last) = (0..n_bytes, 2 * n_bytes..3 * n_bytes);
                assert_eq!(bytes[first.clone()], want[first], "{block:?} {odd}");
                assert_eq!(bytes[last.clone()], want[last], "{block:?} {odd}");
            }
        }
    }
}

#[test]
fn a_block_comes_back_near_to_what_went_in() {
    for block in BlockType::ALL {
        let x: Vec<f32> = (0..1024).map(|i| (i as f32 * 1.37).sin() * 0.05).collect();
        let mut bytes = vec![0; x.len() / block.n_elem() * block.n_bytes()];
        let mut y = vec![0.0; x.len()];
        block.encode(&x, &mut bytes);
        block.decode(&bytes, &mut y);
        let error: f32 = x.iter().zip(&y).map(|(x, y)| (x - y).powi(2)).sum();
        let total: f32 = x.iter().map(|x| x.powi(2)).sum();
        // A sine of amplitude a has the mean square a^2 / 2, steps of 2a / 2^bits an error of a
        // twelfth of their square: the ratio is 2/3 of 4^-bits.
        let bits = block.name().as_bytes()[1] - b'0';
        let ratio = error / total / (2.0 / 3.0 * 0.25f32.powi(bits.into()));
        println!("{block:?}: {ratio}");
        assert!(ratio < 2.0, "{block:?}: error {ratio} times that of even steps");
    }
}

#[test]
fn encoding_q8_0_makes_nan_zero_and_an_infinity_spoils_its_own_block_only() {
    let mut x = [1.0; 96];
    x[3] = f32::NAN;
    x[40] = f32::NEG_INFINITY;
    let mut bytes = [0; 3 * 34];
    BlockType::Q8_0.encode(&x, &mut bytes);
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

#[test]
fn nf4_gives_the_bits_of_bitsandbytes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/nf4.safetensors");
    let stored = load(&path);
    let (source, absmax, values) =
        (stored["source"].f32(), stored["absmax"].f32(), stored["values"].f32());
    let mut want = Vec::new();
    for (packed, absmax) in stored["packed"].bytes.chunks(32).zip(&absmax) {
        want.extend(absmax.to_le_bytes());
        want.extend(packed);
    }
    let mut bytes = vec![0xaa; want.len()];
    BlockType::Nf4.encode(&source, &mut bytes);
    let mut scalar = vec![0xaa; want.len()];
    let job = Job::Encode(&source, &mut scalar);
    Code { block: BlockType::Nf4, job }.with_simd(pulp::Scalar::new());
    for (idx, want) in want.chunks(36).enumerate() {
        assert_eq!(&bytes[idx * 36..][..36], want, "block {idx}");
        assert_eq!(&scalar[idx * 36..][..36], want, "block {idx}, without vectors");
    }
    let mut decoded = vec![f32::NAN; source.len()];
    BlockType::Nf4.decode(&want, &mut decoded);
    for (idx, (got, want)) in decoded.iter().zip(&values).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "number {idx} is {got:e}, not {want:e}");
    }
}

#[test]
fn nf4_is_found_by_its_name_and_has_no_number_in_files() {
    assert_eq!(BlockType::from_name("nf4"), Some(BlockType::Nf4));
    assert_eq!(BlockType::from_name("nf5"), None);
    assert_eq!(BlockType::Nf4.ggml_id(), None);
    assert!(!BlockType::ALL.contains(&BlockType::Nf4));
}
