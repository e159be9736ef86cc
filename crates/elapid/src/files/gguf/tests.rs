//! Files made here, byte by byte or by our writer. Files made by others: `formats/tests.rs`.

use super::*;
use crate::error::{Error, Result};
use crate::files::{Outgoing, TensorFile};
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use std::borrow::Cow;
use std::sync::Arc;

fn parse(bytes: &[u8]) -> Result<Gguf> {
    Gguf::parse("m.gguf", Arc::new(bytes.to_vec()))
}

fn problem<T>(result: Result<T>) -> String {
    result.err().expect("refused").to_string()
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// A value as it lies in a file.
fn value(key: &str, kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&string(key.as_bytes())[..], &kind.to_le_bytes(), bytes].concat()
}

/// A tensor as it lies in a file.
fn info(name: &str, axes: &[u64], id: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name.as_bytes());
    out.extend((axes.len() as u32).to_le_bytes());
    out.extend(axes.iter().flat_map(|axis| axis.to_le_bytes()));
    out.extend(id.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// A file of version 3 with the default alignment: values, tensors, and `n_data` bytes 0, 1, 2...
fn raw(values: &[Vec<u8>], infos: &[Vec<u8>], n_data: usize) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((infos.len() as u64).to_le_bytes());
    out.extend((values.len() as u64).to_le_bytes());
    out.extend(values.concat());
    out.extend(infos.concat());
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend((0..n_data).map(|i| i as u8));
    out
}

fn no_bytes<'a>(name: &str, shape: &[usize], dtype: DType) -> Outgoing<'a> {
    with_bytes(name, shape, dtype, vec![])
}

fn with_bytes<'a>(name: &str, shape: &[usize], dtype: DType, bytes: Vec<u8>) -> Outgoing<'a> {
    let make = move || Ok(Cow::Owned(bytes.clone()));
    Outgoing { name: name.into(), shape: shape.into(), dtype, bytes: Box::new(make) }
}

fn written(metadata: &[(String, Item)], tensors: &[Outgoing]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    write(metadata, tensors, &mut |bytes| {
        out.extend(bytes);
        Ok(())
    })?;
    Ok(out)
}

#[test]
fn axes_are_turned_around_and_offsets_found() {
    let infos = [info("b", &[3, 2], 0, 32), info("a", &[4], 1, 0)];
    let bytes = raw(&[value("k", 4, &7u32.to_le_bytes())], &infos, 64);
    let gguf = parse(&bytes).unwrap();
    assert_eq!(gguf.file(), "m.gguf");
    assert_eq!(gguf.keys().collect::<Vec<_>>(), ["k"]);
    let [b, a] = gguf.tensors() else { panic!("{:?}", gguf.tensors()) };
    assert_eq!((b.shape.as_slice(), b.n_bytes, b.ggml.name), (&[2, 3][..], 24, "F32"));
    assert_eq!((a.shape.as_slice(), a.n_bytes, a.ggml.name), (&[4][..], 8, "F16"));
    let device = Device::cpu(1).unwrap();
    let tensor = gguf.tensor(&device, "b").unwrap().unwrap();
    assert_eq!(tensor.shape(), [2, 3]);
    assert_eq!(tensor.bytes(), (32..56).collect::<Vec<u8>>());
    assert_eq!(gguf.tensor(&device, "a").unwrap().unwrap().bytes()[7], 7);
    assert!(gguf.tensor(&device, "c").unwrap().is_none());
    assert_eq!(gguf.names(), ["b", "a"]);
}

