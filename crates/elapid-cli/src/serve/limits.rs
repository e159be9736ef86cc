//! How much one client may ask for.

use std::time::Duration;

/// Bounds on requests.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a body.
    pub body_bytes_max: usize,
    /// Tokens of an answer; who asks for more gets this many.
    pub n_tok_max: usize,
    /// From a request to the end of its answer.
    pub time_max: Duration,
}

/// Answers to one prompt.
pub const N_CHOICES_MAX: i64 = 8;

/// Prompts in one request.
pub const N_PROMPTS_MAX: usize = 64;

/// Texts in one request for vectors.
pub const N_INPUTS_MAX: usize = 256;
