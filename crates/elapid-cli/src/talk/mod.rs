//! What `generate`, `chat`, `complete`, `lsp` and `serve` share: a model made ready to answer,
//! flags of sampling, one answer from beginning to end; the two halves of a chat, what was said and
//! what is typed; and a hole in a file: its prompt, how much of the file is in it, what is
//! inserted, where the answer ends.

pub mod answer;
pub mod conversation;
pub mod ending;
pub mod flags;
pub mod hole;
pub mod input;
pub mod insert;
mod window;
