//! TensorBoard's event file, by hand: the format is older and smaller than any crate for it.
//!
//! A file is a list of records (TFRecord):
//!
//!     length: u64 | masked crc of length: u32 | data | masked crc of data: u32
//!     masked(crc) = rotate_right(crc32c, 15) + 0xa282ead8
//!
//! with everything little-endian. The data is a protobuf `Event`:
//!
//! | field | type    |                                                                  |
//! |-------|---------|------------------------------------------------------------------|
//! | 1     | double  | `wall_time`, seconds since 1970                                  |
//! | 2     | varint  | `step`                                                           |
//! | 3     | string  | `file_version`, "brain.Event:2", in the first record only        |
//! | 5     | message | `summary`: field 1, repeated: 1 = tag, 2 = simple_value (float)  |
//! | 7     | message | `session_log`: 1 = status, START is 1                            |
//!
//! A resumed run writes a new file whose name sorts after the older ones; TensorBoard reads all
//! files of a directory as one, in that order. It begins with `session_log` START at the first step
//! to come: a reader then forgets what older files say of that step and later ones. So a killed
//! run leaves no doubled points. A rollback says the same in the middle of a file. A record torn
//! by a kill ends its file for the reader, which continues with the next one.
//!
//! Not here: reading such files; images, text and histograms.

use crate::report::metrics::{EvalRecord, StepRecord};
use crate::report::{Done, cannot_write};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PREFIX: &str = "events.out.tfevents.";

pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Begins a new file in a run directory. `next_step` is the first step to come: 0 for a new
    /// run, the checkpoint's step + 1 for a resumed one. `wall` is the time since 1970.
    pub fn create(dir: &Path, wall: Duration, next_step: u64) -> Done<Events> {
        // A clock set back, or a second run within a second, must not sort before the old files.
        let stamp = wall.as_secs().max(latest_stamp(dir).map_or(0, |latest| latest + 1));
        let path = dir.join(format!("{PREFIX}{stamp:010}.elapid"));
        let file = File::create_new(&path).map_err(|error| cannot_write(&path, error))?;
        let mut events = Events { path, file };
        let mut version = event(wall, 0);
        put_bytes(&mut version, 3, b"brain.Event:2");
        events.put(&version)?;
        if next_step > 0 {
            events.restart(wall, next_step)?;
        }
        Ok(events)
    }

    /// Says that steps from `next_step` on are counted again, after a rollback.
    pub fn restart(&mut self, wall: Duration, next_step: u64) -> Done<()> {
        let mut data = event(wall, next_step);
        put_bytes(&mut data, 7, &[1 << 3, 1]);
        self.put(&data)
    }

    pub fn step(&mut self, wall: Duration, record: &StepRecord) -> Done<()> {
        let values = [
            ("train/loss", record.loss),
            ("train/lr", record.lr as f32),
            ("train/grad_norm", record.grad_norm as f32),
            ("train/tokens_per_second", record.tok_per_s as f32),
        ];
        let divergence = record.divergence.map(|divergence| ("train/divergence", divergence));
        let values: Vec<_> = values.into_iter().chain(divergence).collect();
        self.scalars(wall, record.step, &values)
    }

    pub fn eval(&mut self, wall: Duration, record: &EvalRecord) -> Done<()> {
        let set = record.set.as_ref().map_or(String::new(), |set| format!("{set}/"));
        let [loss, bits] = ["loss", "bits_per_byte"].map(|name| format!("eval/{set}{name}"));
        let values = [(&*loss, record.loss as f32), (&*bits, record.bits_per_byte as f32)];
        self.scalars(wall, record.step, &values)
    }

    fn scalars(&mut self, wall: Duration, step: u64, values: &[(&str, f32)]) -> Done<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            put_bytes(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | 5); // field 2, four bytes
            entry.extend(value.to_le_bytes());
            put_bytes(&mut summary, 1, &entry);
        }
        let mut data = event(wall, step);
        put_bytes(&mut data, 5, &summary);
        self.put(&data)
    }

    fn put(&mut self, data: &[u8]) -> Done<()> {
        self.file.write_all(&frame(data)).map_err(|error| cannot_write(&self.path, error))
    }
}

