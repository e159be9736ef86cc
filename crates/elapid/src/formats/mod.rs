//! Files made by others: bytes in, bytes out. Which paths they come from is not known here.

pub mod peft;
pub mod safetensors;
