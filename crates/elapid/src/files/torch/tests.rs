//! Files that torch wrote (`lab/golden/make_torch.py`), whole and damaged.

use super::*;
use crate::files::TensorFile;
use crate::tensor::device::Device;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(root().join("lab/fuzz/corpus/torch").join(name)).unwrap()
}

fn open(data: Vec<u8>) -> Result<SafeTensors> {
    parse("pytorch_model.bin", Arc::new(data))
}

fn problem(data: Vec<u8>) -> String {
    open(data).err().expect("a refusal").report()
}

#[test]
fn every_tensor_is_the_one_that_torch_saved() {
    let device = Device::cpu(1).unwrap();
    let golden = std::fs::read(root().join("golden/torch.safetensors")).unwrap();
    let golden = SafeTensors::parse("torch.safetensors", Arc::new(golden)).unwrap();
    for name in ["kinds.bin", "wide.bin"] {
        let file = open(bytes(name)).unwrap();
        assert_eq!(file.names(), golden.names());
        for name in golden.names() {
            assert_eq!(file.shape(name), golden.shape(name), "{name}");
            match golden.tensor(&device, name) {
                Ok(want) => {
                    let (got, want) = (file.tensor(&device, name).unwrap(), want.unwrap());
                    let got = got.unwrap();
                    assert_eq!(got.dtype(), want.dtype(), "{name}");
                    assert_eq!(got.to_vec(), want.to_vec(), "{name}");
                }
                Err(_) => assert!(file.tensor(&device, name).is_err(), "{name}"),
            }
        }
        for name in ["long", "int"] {
            assert_eq!(file.integers(name).unwrap(), golden.integers(name).unwrap());
        }
    }
}

#[test]
fn a_state_dict_of_a_module_may_name_one_storage_twice() {
    let file = open(bytes("module.bin")).unwrap();
    assert_eq!(file.names(), ["embed.weight", "head.bias", "head.weight"]);
    let device = Device::cpu(1).unwrap();
    let [a, b] = ["embed.weight", "head.weight"].map(|name| file.tensor(&device, name).unwrap());
    assert_eq!(a.unwrap().to_vec(), b.unwrap().to_vec());
}

#[test]
fn what_is_no_plain_state_dict_is_refused_for_what_it_is() {
    for (name, want) in [
        ("bad-system.bin", "asks for `posix.system`, which is no part of weights"),
        ("bad-strides.bin", "tensor `x`: shape [3, 2] with strides [1, 3], not row by row"),
        ("bad-nested.bin", "`model` in the pickle is not a tensor"),
        ("bad-legacy.bin", "a Python pickle, as PyTorch used to write its checkpoints"),
        ("bad-order.bin", "its numbers are big-endian"),
        ("bad-packed.bin", "is compressed or encrypted"),
    ] {
        let text = problem(bytes(name));
        assert!(text.contains(want), "{name}: {text}");
    }
}

/// A pickle in the least archive that holds one.
fn archive(pickle: &[u8]) -> Vec<u8> {
    let name = b"a/data.pkl";
    let sizes = [pickle.len() as u32; 2].map(u32::to_le_bytes).concat();
    let n_name = (name.len() as u16).to_le_bytes();
    let local = [&b"PK\x03\x04"[..], &[0; 14], &sizes, &n_name, &[0; 2], name, pickle].concat();
    let listed = [&b"PK\x01\x02"[..], &[0; 16], &sizes, &n_name, &[0; 16], name].concat();
    let places = [listed.len() as u32, local.len() as u32].map(u32::to_le_bytes).concat();
    let end = [&b"PK\x05\x06"[..], &[0, 0, 0, 0, 1, 0, 1, 0], &places, &[0; 2]].concat();
    [local, listed, end].concat()
}

#[test]
fn an_instruction_that_no_state_dict_needs_is_refused() {
    assert!(open(archive(b"\x80\x02}.")).unwrap().names().is_empty());
    for (pickle, want) in [
        (&b"\x80\x02cos\nsystem\n(X\x04\0\0\0true\x85R."[..], "`os.system`"),
        (b"\x80\x02c__builtin__\neval\n.", "`__builtin__.eval`"),
        (b"\x80\x02(ios\nsystem\n.", "byte 3: instruction 0x69"),
        (b"\x80\x04\x95\0\0\0\0\0\0\0\0}.", "protocol 4"),
        (b"\x80\x02X\xff\xff\xff\xffx.", "a string of 4294967295 bytes, 2 bytes follow"),
        (b"\x80\x02\x8a\x09123456789.", "a number over 8 bytes"),
        (b"\x80\x02h\x05.", "nothing is kept as 5"),
        (b"\x80\x02u.", "there is no mark on the stack"),
        (b"\x80\x02}K\x01K\x02s.", "a key that is no string"),
        (b"\x80\x02cos", "a name without end"),
        (b"\x80\x02}", "a number of 1 bytes, 0 bytes follow"),
        (b"\x80\x02K\x01.", "holds no dict of tensors"),
        (b"\x80\x02}q\0X\x01\0\0\0ah\0s.", "`a` in the pickle is not a tensor"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "a call with other arguments"),
        (b"\x80\x02)Q.", "is no storage"),
    ] {
        let text = problem(archive(pickle));
        assert!(text.contains(want), "{want}: {text}");
    }
}

#[test]
fn a_tensor_beyond_its_storage_is_refused() {
    let whole = bytes("module.bin");
    let at = |what: &[u8]| whole.windows(what.len()).position(|w| w == what).unwrap();
    // The embedding is 6 x 4 in a storage of 24 numbers, from number 0 on.
    let begin = at(b"QK\0K\x06K\x04");
    for (place, byte, want) in [
        (begin - 4, 25, "a storage of 25 numbers, 96 bytes are there"),
        (begin + 2, 1, "24 numbers from 1 on, the storage has 24"),
        (begin + 4, 7, "28 numbers from 0 on, the storage has 24"),
        (begin + 6, 5, "shape [6, 5] with strides [4, 1], not row by row"),
    ] {
        let mut data = whole.clone();
        data[place] = byte;
        let text = problem(data);
        assert!(text.contains(want), "{want}: {text}");
    }
}

#[test]
fn a_file_cut_or_changed_anywhere_is_an_error_or_a_file() {
    let device = Device::cpu(1).unwrap();
    for name in ["kinds.bin", "wide.bin", "module.bin"] {
        let whole = bytes(name);
        for n in 0..whole.len() {
            assert!(open(whole[..n].to_vec()).is_err(), "{name} cut to {n} bytes is accepted");
        }
        for at in 0..whole.len() {
            for change in [0xff, 0x01, 0x80] {
                let mut data = whole.clone();
                data[at] ^= change;
                let Ok(file) = open(data) else { continue };
                for name in file.names() {
                    let _ = file.tensor(&device, name);
                }
            }
        }
    }
}
