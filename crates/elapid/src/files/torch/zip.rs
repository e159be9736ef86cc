//! The entries of a zip archive that stores them as they are.
//!
//! The list at the end (the central directory) is read, and the header before each entry, which
//! says where its bytes begin. Sizes and places above 4 GiB stand in 64-bit fields (zip64).

use crate::files::cursor::{Checked, Cursor};
use std::collections::BTreeMap;
use std::ops::Range;

pub(super) const MAGIC: &[u8] = b"PK\x03\x04";
const LISTED: &[u8] = b"PK\x01\x02";
const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const END_64_PLACE: &[u8] = b"PK\x06\x07";
/// The end record without the comment that may follow, and the longest comment.
const END_BYTES: usize = 22;
const COMMENT_BYTES_MAX: usize = u16::MAX as usize;
const END_64_PLACE_BYTES: usize = 20;
/// In place of a number that stands in a 64-bit field.
const FULL: u32 = u32::MAX;

/// The bytes of each entry, by its name.
pub(super) fn read(data: &[u8]) -> Checked<BTreeMap<&str, Range<usize>>> {
    let (n_entries, list) = directory(data)?;
    let mut cursor = Cursor { data: &data[..list.end], at: list.start };
    let mut entries = BTreeMap::new();
    while cursor.left() > 0 {
        let (name, range) = entry(data, &mut cursor)?;
        if entries.insert(name, range).is_some() {
            return Err(format!("the archive holds `{name}` twice"));
        }
    }
    match entries.len() as u64 == n_entries {
        true => Ok(entries),
        false => Err(format!("the archive lists {} of {n_entries} entries", entries.len())),
    }
}

fn expect(cursor: &mut Cursor, magic: &[u8], what: &str) -> Checked<()> {
    let at = cursor.at;
    match cursor.take(what, magic.len() as u64)? == magic {
        true => Ok(()),
        false => Err(format!("there is no {what} at byte {at} of the archive")),
    }
}

/// How many entries there are, and where their list lies.
fn directory(data: &[u8]) -> Checked<(u64, Range<usize>)> {
    let first = data.len().saturating_sub(END_BYTES + COMMENT_BYTES_MAX);
    let ends = |at: &usize| {
        let Some(record) = data.get(*at..*at + END_BYTES) else { return false };
        let n_comment = usize::from(u16::from_le_bytes([record[20], record[21]]));
        record.starts_with(END) && at + END_BYTES + n_comment == data.len()
    };
    let at = (first..data.len()).rev().find(ends);
    let at = at.ok_or("the archive has no end: the file may be cut short")?;
    let mut cursor = Cursor { data, at: at + END.len() };
    let disks = [cursor.u16()?, cursor.u16()?];
    let counts = [cursor.u16()?, cursor.u16()?];
    let (n_bytes, begin) = (cursor.u32()?, cursor.u32()?);
    let is_64 = counts[1] == u16::MAX || n_bytes == FULL || begin == FULL;
    let (is_whole, n_entries, n_bytes, begin) = match is_64 {
        false => {
            let is_whole = disks == [0; 2] && counts[0] == counts[1];
            (is_whole, counts[1].into(), n_bytes.into(), begin.into())
        }
        true => {
            let place = at.checked_sub(END_64_PLACE_BYTES).ok_or("the archive has no zip64 end")?;
            let mut cursor = Cursor { data, at: place };
            expect(&mut cursor, END_64_PLACE, "place of the zip64 end")?;
            cursor.u32()?;
            let at = usize::try_from(cursor.u64()?).unwrap_or(usize::MAX).min(data.len());
            let mut cursor = Cursor { data, at };
            expect(&mut cursor, END_64, "zip64 end")?;
            cursor.take("a zip64 end", 8 + 2 + 2)?;
            let disks = [cursor.u32()?, cursor.u32()?];
            let counts = [cursor.u64()?, cursor.u64()?];
            let is_whole = disks == [0; 2] && counts[0] == counts[1];
            (is_whole, counts[1], cursor.u64()?, cursor.u64()?)
        }
    };
    if !is_whole {
        return Err("the archive is one of several parts".into());
    }
    let end = begin.checked_add(n_bytes).filter(|&end| end <= at as u64);
    let end =
        end.ok_or_else(|| format!("a list of {n_bytes} bytes at {begin}, it ends at {at}"))?;
    Ok((n_entries, begin as usize..end as usize))
}

/// An entry of the list: its name and where its bytes lie.
fn entry<'a>(data: &'a [u8], cursor: &mut Cursor<'a>) -> Checked<(&'a str, Range<usize>)> {
    expect(cursor, LISTED, "entry of the list")?;
    cursor.take("an entry", 2 + 2)?;
    let (flags, method) = (cursor.u16()?, cursor.u16()?);
    cursor.take("an entry", 2 + 2 + 4)?;
    let [n_packed, n_bytes] = [cursor.u32()?, cursor.u32()?];
    let [n_name, n_extra, n_comment] = [cursor.u16()?, cursor.u16()?, cursor.u16()?];
    cursor.take("an entry", 2 + 2 + 4)?;
    let header = cursor.u32()?;
    let name = cursor.take("a name", n_name.into())?;
    let name = str::from_utf8(name).map_err(|_| "a name in the archive is not UTF-8")?;
    let extra = cursor.take("an extra field", n_extra.into())?;
    cursor.take("a comment", n_comment.into())?;
    if flags & 1 != 0 || method != 0 {
        return Err(format!("`{name}` in the archive is compressed or encrypted"));
    }
    let mut wide = zip64(extra)?;
    let mut number = |short: u32| if short == FULL { wide.u64() } else { Ok(short.into()) };
    // In this order, each only where the short field is full.
    let (n_bytes, n_packed, header) = (number(n_bytes)?, number(n_packed)?, number(header)?);
    if n_packed != n_bytes {
        return Err(format!("`{name}` in the archive has {n_packed} bytes and {n_bytes}"));
    }
    let at = usize::try_from(header).unwrap_or(usize::MAX).min(data.len());
    let mut cursor = Cursor { data, at };
    expect(&mut cursor, MAGIC, "header of an entry")?;
    cursor.take("a header", 22)?;
    let [n_name, n_extra] = [cursor.u16()?, cursor.u16()?];
    cursor.take("a header", u64::from(n_name) + u64::from(n_extra))?;
    let begin = cursor.at;
    cursor.take(&format!("`{name}` in the archive"), n_bytes)?;
    Ok((name, begin..cursor.at))
}

/// The 64-bit numbers among the extra fields; empty where there are none.
fn zip64(extra: &[u8]) -> Checked<Cursor<'_>> {
    let mut cursor = Cursor { data: extra, at: 0 };
    while cursor.left() > 0 {
        let (id, n_bytes) = (cursor.u16()?, cursor.u16()?);
        let field = cursor.take("an extra field", n_bytes.into())?;
        if id == 1 {
            return Ok(Cursor { data: field, at: 0 });
        }
    }
    Ok(cursor)
}
