//! A walk over bytes that checks every length against the bytes that are left.

/// A value, or what is wrong without the name of the file: the caller adds it.
pub(super) type Checked<T> = std::result::Result<T, String>;

/// A place in the file. What it gives has been checked against the bytes that are there.
pub(super) struct Cursor<'a> {
    pub data: &'a [u8],
    pub at: usize,
}

impl<'a> Cursor<'a> {
    pub fn left(&self) -> usize {
        self.data.len() - self.at
    }

    pub fn take(&mut self, what: &str, n: u64) -> Checked<&'a [u8]> {
        let left = self.left();
        match usize::try_from(n) {
            Ok(n) if n <= left => {
                self.at += n;
                Ok(&self.data[self.at - n..self.at])
            }
            _ => Err(format!("{what} of {n} bytes, {left} bytes follow")),
        }
    }

    pub fn number<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let bytes = self.take("a number", N as u64)?;
        Ok(bytes.try_into().expect("as many as were taken"))
    }

    pub fn u16(&mut self) -> Checked<u16> {
        Ok(u16::from_le_bytes(self.number()?))
    }

    pub fn u32(&mut self) -> Checked<u32> {
        Ok(u32::from_le_bytes(self.number()?))
    }

    pub fn u64(&mut self) -> Checked<u64> {
        Ok(u64::from_le_bytes(self.number()?))
    }
}