#[test]
fn kinds_have_the_numbers_of_the_specification() {
    let eight = [1, 2, 3, 4, 5, 6, 7, 0x40];
    for (kind, n_bytes, want) in [
        (0, 1, Value::Int(1)),
        (1, 1, Value::Int(1)),
        (2, 2, Value::Int(0x0201)),
        (3, 2, Value::Int(0x0201)),
        (4, 4, Value::Int(0x0403_0201)),
        (5, 4, Value::Int(0x0403_0201)),
        (6, 4, Value::F32(f32::from_bits(0x0403_0201))),
        (7, 1, Value::Bool(true)),
        (10, 8, Value::Int(0x4007_0605_0403_0201)),
        (11, 8, Value::Int(0x4007_0605_0403_0201)),
        (12, 8, Value::F64(f64::from_bits(0x4007_0605_0403_0201))),
    ] {
        let gguf = parse(&raw(&[value("k", kind, &eight[..n_bytes])], &[], 0)).unwrap();
        assert_eq!(gguf.get("k"), Some(want));
    }
    let signed = |kind: u32, n_bytes: usize| {
        let bytes =
            raw(&[value("k", kind, &[0xfe, 255, 255, 255, 255, 255, 255, 255][..n_bytes])], &[], 0);
        parse(&bytes).unwrap().get("k").unwrap().integer()
    };
    for (kinds, n_bytes) in [([0, 1], 1), ([2, 3], 2), ([4, 5], 4), ([10, 11], 8)] {
        assert_eq!(signed(kinds[0], n_bytes), Some((1i128 << (8 * n_bytes)) - 2));
        assert_eq!(signed(kinds[1], n_bytes), Some(-2));
    }
    let array = [&2u32.to_le_bytes()[..], &2u64.to_le_bytes(), &eight[..4]].concat();
    let gguf =
        parse(&raw(&[value("s", 8, &string(b"ab")), value("a", 9, &array)], &[], 0)).unwrap();
    assert_eq!(gguf.get("s"), Some(Value::Str(b"ab")));
    let Some(Value::Array(array)) = gguf.get("a") else { panic!("no array") };
    assert!(array.iter().eq([Value::Int(0x0201), Value::Int(0x0403)]));
}

#[test]
fn nothing_is_copied() {
    let bytes = Arc::new(raw(&[value("s", 8, &string(b"text"))], &[info("a", &[32, 2], 8, 0)], 96));
    let inside = bytes.as_ptr_range();
    let gguf = Gguf::parse("m.gguf", bytes.clone()).unwrap();
    let tensor = gguf.tensor(&Device::cpu(1).unwrap(), "a").unwrap().unwrap();
    // Vec<u8> may lie at an odd address, from which floats are copied.
    if (bytes.as_ptr() as usize).is_multiple_of(4) {
        assert!(inside.contains(&tensor.bytes().as_ptr()));
    }
    assert!(inside.contains(&gguf.str("s").unwrap().unwrap().as_ptr()));
}

#[test]
fn version_2_is_read_and_others_are_refused_by_name() {
    let mut bytes = raw(&[], &[info("a", &[8], 0, 0)], 32);
    bytes[4] = 2;
    parse(&bytes).unwrap();
    for (version, want) in [
        ([1, 0, 0, 0], "GGUF version 1,"),
        ([0, 0, 0, 3], "a big-endian GGUF file, version 3"),
        ([0, 0, 0, 0], "GGUF version 0;"),
        ([4, 0, 0, 0], "GGUF version 4;"),
        ([255; 4], "GGUF version 4294967295;"),
    ] {
        bytes[4..8].copy_from_slice(&version);
        assert!(problem(parse(&bytes)).contains(want), "{want}");
    }
    assert!(problem(parse(b"FUGG\x01\0\0\0")).contains("reversed"));
    assert!(problem(parse(b"ABCD\x03\0\0\0")).contains("begins with `ABCD`"));
    assert!(problem(parse(b"GGUF\x03\0")).contains("6 bytes are too few"));
}

