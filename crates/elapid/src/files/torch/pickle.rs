//! The part of Python's pickle language that a state dict of torch is written in.
//!
//! A stack machine. Known are integers, strings, tuples, dicts, the memo, and the few names in
//! `global`; nothing is ever imported or called. Dicts and tuples lie in lists and are named by
//! their number, so that one that holds itself is harmless, and every value takes at least a byte
//! of the file.

use crate::files::cursor::{Checked, Cursor};
use std::collections::BTreeMap;
use std::ops::Range;

/// More axes than weights have.
const N_AXES_MAX: usize = 8;
/// More arguments than any call has that we know.
const N_ARGS_MAX: usize = 8;

/// A tensor as the pickle describes it, nothing of it checked against the storage.
#[derive(Clone)]
pub(super) struct Tensor<'a> {
    pub storage: Storage<'a>,
    /// First number, in the storage.
    offset: u64,
    pub shape: Vec<usize>,
    strides: Vec<u64>,
}

#[derive(Clone, Copy)]
pub(super) struct Storage<'a> {
    pub key: &'a str,
    /// As safetensors calls it.
    pub dtype: &'static str,
    /// Bytes of a number.
    width: u64,
    n_elem: u64,
}

impl Tensor<'_> {
    /// Its bytes, in a storage of `n_bytes`.
    pub fn place(&self, n_bytes: usize) -> Checked<Range<usize>> {
        let Storage { width, n_elem: n_stored, .. } = self.storage;
        if n_stored.checked_mul(width).is_none_or(|n| n > n_bytes as u64) {
            return Err(format!("a storage of {n_stored} numbers, {n_bytes} bytes are there"));
        }
        // Empty axes count as 1 here, so that no product of axes overflows later.
        let mut rows = 1u64;
        for (&axis, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if axis > 1 && stride != rows {
                let (shape, strides) = (&self.shape, &self.strides);
                return Err(format!("shape {shape:?} with strides {strides:?}, not row by row"));
            }
            let wide = rows.checked_mul(axis.max(1) as u64).filter(|&n| n <= isize::MAX as u64);
            rows = wide.ok_or_else(|| format!("shape {:?} is too large", self.shape))?;
        }
        let n_elem = if self.shape.contains(&0) { 0 } else { rows };
        match self.offset.checked_add(n_elem).filter(|&end| end <= n_stored) {
            Some(end) => Ok((self.offset * width) as usize..(end * width) as usize),
            None => {
                let begin = self.offset;
                Err(format!("{n_elem} numbers from {begin} on, the storage has {n_stored}"))
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Value<'a> {
    Mark,
    /// Of no interest: none, true, false.
    Other,
    Int(i64),
    Str(&'a str),
    Tuple(usize),
    Dict(usize),
    Global(Global),
    Storage(usize),
    Tensor(usize),
}

#[derive(Clone, Copy)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    /// Its dtype and the bytes of a number.
    Storage(&'static str, u64),
}

fn global(module: &str, name: &str) -> Checked<Global> {
    Ok(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
        ("torch", "FloatStorage") => Global::Storage("F32", 4),
        ("torch", "HalfStorage") => Global::Storage("F16", 2),
        ("torch", "BFloat16Storage") => Global::Storage("BF16", 2),
        ("torch", "DoubleStorage") => Global::Storage("F64", 8),
        ("torch", "LongStorage") => Global::Storage("I64", 8),
        ("torch", "IntStorage") => Global::Storage("I32", 4),
        ("torch", "ShortStorage") => Global::Storage("I16", 2),
        ("torch", "CharStorage") => Global::Storage("I8", 1),
        ("torch", "ByteStorage") => Global::Storage("U8", 1),
        ("torch", "BoolStorage") => Global::Storage("BOOL", 1),
        _ => return Err(format!("asks for `{module}.{name}`, which is no part of weights")),
    })
}

/// The tensors of a state dict by their names, in the order of the file.
pub(super) fn read(data: &[u8]) -> Checked<Vec<(&str, Tensor<'_>)>> {
    let mut machine = Machine::default();
    let mut cursor = Cursor { data, at: 0 };
    let root = loop {
        let at = cursor.at;
        let done = machine.step(&mut cursor);
        if let Some(root) = done.map_err(|problem| format!("pickle, byte {at}: {problem}"))? {
            break root;
        }
    };
    let Value::Dict(root) = root else { return Err("the pickle holds no dict of tensors".into()) };
    let tensors = machine.dicts[root].iter().map(|&(name, value)| match value {
        Value::Tensor(idx) => Ok((name, machine.tensors[idx].clone())),
        _ => Err(format!("`{name}` in the pickle is not a tensor")),
    });
    tensors.collect()
}

#[derive(Default)]
struct Machine<'a> {
    stack: Vec<Value<'a>>,
    memo: BTreeMap<u32, Value<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(&'a str, Value<'a>)>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Machine<'a> {
    /// One instruction; the result, where it was the last.
    fn step(&mut self, cursor: &mut Cursor<'a>) -> Checked<Option<Value<'a>>> {
        let [code] = cursor.number()?;
        match code {
            0x80 => match cursor.number()? {
                [2] => return Ok(None),
                [other] => return Err(format!("protocol {other}; torch.save writes 2")),
            },
            b'.' => return self.pop().map(Some),
            b'(' => self.stack.push(Value::Mark),
            b'N' | 0x88 | 0x89 => self.stack.push(Value::Other),
            b'K' => self.push_int(u8::from_le_bytes(cursor.number()?).into()),
            b'M' => self.push_int(cursor.u16()?.into()),
            b'J' => self.push_int(i32::from_le_bytes(cursor.number()?).into()),
            0x8a => {
                let [n] = cursor.number()?;
                let bytes = cursor.take("a number", n.into())?;
                let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
                let mut wide = [if negative { 0xff } else { 0 }; 8];
                let place = wide.get_mut(..bytes.len()).ok_or("a number over 8 bytes")?;
                place.copy_from_slice(bytes);
                self.push_int(i64::from_le_bytes(wide));
            }
            b'X' => {
                let n = cursor.u32()?;
                let bytes = cursor.take("a string", n.into())?;
                let text = str::from_utf8(bytes).map_err(|_| "a string that is not UTF-8")?;
                self.stack.push(Value::Str(text));
            }
            b'c' => {
                let (module, name) = (line(cursor)?, line(cursor)?);
                self.stack.push(Value::Global(global(module, name)?));
            }
            b'q' => self.put(u8::from_le_bytes(cursor.number()?).into())?,
            b'r' => self.put(cursor.u32()?)?,
            b'h' => self.get(u8::from_le_bytes(cursor.number()?).into())?,
            b'j' => self.get(cursor.u32()?)?,
            b')' => self.push_tuple(Vec::new()),
            0x85..=0x87 => {
                let n = usize::from(code - 0x84);
                let from = self.stack.len().checked_sub(n).ok_or("the stack is empty")?;
                let items = self.stack.split_off(from);
                self.push_tuple(items);
            }
            b't' => {
                let items = self.pop_to_mark()?;
                self.push_tuple(items);
            }
            b'}' => self.push_dict(),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set(&items)?;
            }
            // The state of an object: attributes of the dict.
            b'b' => {
                self.pop()?;
                self.last_dict()?;
            }
            b'Q' => self.push_storage()?,
            b'R' => self.reduce()?,
            _ => return Err(format!("instruction {code:#04x}, which no state dict needs")),
        }
        Ok(None)
    }

    fn pop(&mut self) -> Checked<Value<'a>> {
        self.stack.pop().ok_or_else(|| "the stack is empty".into())
    }

    fn pop_to_mark(&mut self) -> Checked<Vec<Value<'a>>> {
        let mark = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        let items = self.stack.split_off(mark.ok_or("there is no mark on the stack")? + 1);
        self.stack.pop();
        Ok(items)
    }

    fn pop_tuple(&mut self) -> Checked<Vec<Value<'a>>> {
        match self.pop()? {
            Value::Tuple(idx) if self.tuples[idx].len() <= N_ARGS_MAX => {
                Ok(self.tuples[idx].clone())
            }
            _ => Err("the arguments are no short tuple".into()),
        }
    }

    fn push_int(&mut self, n: i64) {
        self.stack.push(Value::Int(n));
    }

    fn push_tuple(&mut self, items: Vec<Value<'a>>) {
        self.tuples.push(items);
        self.stack.push(Value::Tuple(self.tuples.len() - 1));
    }

    fn push_dict(&mut self) {
        self.dicts.push(Vec::new());
        self.stack.push(Value::Dict(self.dicts.len() - 1));
    }

    fn put(&mut self, idx: u32) -> Checked<()> {
        let last = self.stack.last().ok_or("the stack is empty")?;
        self.memo.insert(idx, *last);
        Ok(())
    }

    fn get(&mut self, idx: u32) -> Checked<()> {
        let value = self.memo.get(&idx).ok_or_else(|| format!("nothing is kept as {idx}"))?;
        self.stack.push(*value);
        Ok(())
    }

    fn last_dict(&mut self) -> Checked<usize> {
        match self.stack.last() {
            Some(Value::Dict(idx)) => Ok(*idx),
            _ => Err("there is no dict on the stack".into()),
        }
    }

    /// Keys and values, one after the other.
    fn set(&mut self, items: &[Value<'a>]) -> Checked<()> {
        let dict = self.last_dict()?;
        let (pairs, rest) = items.as_chunks::<2>();
        for &[key, value] in pairs {
            let Value::Str(key) = key else { return Err("a key that is no string".into()) };
            self.dicts[dict].push((key, value));
        }
        if rest.is_empty() { Ok(()) } else { Err("a key without a value".into()) }
    }

    /// The persistent id of a storage: its type, key, device and length.
    fn push_storage(&mut self) -> Checked<()> {
        let storage = match self.pop_tuple()?[..] {
            [
                Value::Str("storage"),
                Value::Global(Global::Storage(dtype, width)),
                Value::Str(key),
                Value::Str(_),
                Value::Int(n_elem),
            ] => Storage { key, dtype, width, n_elem: not_negative(n_elem)? },
            _ => return Err("what lies outside the pickle is no storage".into()),
        };
        self.storages.push(storage);
        self.stack.push(Value::Storage(self.storages.len() - 1));
        Ok(())
    }

    /// What a call gives.
    fn reduce(&mut self) -> Checked<()> {
        let args = self.pop_tuple()?;
        let Value::Global(global) = self.pop()? else { return Err("calls what is no name".into()) };
        match (global, &args[..]) {
            (Global::OrderedDict, []) => self.push_dict(),
            (Global::RebuildParameter, [Value::Tensor(idx), ..]) => {
                self.stack.push(Value::Tensor(*idx));
            }
            (
                Global::RebuildTensor,
                [
                    Value::Storage(storage),
                    Value::Int(offset),
                    Value::Tuple(shape),
                    Value::Tuple(strides),
                    ..,
                ],
            ) => {
                let (shape, strides) = (self.sizes(*shape)?, self.sizes(*strides)?);
                if shape.len() != strides.len() {
                    return Err(format!("shape {shape:?} with strides {strides:?}"));
                }
                let to_size = |n: u64| usize::try_from(n).map_err(|_| format!("an axis of {n}"));
                self.tensors.push(Tensor {
                    storage: self.storages[*storage],
                    offset: not_negative(*offset)?,
                    shape: shape.into_iter().map(to_size).collect::<Checked<_>>()?,
                    strides,
                });
                self.stack.push(Value::Tensor(self.tensors.len() - 1));
            }
            _ => return Err("a call with other arguments than torch.save writes".into()),
        }
        Ok(())
    }

    fn sizes(&self, tuple: usize) -> Checked<Vec<u64>> {
        let list = &self.tuples[tuple];
        if list.len() > N_AXES_MAX {
            return Err(format!("{} axes, at most {N_AXES_MAX} are read", list.len()));
        }
        let size = |value: &Value| match value {
            Value::Int(n) => not_negative(*n),
            _ => Err("an axis that is no number".into()),
        };
        list.iter().map(size).collect()
    }
}

fn not_negative(n: i64) -> Checked<u64> {
    u64::try_from(n).map_err(|_| format!("{n} is below 0"))
}

fn line<'a>(cursor: &mut Cursor<'a>) -> Checked<&'a str> {
    let rest = &cursor.data[cursor.at..];
    let n = rest.iter().position(|&byte| byte == b'\n').ok_or("a name without end")?;
    let name = cursor.take("a name", n as u64 + 1)?;
    str::from_utf8(&name[..n]).map_err(|_| "a name that is not UTF-8".into())
}
