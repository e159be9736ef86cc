//! What `generate`, `chat` and `serve` share: a model made ready to answer, flags of sampling, one
//! answer from beginning to end; and the two halves of a chat, what was said and what is typed.

pub mod answer;
pub mod conversation;
pub mod flags;
pub mod input;