#[test]
fn hostile_values_get_errors_that_name_the_key_and_the_numbers() {
    let array = |kind: u32, n: u64, rest: &[u8]| {
        value("k", 9, &[&kind.to_le_bytes()[..], &n.to_le_bytes(), rest].concat())
    };
    let max = u64::MAX.to_le_bytes();
    let nested = [4u32.to_le_bytes().as_slice(), &0u64.to_le_bytes()].concat();
    for (entry, want) in [
        (value("k", 13, &[0]), "metadata `k`: unknown kind of value 13"),
        (value("k", u32::MAX, &[0]), "unknown kind of value 4294967295"),
        (value("k", 7, &[2]), "metadata `k`: a bool of value 2"),
        (value("k", 8, &max), "metadata `k`: a string of 18446744073709551615 bytes, 0 bytes"),
        (value("k", 10, &[0; 7]), "metadata `k`: a number of 8 bytes, 7 bytes follow"),
        (array(0, u64::MAX, &[1]), "an array of 18446744073709551615 u8 values, 1 bytes"),
        // The count times the width wraps to 8.
        (array(10, (1 << 61) + 1, &[0; 8]), "an array of 2305843009213693953 u64 values"),
        (array(8, 2, &[0; 15]), "an array of 2 string values, 15 bytes"),
        (array(8, 2, &[&string(b"abcdefgh")[..]].concat()), "element 1 of 2: a number of 8 bytes"),
        (array(7, 2, &[1, 3]), "element 1 of 2: a bool of value 3"),
        (array(13, 1, &[0]), "unknown kind of value 13"),
        (array(9, 1, &nested), "an array of arrays"),
        (value("", 4, &[0; 4]), "metadata value 0 of 1: the key is empty"),
        (value("a\0b", 0, &[0]), "the key `a\\x00b` is not plain text"),
        (value(&"k".repeat(65_536), 0, &[0]), "the key has 65536 bytes"),
        (value("general.alignment", 4, &[0; 4]), "`general.alignment` is 0, not a power of two"),
        (value("general.alignment", 4, &[33, 0, 0, 0]), "`general.alignment` is 33"),
        (value("general.alignment", 4, &[0, 0, 0x20, 0]), "`general.alignment` is 2097152"),
        (value("general.alignment", 5, &[32, 0, 0, 0]), "is the integer 32, not a u32"),
    ] {
        // No padding behind it: what follows is counted.
        let bytes = [b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0", &entry[..]].concat();
        let text = problem(parse(&bytes));
        assert!(text.contains(want) && text.contains("m.gguf"), "{want}: {text}");
    }
    let twice = raw(&[value("k", 0, &[0]), value("k", 1, &[0])], &[], 0);
    assert!(problem(parse(&twice)).contains("metadata `k` comes twice"));
    let mut not_utf8 = raw(&[value("kk", 0, &[0])], &[], 0);
    not_utf8[32] = 0xff;
    assert!(problem(parse(&not_utf8)).contains("the key `\\xffk` is not plain text"));
    for (at, want) in [(8, "tensors, "), (16, "metadata values, ")] {
        for count in [u64::MAX, 1 << 40, 1_000_000_000, 100] {
            let mut bytes = raw(&[], &[], 64);
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            assert!(problem(parse(&bytes)).contains(&format!("{count} {want}")));
        }
    }
}

#[test]
fn hostile_tensors_get_errors_that_name_the_tensor_and_the_numbers() {
    let big = 1u64 << 63;
    for (infos, want) in [
        (vec![info("", &[4], 0, 0)], "tensor 0 of 1: the name is empty"),
        (vec![info(&"n".repeat(65), &[4], 0, 0)], "the name has 65 bytes, at most 64"),
        (vec![info("t", &[4], 0, 0), info("t", &[4], 0, 32)], "tensor `t` comes twice"),
        (vec![info("t", &[1; 5], 0, 0)], "tensor `t`: 5 axes, at most 4"),
        (vec![info("t", &[u64::MAX], 0, 0)], "axes [18446744073709551615] of F32 are too large"),
        (vec![info("t", &[1 << 32, 1 << 32], 0, 0)], "are too large"),
        (vec![info("t", &[big + 1, 2], 0, 0)], "are too large"), // wraps to 2
        (vec![info("t", &[0, 1 << 40, 1 << 40], 0, 0)], "are too large"),
        (vec![info("t", &[1 << 31, 1 << 31], 27, 0)], "of I64 are too large"),
        (vec![info("t", &[33], 2, 0)], "rows of 33 numbers are no whole Q4_0 blocks of 32"),
        (vec![info("t", &[32, 8], 12, 0)], "rows of 32 numbers are no whole Q4_K blocks of 256"),
        (vec![info("t", &[], 8, 0)], "rows of 1 numbers are no whole Q8_0 blocks"),
        (vec![info("t", &[4], 4, 0)], "type 4 (Q4_2) has been removed"),
        (vec![info("t", &[4], 38, 0)], "type 38 (IQ4_NL_8_8) has been removed"),
        (vec![info("t", &[4], 200, 0)], "tensor `t`: unknown type 200"),
        (vec![info("t", &[4], 0, 8)], "offset 8 is not a multiple of 32"),
        (vec![info("t", &[4], 0, 256)], "tensor `t`: 16 bytes at 256 of the data"),
        (vec![info("t", &[4], 0, u64::MAX - 31)], "16 bytes at 18446744073709551584 of the data"),
        (vec![info("t", &[65], 0, 0)], "tensor `t`: 260 bytes at 0 of the data"),
        (vec![info("a", &[16], 0, 0), info("b", &[4], 0, 32)], "tensor `b` begins at byte"),
        (vec![info("b", &[4], 0, 32), info("a", &[16], 0, 0)], "tensor `b` begins at byte"),
    ] {
        let text = problem(parse(&raw(&[], &infos, 256)));
        assert!(text.contains(want) && text.contains("m.gguf"), "{want}: {text}");
    }
}

#[test]
fn what_the_format_leaves_open_is_read_as_the_header_says() {
    let read = |infos: &[Vec<u8>], n_data: usize| parse(&raw(&[], infos, n_data));
    read(&[], 0).unwrap();
    read(&[info("a", &[4], 0, 32), info("b", &[4], 0, 0)], 64).unwrap(); // out of order
    let device = Device::cpu(1).unwrap();
    let scalar = read(&[info("s", &[], 0, 0)], 32).unwrap();
    assert_eq!(scalar.tensor(&device, "s").unwrap().unwrap().shape(), [0usize; 0]);
    let empty = read(&[info("e", &[4, 0], 0, 0), info("f", &[4], 0, 0)], 32).unwrap();
    assert_eq!(empty.tensor(&device, "e").unwrap().unwrap().shape(), [0, 4]);
    read(&[info(&"n".repeat(64), &[4], 0, 0)], 32).unwrap();
    // Padding of the last tensor: none, all, more; but not a part.
    for n_data in [16, 32, 33, 100] {
        read(&[info("a", &[4], 0, 0)], n_data).unwrap();
    }
    for n_data in [17, 31] {
        let text = problem(read(&[info("a", &[4], 0, 0)], n_data));
        assert!(text.contains("inside the padding after `a`"), "{text}");
    }
    assert!(read(&[info("a", &[4], 0, 0)], 15).is_err());
    // At alignment 1 floats may lie at any address.
    let one = value("general.alignment", 4, &1u32.to_le_bytes());
    let mut bytes = raw(&[one], &[info("a", &[1], 24, 0), info("b", &[1], 0, 1)], 0);
    bytes.truncate(24 + 8 + 17 + 4 + 4 + 2 * (8 + 1 + 4 + 8 + 4 + 8));
    bytes.extend([9, 0, 0, 0x20, 0x41]);
    let gguf = parse(&bytes).unwrap();
    assert_eq!(gguf.tensor(&device, "b").unwrap().unwrap().f32(), [10.0]);
    assert!(problem(gguf.tensor(&device, "a")).contains("tensor `a` is I8"));
}

#[test]
fn types_that_cannot_be_decoded_are_refused_by_name_when_asked_for() {
    let device = Device::cpu(1).unwrap();
    for (id, name, n_elem, n_bytes) in TYPES {
        let n_data = n_bytes.next_multiple_of(32);
        let bytes = raw(&[], &[info("t", &[n_elem as u64], id, 0)], n_data);
        let gguf = parse(&bytes).unwrap();
        assert_eq!(gguf.tensors()[0].n_bytes, n_bytes);
        match gguf.tensor(&device, "t") {
            Ok(tensor) => {
                let block = tensor.unwrap().dtype().block();
                assert_eq!(block, (n_elem, n_bytes), "{name}");
            }
            Err(error) => assert!(error.report().contains(&format!("is {name}\n"))),
        }
    }
    let n_known = TYPES.iter().filter(|t| GgmlType::from_id(t.0).unwrap().dtype().is_some());
    assert_eq!(n_known.count(), 3 + BlockType::ALL.len());
    for block in BlockType::ALL {
        let ggml = GgmlType::from_id(block.ggml_id().unwrap()).unwrap();
        assert_eq!(ggml.name.to_lowercase(), block.name());
        assert_eq!(ggml.dtype(), Some(DType::Block(block)));
    }
}

#[test]
fn a_value_of_another_kind_is_refused_with_file_key_value_and_wanted_kind() {
    let list = |kind: u32, n: u64, bytes: &[u8]| {
        [&kind.to_le_bytes()[..], &n.to_le_bytes(), bytes].concat()
    };
    let words = [string(b"a"), string(&[0x80])].concat();
    let values = [
        value("text", 8, &string(b"abc")),
        value("bytes", 8, &string(&[0xff])),
        value("neg", 5, &(-1i32).to_le_bytes()),
        value("half", 6, &0.5f32.to_le_bytes()),
        value("yes", 7, &[1]),
        value("list", 9, &list(5, 2, &[3i32.to_le_bytes(), (-4i32).to_le_bytes()].concat())),
        value("long", 9, &list(10, 1, &u64::MAX.to_le_bytes())),
        value("words", 9, &list(8, 2, &words)),
    ];
    let gguf = parse(&raw(&values, &[], 0)).unwrap();
    let is = |text: String, want: &str| assert!(text.contains(want), "{want}: {text}");
    is(problem(gguf.size("text")), "m.gguf: `text`: is the string \"abc\", not a whole number");
    is(problem(gguf.size("neg")), "`neg`: is the integer -1, not a whole number from 0 on");
    is(problem(gguf.size("half")), "`half`: is the f32 0.5, not a whole number");
    is(problem(gguf.size("list")), "`list`: is an array of 2 i32, not a whole number");
    is(problem(gguf.float("yes")), "`yes`: is the bool true, not a float");
    is(problem(gguf.bool("half")), "`half`: is the f32 0.5, not a bool");
    is(problem(gguf.str("neg")), "`neg`: is the integer -1, not UTF-8 text");
    is(problem(gguf.str("bytes")), "not UTF-8 text");
    is(problem(gguf.sizes("list")), "`list`: element 1 is the integer -4; wanted is an array of");
    is(problem(gguf.sizes("neg")), "`neg`: is the integer -1, not an array of whole numbers");
    is(problem(gguf.ints("long")), "element 0 is the integer 18446744073709551615");
    is(problem(gguf.floats("list")), "element 0 is the integer 3; wanted is an array of floats");
    is(problem(gguf.ints("words")), "element 0 is the string \"a\"; wanted is an array of int");
    is(problem(gguf.strings("text")), "`text`: is the string \"abc\", not an array of strings");
    assert_eq!(gguf.ints("list").unwrap().unwrap(), [3, -4]);
    assert_eq!(gguf.strings("words").unwrap().unwrap(), [&b"a"[..], &[0x80]]);
    assert_eq!(gguf.bool("yes").unwrap(), Some(true));
    assert_eq!(gguf.float("half").unwrap(), Some(0.5));
    assert!(gguf.size("absent").unwrap().is_none());
}

/// Numbers from one stream, one after the other.
struct Draw(Rng, u64);

impl Draw {
    fn bits(&mut self) -> u64 {
        self.1 += 1;
        self.0.bits(self.1)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    fn list<T>(&mut self, one: impl Fn(&mut Draw) -> T) -> Vec<T> {
        (0..self.below(6)).map(|_| one(self)).collect()
    }

    fn bytes(&mut self) -> Vec<u8> {
        self.list(|draw| draw.bits() as u8)
    }

    fn item(&mut self) -> Item {
        match self.below(9) {
            0 => Item::U32(self.bits() as u32),
            1 => Item::I32(self.bits() as i32),
            2 => Item::F32(self.bits() as f32),
            3 => Item::Bool(self.below(2) == 1),
            4 => Item::Str(["", "ä", "<s>"][self.below(3)].into()),
            5 => Item::U8s(self.bytes()),
            6 => Item::I32s(self.list(|draw| draw.bits() as i32)),
            7 => Item::F32s(self.list(|draw| draw.bits() as f32)),
            _ => Item::Strings(self.list(Draw::bytes)),
        }
    }

    fn tensor(&mut self, idx: usize) -> Outgoing<'static> {
        let blocks = BlockType::ALL.into_iter().map(DType::Block);
        let dtypes: Vec<DType> =
            [DType::F32, DType::F16, DType::BF16].into_iter().chain(blocks).collect();
        let dtype = dtypes[self.below(dtypes.len())];
        let per_block = dtype.block().0;
        let mut shape: Vec<usize> = (0..self.below(5)).map(|_| self.below(4)).collect();
        match shape.last_mut() {
            Some(last) => *last *= per_block,
            None if per_block > 1 => shape.push(per_block),
            None => {}
        }
        let n_bytes = dtype.n_bytes(shape.iter().product()).unwrap();
        let bytes = (0..n_bytes).map(|_| self.bits() as u8).collect();
        with_bytes(&format!("blk.{idx}.ä"), &shape, dtype, bytes)
    }
}

/// What a reader must find for an item.
fn expect_equal(gguf: &Gguf, key: &str, item: &Item) {
    let value = gguf.get(key).unwrap();
    let is_equal = match item {
        Item::U32(x) => value == Value::Int((*x).into()),
        Item::I32(x) => value == Value::Int((*x).into()),
        Item::F32(x) => value == Value::F32(*x),
        Item::Bool(x) => value == Value::Bool(*x),
        Item::Str(x) => value == Value::Str(x.as_bytes()),
        Item::U8s(x) => same(value, Kind::U8, x, |x| Value::Int(x.into())),
        Item::I32s(x) => same(value, Kind::I32, x, |x| Value::Int(x.into())),
        Item::F32s(x) => same(value, Kind::F32, x, Value::F32),
        Item::Strings(x) => {
            let Value::Array(array) = value else { panic!("{value:?}") };
            array.kind() == Kind::Str && array.iter().eq(x.iter().map(|text| Value::Str(text)))
        }
    };
    assert!(is_equal, "`{key}` was written as {item:?} and read as {value:?}");
}

fn same<'a, T: Copy>(value: Value<'a>, kind: Kind, list: &[T], one: fn(T) -> Value<'a>) -> bool {
    let Value::Array(array) = value else { panic!("{value:?}") };
    assert_eq!(array.len(), list.len());
    array.kind() == kind && array.iter().eq(list.iter().map(|&x| one(x)))
}

