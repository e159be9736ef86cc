//! Messages on a stream: header lines, an empty line, and as many bytes of JSON as the header says.
//!
//! Nothing that a stream holds ends the reading but its end. What is no message is told as such,
//! and reading continues with the next header. Lines that are longer than they may be are skipped;
//! what a header promises is not allocated before it comes.

use serde_json::{Value, json};
use std::io::{self, BufRead, Read};

/// Bytes of a message: the largest text that an editor would send whole.
const BYTES_MAX: u64 = 64 << 20;
/// Bytes of a header line.
const LINE_BYTES_MAX: u64 = 4096;

/// What the protocol calls the ways to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Parse = -32700,
    InvalidRequest = -32600,
    MethodNotFound = -32601,
    InvalidParams = -32602,
    Internal = -32603,
    NotInitialized = -32002,
    Cancelled = -32800,
    /// Something newer has made the answer useless.
    ContentModified = -32801,
    Failed = -32803,
}

#[derive(Debug, PartialEq)]
pub enum Frame {
    Message(Value),
    /// What is wrong with bytes that are no message.
    Broken(Code, String),
    End,
}

/// The messages of a stream.
pub struct Frames<R> {
    input: R,
    /// Bytes of a message that is too long.
    n_skipped: u64,
}

impl<R: BufRead> Frames<R> {
    pub fn new(input: R) -> Frames<R> {
        Frames { input, n_skipped: 0 }
    }

    pub fn next(&mut self) -> io::Result<Frame> {
        // Only now, after it was told: they may never come.
        io::copy(&mut self.input.by_ref().take(self.n_skipped), &mut io::sink())?;
        self.n_skipped = 0;
        let Some(length) = self.header()? else { return Ok(Frame::End) };
        let Some(length) = length else {
            let words = "the header has no Content-Length that is a number";
            return Ok(Frame::Broken(Code::Parse, words.into()));
        };
        if length > BYTES_MAX {
            self.n_skipped = length;
            let words = format!("a message of {length} bytes; at most {BYTES_MAX} are read");
            return Ok(Frame::Broken(Code::InvalidRequest, words));
        }
        let mut body = Vec::new();
        self.input.by_ref().take(length).read_to_end(&mut body)?;
        if (body.len() as u64) < length {
            return Ok(Frame::End);
        }
        Ok(match serde_json::from_slice(&body) {
            Ok(message) => Frame::Message(message),
            Err(error) => Frame::Broken(Code::Parse, format!("the message is not JSON: {error}")),
        })
    }

    /// The length that a header says, if it does; nothing at the end of the stream.
    fn header(&mut self) -> io::Result<Option<Option<u64>>> {
        let mut length = None;
        loop {
            let mut line = Vec::new();
            self.input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
            if line.is_empty() {
                return Ok(None);
            }
            if !line.ends_with(b"\n") {
                self.input.skip_until(b'\n')?;
            }
            let line = String::from_utf8_lossy(&line);
            let line = line.trim();
            if line.is_empty() {
                return Ok(Some(length));
            }
            let pair = line.split_once(':');
            if let Some((_, value)) = pair.filter(|it| it.0.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse::<u64>().ok();
            }
        }
    }
}

/// A message as it is written.
pub fn written(message: &Value) -> String {
    let body = message.to_string();
    format!("Content-Length: {}\r\n\r\n{body}", body.len())
}

/// The answer to a request.
pub fn answer(id: &Value, outcome: Result<Value, (Code, String)>) -> Value {
    match outcome {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err((code, message)) => {
            let error = json!({"code": code as i32, "message": message});
            json!({"jsonrpc": "2.0", "id": id, "error": error})
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(bytes: &[u8]) -> Vec<Frame> {
        let (mut input, mut frames) = (Frames::new(bytes), Vec::new());
        while frames.last() != Some(&Frame::End) {
            frames.push(input.next().unwrap());
        }
        frames
    }

    #[test]
    fn what_is_written_is_read_again_whatever_stands_between() {
        let message = json!({"method": "x", "params": ["ä🦀\r\n\r\n"]});
        let text = written(&message);
        let typed = text.replace("Content-Length:", "Content-Type: x\ncontent-LENGTH: ");
        let all = format!("{text}garbage\n\n{typed}Content-Length: -1\r\n\r\n{text}{text}");
        let got = frames(all.as_bytes());
        let is_message = |frame: &Frame| *frame == Frame::Message(message.clone());
        assert!(is_message(&got[0]) && is_message(&got[2]), "{got:?}");
        assert!(matches!(&got[1], Frame::Broken(Code::Parse, _)), "{got:?}");
        assert!(matches!(&got[3], Frame::Broken(Code::Parse, _)), "{got:?}");
        assert!(got[4..].iter().any(is_message), "{got:?}");
        for n in 0..text.len() {
            assert_eq!(frames(&text.as_bytes()[..n]), [Frame::End], "cut at {n}");
        }
    }

    #[test]
    fn a_length_beyond_the_limit_and_a_line_without_end_take_no_memory() {
        let got = frames(b"Content-Length: 99999999999999999\r\n\r\n{}");
        assert!(matches!(&got[0], Frame::Broken(Code::InvalidRequest, _)), "{got:?}");
        assert_eq!(got.len(), 2, "{got:?}");
        let long = format!("{}\r\n\r\n{}", "x".repeat(1 << 20), written(&json!(1)));
        let got = frames(long.as_bytes());
        assert!(matches!(&got[0], Frame::Broken(Code::Parse, _)), "{got:?}");
        assert_eq!(got[1], Frame::Message(json!(1)));
        let deep = "[".repeat(100_000);
        let got = frames(format!("Content-Length: 100000\r\n\r\n{deep}").as_bytes());
        assert!(matches!(&got[0], Frame::Broken(Code::Parse, _)), "{got:?}");
    }
}
