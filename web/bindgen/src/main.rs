//! `bindgen IN.wasm OUT`: writes `OUT/elapid.js` and `OUT/elapid_bg.wasm`.
//!
//! What wasm-bindgen-cli does, as a program of this workspace: nothing to install, and its version
//! is that of Cargo.lock, which must be the library's.

use std::process::ExitCode;
use wasm_bindgen_cli_support::Bindgen;

fn main() -> ExitCode {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [input, out] = &paths[..] else {
        eprintln!("usage: bindgen IN.wasm OUT");
        return ExitCode::from(2);
    };
    let mut bindgen = Bindgen::new();
    bindgen.input_path(input).out_name("elapid").typescript(false);
    let done = bindgen.web(true).and_then(|bindgen| bindgen.generate(out));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