#[test]
fn what_is_written_is_read_back_equal() {
    let device = Device::cpu(1).unwrap();
    for seed in 0..300 {
        let mut draw = Draw(Rng::new(seed, 0), 0);
        let n_items = draw.below(8);
        let mut metadata: Vec<_> =
            (0..n_items).map(|idx| (format!("key.{idx}"), draw.item())).collect();
        let alignment = [32, 64, 256][draw.below(3)];
        if alignment != ALIGNMENT_DEFAULT {
            let at = draw.below(n_items + 1);
            metadata.insert(at, (ALIGNMENT_KEY.into(), Item::U32(alignment as u32)));
        }
        let n_tensors = draw.below(5);
        let tensors: Vec<_> = (0..n_tensors).map(|idx| draw.tensor(idx)).collect();
        let bytes = written(&metadata, &tensors).unwrap();
        assert!(bytes.len().is_multiple_of(alignment), "seed {seed}");
        let gguf = parse(&bytes).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(gguf.keys().eq(metadata.iter().map(|(key, _)| key)));
        for (key, item) in &metadata {
            expect_equal(&gguf, key, item);
        }
        assert_eq!(gguf.names(), tensors.iter().map(|t| &t.name).collect::<Vec<_>>());
        for (tensor, entry) in tensors.iter().zip(gguf.tensors()) {
            assert!(entry.offset.is_multiple_of(alignment), "seed {seed}");
            let read = gguf.tensor(&device, &tensor.name).unwrap().unwrap();
            assert_eq!((read.shape(), read.dtype()), (&tensor.shape[..], tensor.dtype));
            assert_eq!(read.bytes(), &*(tensor.bytes)().unwrap(), "seed {seed}");
        }
    }
}