/// The stamp of the newest event file in a directory.
fn latest_stamp(dir: &Path) -> Option<u64> {
    let names = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.file_name());
    let stamp = |name: std::ffi::OsString| -> Option<u64> {
        name.to_str()?.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
    };
    names.filter_map(stamp).max()
}

fn event(wall: Duration, step: u64) -> Vec<u8> {
    let mut data = vec![1 << 3 | 1]; // field 1, eight bytes
    data.extend(wall.as_secs_f64().to_le_bytes());
    if step > 0 {
        data.push(2 << 3); // field 2, varint
        put_varint(&mut data, step);
    }
    data
}

/// A field of bytes with their length before them.
fn put_bytes(data: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    data.push(field << 3 | 2);
    put_varint(data, bytes.len() as u64);
    data.extend(bytes);
}

/// Seven bits a byte, lowest first; the top bit says that more follow.
fn put_varint(data: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        data.push(n as u8 | 0x80);
        n >>= 7;
    }
    data.push(n as u8);
}

fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let crc = |bytes| masked_crc(bytes).to_le_bytes();
    [&length[..], &crc(&length), data, &crc(data)].concat()
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: a few hundred bytes a step need no table.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_crc_is_the_one_of_rfc_3720() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn varints_carry_seven_bits_a_byte() {
        let bytes = |n| {
            let mut data = Vec::new();
            put_varint(&mut data, n);
            hex(&data)
        };
        assert_eq!([bytes(0), bytes(127), bytes(128), bytes(300)], ["00", "7f", "8001", "ac02"]);
        assert_eq!(bytes(u64::MAX), "ffffffffffffffffff01");
    }

    /// Made once with TensorBoard's own protobuf classes and record writer.
    const GOLDEN: &str = "\
        1800000000000000a37f4b220900002040fc54d9411a0d627261696e2e4576656e743a322b3531101000000\
        00000000095fbfe180900002040fc54d94110ac023a020801b94512a36a00000000000000af81ed67090000\
        5040fc54d94110ac022a5c0a110a0a747261696e2f6c6f737315000050400a0f0a08747261696e2f6c72150\
        000003f0a160a0f747261696e2f677261645f6e6f726d150000403f0a1e0a17747261696e2f746f6b656e73\
        5f7065725f7365636f6e641500008045d8a301323b000000000000001a23ac5c0900008040fc54d94110ac0\
        22a2d0a100a096576616c2f6c6f737315000060400a190a126576616c2f626974735f7065725f6279746515\
        0000a03f8dd0913e";

    #[test]
    fn the_bytes_are_those_of_tensorboard() {
        let dir = scratch("event-bytes");
        let ms = |n: u64| Duration::from_millis(1_700_000_000_000 + n);
        let mut events = Events::create(&dir, ms(500), 300).unwrap();
        let step = StepRecord {
            step: 300,
            loss: 3.25,
            divergence: None,
            lr: 0.5,
            grad_norm: 0.75,
            ms: 1.0,
            tok_per_s: 4096.0,
            n_tok: 0,
            elapsed_s: 0.0,
        };
        events.step(ms(1250), &step).unwrap();
        let eval =
            EvalRecord { set: None, step: 300, loss: 3.5, bits_per_byte: 1.25, elapsed_s: 0.0 };
        events.eval(ms(2000), &eval).unwrap();
        let bytes = std::fs::read(dir.join(&names(&dir)[0])).unwrap();
        assert_eq!(hex(&bytes), GOLDEN);
    }

    #[test]
    fn a_later_file_sorts_after_the_earlier_ones_whatever_the_clock_says() {
        let dir = scratch("event-names");
        for seconds in [1_700_000_000, 1_700_000_000, 5] {
            Events::create(&dir, Duration::from_secs(seconds), 0).unwrap();
        }
        let want = [1_700_000_000u64, 1_700_000_001, 1_700_000_002];
        assert_eq!(names(&dir), want.map(|stamp| format!("{PREFIX}{stamp}.elapid")));
    }
}
