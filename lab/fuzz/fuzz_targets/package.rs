//! Fuzzes `targets::package`.

#![no_main]

#[allow(dead_code)] // each target uses one of the functions
#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // An error is an answer; only a panic is not.
    let _ = targets::package(data);
});