#[test]
fn a_cut_or_changed_file_never_panics() {
    let mut draw = Draw(Rng::new(7, 1), 0);
    let metadata: Vec<_> = (0..12).map(|idx| (format!("k{idx}"), draw.item())).collect();
    let tensors: Vec<_> = (0..4).map(|idx| draw.tensor(idx)).collect();
    let good = written(&metadata, &tensors).unwrap();
    let end = parse(&good).unwrap().tensors().iter().map(|t| t.offset + t.n_bytes).max().unwrap();
    for n in 0..good.len() {
        assert_eq!(parse(&good[..n]).is_ok(), n == end, "cut to {n}");
    }
    let n_header = good.len().min(1200);
    let device = Device::cpu(1).unwrap();
    let look = |bytes: &[u8]| {
        // Either it is refused, or everything it claims can be looked at.
        let Ok(gguf) = parse(bytes) else { return };
        for key in gguf.keys() {
            if let Some(Value::Array(array)) = gguf.get(key) {
                assert_eq!(array.iter().count(), array.len());
            }
        }
        for entry in gguf.tensors() {
            let _ = gguf.tensor(&device, &entry.name);
        }
    };
    for at in 0..n_header {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            look(&bad);
        }
        for number in [0, 1, 1 << 31, (1 << 32) - 1, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX] {
            let mut bad = good.clone();
            if let Some(place) = bad.get_mut(at..at + 8) {
                place.copy_from_slice(&number.to_le_bytes());
            }
            look(&bad);
        }
    }
}

