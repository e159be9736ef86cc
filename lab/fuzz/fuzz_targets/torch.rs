//! Fuzzes `targets::torch`.

#![no_main]

use elapid::fuzz_targets as targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // An error is an answer; only a panic is not.
    let _ = targets::torch(data);
});
