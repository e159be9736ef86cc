//! The values of a GGUF file: thirteen kinds, decoded from the bytes of the file when asked for.

use super::Checked;
use crate::files::cursor::Cursor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

/// By number in files: the kind, its name in messages, and the fewest bytes that a value takes
/// (all of them unless it holds a length).
const KINDS: [(Kind, &str, u64); 13] = [
    (Kind::U8, "u8", 1),
    (Kind::I8, "i8", 1),
    (Kind::U16, "u16", 2),
    (Kind::I16, "i16", 2),
    (Kind::U32, "u32", 4),
    (Kind::I32, "i32", 4),
    (Kind::F32, "f32", 4),
    (Kind::Bool, "bool", 1),
    (Kind::Str, "string", 8),
    (Kind::Array, "array", 12),
    (Kind::U64, "u64", 8),
    (Kind::I64, "i64", 8),
    (Kind::F64, "f64", 8),
];

impl Kind {
    fn from_id(id: u32) -> Checked<Kind> {
        let found = KINDS.get(id as usize).map(|row| row.0);
        found.ok_or_else(|| format!("unknown kind of value {id}"))
    }

    fn name(self) -> &'static str {
        KINDS[self as usize].1
    }

    fn n_bytes_min(self) -> u64 {
        KINDS[self as usize].2
    }
}

/// A value; strings and arrays stay in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Of any integer kind: i128 holds them all.
    Int(i128),
    F32(f32),
    F64(f64),
    Bool(bool),
    /// Bytes, most often UTF-8.
    Str(&'a [u8]),
    Array(Array<'a>),
}

impl Value<'_> {
    pub(super) fn integer(self) -> Option<i128> {
        if let Value::Int(x) = self { Some(x) } else { None }
    }

    pub(super) fn float(self) -> Option<f64> {
        match self {
            Value::F32(x) => Some(x.into()),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }

    /// For messages: the kind and the value, long ones shortened.
    pub(super) fn describe(self) -> String {
        match self {
            Value::Int(x) => format!("the integer {x}"),
            Value::F32(x) => format!("the f32 {x}"),
            Value::F64(x) => format!("the f64 {x}"),
            Value::Bool(x) => format!("the bool {x}"),
            Value::Str(bytes) => {
                let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
                let short: String = text.chars().take(40).collect();
                let more = if short.len() < bytes.len() { "..." } else { "" };
                format!("the string {short:?}{more}")
            }
            Value::Array(array) => format!("an array of {} {}", array.len(), array.kind().name()),
        }
    }
}

/// A list of values of one kind, decoded while it is walked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    kind: Kind,
    n: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    pub fn kind(&self) -> Kind {
        self.kind
    }

    pub fn len(&self) -> usize {
        self.n
    }

    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (kind, n) = (self.kind, self.n);
        let mut cursor = Cursor { data: self.bytes, at: 0 };
        (0..n).map_while(move |_| cursor.value(kind).ok())
    }
}

/// Values of GGUF at a place in the file.
impl<'a> Cursor<'a> {
    pub fn string(&mut self) -> Checked<&'a [u8]> {
        let n = self.u64()?;
        self.take("a string", n)
    }

    pub fn kind(&mut self) -> Checked<Kind> {
        Kind::from_id(self.u32()?)
    }

    /// The value at this place, checked to its end.
    pub fn value(&mut self, kind: Kind) -> Checked<Value<'a>> {
        Ok(match kind {
            Kind::U8 => Value::Int(u8::from_le_bytes(self.number()?).into()),
            Kind::I8 => Value::Int(i8::from_le_bytes(self.number()?).into()),
            Kind::U16 => Value::Int(u16::from_le_bytes(self.number()?).into()),
            Kind::I16 => Value::Int(i16::from_le_bytes(self.number()?).into()),
            Kind::U32 => Value::Int(self.u32()?.into()),
            Kind::I32 => Value::Int(i32::from_le_bytes(self.number()?).into()),
            Kind::F32 => Value::F32(f32::from_le_bytes(self.number()?)),
            Kind::U64 => Value::Int(self.u64()?.into()),
            Kind::I64 => Value::Int(i64::from_le_bytes(self.number()?).into()),
            Kind::F64 => Value::F64(f64::from_le_bytes(self.number()?)),
            Kind::Bool => match self.number()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(format!("a bool of value {other}, neither 0 nor 1")),
            },
            Kind::Str => Value::Str(self.string()?),
            Kind::Array => {
                let (kind, n) = self.array_head()?;
                let begin = self.at;
                self.skip(kind, n)?;
                Value::Array(Array { kind, n, bytes: &self.data[begin..self.at] })
            }
        })
    }

    /// Kind and count of an array. As many elements may be there, going by their least size.
    fn array_head(&mut self) -> Checked<(Kind, usize)> {
        let (kind, n) = (self.kind()?, self.u64()?);
        let (name, left) = (kind.name(), self.left());
        if kind == Kind::Array {
            return Err("an array of arrays, which we do not read".into());
        }
        match usize::try_from(n) {
            Ok(count) if n <= left as u64 / kind.n_bytes_min() => Ok((kind, count)),
            _ => Err(format!("an array of {n} {name} values, {left} bytes follow")),
        }
    }

    /// Walks the elements of an array. Strings must be walked to find their end, bools to judge
    /// them; numbers are passed at once.
    fn skip(&mut self, kind: Kind, n: usize) -> Checked<()> {
        if kind == Kind::Str || kind == Kind::Bool {
            for idx in 0..n {
                self.value(kind).map_err(|problem| format!("element {idx} of {n}: {problem}"))?;
            }
            return Ok(());
        }
        let n_bytes = (n as u64).checked_mul(kind.n_bytes_min());
        self.take("an array", n_bytes.unwrap_or(u64::MAX)).map(|_| ())
    }
}

/// The value that lies in `bytes`, which `Cursor::value` has walked once.
pub(super) fn stored(kind: Kind, bytes: &[u8]) -> Option<Value<'_>> {
    let mut cursor = Cursor { data: bytes, at: 0 };
    if kind != Kind::Array {
        return cursor.value(kind).ok();
    }
    let (kind, n) = cursor.array_head().ok()?;
    Some(Value::Array(Array { kind, n, bytes: &bytes[cursor.at..] }))
}