#[test]
fn what_gguf_cannot_hold_is_refused_before_the_first_byte() {
    let refused = |metadata: &[(String, Item)], tensors: &[Outgoing]| {
        problem(write(metadata, tensors, &mut |_| panic!("nothing is written")))
    };
    let q8 = DType::Block(BlockType::Q8_0);
    for (tensor, want) in [
        (no_bytes("", &[1], DType::F32), "the name is empty"),
        (no_bytes(&"n".repeat(64), &[1], DType::F32), "the name has 64 bytes, at most 63"),
        (no_bytes("a\n", &[1], DType::F32), "is not plain text"),
        (no_bytes("t", &[1; 5], DType::F32), "tensor `t`: 5 axes"),
        (no_bytes("t", &[32, 33], q8), "rows of 33 numbers are no whole Q8_0 blocks of 32"),
        (no_bytes("t", &[usize::MAX, 2], DType::F32), "are too large"),
    ] {
        let text = refused(&[], &[tensor]);
        assert!(text.contains(want), "{want}: {text}");
    }
    let twice = || no_bytes("t", &[1], DType::F32);
    assert!(refused(&[], &[twice(), twice()]).contains("tensor `t` comes twice"));
    let key = |key: &str, item: Item| (key.to_string(), item);
    assert!(refused(&[key("", Item::U32(1))], &[]).contains("a key is empty"));
    let same = [key("k", Item::U32(1)), key("k", Item::U32(1))];
    assert!(refused(&same, &[]).contains("key `k` comes twice"));
    for item in [Item::U32(0), Item::U32(16), Item::U32(48), Item::U32(1 << 21), Item::I32(32)] {
        assert!(refused(&[key(ALIGNMENT_KEY, item)], &[]).contains("not a u32 power of two in 32"));
    }
}

#[test]
fn bytes_of_another_length_than_promised_stop_the_writing() {
    let tensor = with_bytes("t", &[2, 3], DType::F16, vec![0; 11]);
    assert!(problem(written(&[], &[tensor])).contains("`t` takes 12 bytes, 11 were made"));
    let make = || Err(Error::input("no such weight", "look again"));
    let broken = Outgoing { bytes: Box::new(make), ..no_bytes("t", &[1], DType::F32) };
    assert!(problem(written(&[], &[broken])).contains("no such weight"));
    let full = |_: &[u8]| Err(Error::input("disk full", "make room"));
    assert!(problem(write(&[], &[], &mut { full })).contains("disk full"));
}
