//! How few bits a byte of the held-out files costs a compressor: the marks a model has to pass.
//!
//! Only what a model is measured on is compressed (the learned parts), each document alone, headers
//! included, and bits of all are divided by bytes of all. gzip knows nothing beforehand. zstd is
//! given the training files as a dictionary, in two forms, and the smaller outcome counts: trained
//! (zstd picks pieces that occur often) or raw (the text itself, from its end backward, as much as
//! the window of the level reaches).
//!
//! Not here: the model's own bits per byte.

use elapid::Document;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use zstd::bulk::Compressor;
use zstd::dict::EncoderDictionary;

/// Level of both: the strongest of gzip, and the strongest of zstd that asks for no more memory.
const GZIP_LEVEL: u32 = 9;
const ZSTD_LEVEL: i32 = 19;

/// Size of a trained dictionary, the default of the `zstd` command.
const TRAINED_BYTES: usize = 112_640;

/// Text that a trained dictionary is made from, at most: a hundred times its size, as zstd advises.
const SAMPLE_BYTES: usize = 100 * TRAINED_BYTES;

/// Size of a raw dictionary at most: the window of the level.
const RAW_BYTES: usize = 8 << 20;

/// Bits per byte of `gzip -9`, each document alone. None without a byte of text.
pub fn gzip_bits_per_byte(documents: &[Document]) -> Option<f64> {
    ratio(documents, |text| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::new(GZIP_LEVEL));
        encoder.write_all(text).ok()?;
        Some(encoder.finish().ok()?.len())
    })
}

/// Bits per byte of `zstd -19`, each document alone, with the better dictionary of `train`, and
/// which that was in words. None without a byte of text.
pub fn zstd_bits_per_byte(
    train: &[Document],
    held_out: &[Document],
) -> Option<(f64, &'static str)> {
    let samples = learned(train);
    let candidates = [
        (Some(Vec::new()), "no dictionary"),
        (trained(&samples), "trained dictionary of the training files"),
        (Some(raw(&samples)), "training files as dictionary"),
    ];
    let reached = |(dictionary, words): (Option<Vec<u8>>, _)| {
        Some((zstd_with(&dictionary?, held_out)?, words))
    };
    candidates.into_iter().filter_map(reached).min_by(|a, b| a.0.total_cmp(&b.0))
}

fn zstd_with(dictionary: &[u8], documents: &[Document]) -> Option<f64> {
    // Digested once: for a large dictionary this costs more than all documents.
    let dictionary = EncoderDictionary::copy(dictionary, ZSTD_LEVEL);
    let mut compressor = Compressor::with_prepared_dictionary(&dictionary).ok()?;
    compressor.include_checksum(false).ok()?;
    compressor.include_dictid(false).ok()?;
    ratio(documents, |text| Some(compressor.compress(text).ok()?.len()))
}

/// None when there is too little text to train on.
fn trained(samples: &[String]) -> Option<Vec<u8>> {
    let mut n_bytes = 0;
    let fits = |sample: &&String| {
        n_bytes += sample.len();
        n_bytes <= SAMPLE_BYTES
    };
    let few: Vec<&String> = samples.iter().take_while(fits).collect();
    zstd::dict::from_samples(&few, TRAINED_BYTES).ok()
}

/// The end of all samples: what lies nearest is cheapest to point at.
fn raw(samples: &[String]) -> Vec<u8> {
    let whole = samples.concat().into_bytes();
    whole[whole.len().saturating_sub(RAW_BYTES)..].to_vec()
}

/// Bits of the compressed texts by bytes of the texts.
fn ratio(documents: &[Document], mut size: impl FnMut(&[u8]) -> Option<usize>) -> Option<f64> {
    let (mut n_in, mut n_out) = (0, 0);
    for text in learned(documents).iter().filter(|text| !text.is_empty()) {
        n_in += text.len();
        n_out += size(text.as_bytes())?;
    }
    (n_in > 0).then(|| 8.0 * n_out as f64 / n_in as f64)
}

/// What is learned of each document.
fn learned(documents: &[Document]) -> Vec<String> {
    let of = |document: &Document| {
        document.parts.iter().filter(|part| part.learned).map(|part| part.text.as_str()).collect()
    };
    documents.iter().map(of).collect()
}
