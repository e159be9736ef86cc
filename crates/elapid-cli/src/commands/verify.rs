//! `elapid verify`: whether a certificate holds.

use crate::compute::Compute;
use crate::proof::verify::{Verified, verify};
use crate::report::{Done, Failure, line};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Check a certificate of `elapid adapt`: hashes of all files, and every figure measured again.
///
/// Base and adapted model are measured on the stored held-out text, on the CPU. A figure may differ
/// by 1e-4 of its value, as it may on another machine.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid verify .elapid/adapt/1\n  \
    elapid verify certificate.json --model elapid-code.gguf --json\n\n\
    The exit code is 0 when everything is equal, 3 when something differs.")]
pub struct Verify {
    /// certificate.json, or the run directory that holds it
    certificate: PathBuf,
    /// Base model, where it lies elsewhere than the certificate says
    #[arg(long, value_name = "M")]
    model: Option<PathBuf>,
    /// CPU threads [default: all]
    #[arg(long, short = 't', value_name = "N")]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub fn run(&self) -> Done<ExitCode> {
        let what = "a run of `elapid adapt`, as .elapid/adapt/1, or its certificate.json";
        Failure::unless_there(&self.certificate, what)?;
        let compute = Compute { threads: self.threads, ..Compute::default() };
        let n_threads = compute.n_threads().max(1);
        let found = verify(&self.certificate, self.model.as_deref(), n_threads)?;
        match self.json {
            true => line(to_json(&found)),
            false => print(&found),
        }
        let is_equal = found.differences.is_empty();
        Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::from(3) })
    }
}

fn to_json(found: &Verified) -> serde_json::Value {
    let Verified { certificate, differences, is_exact } = found;
    let is_equal = differences.is_empty();
    json!({
        "result": if is_equal { "equal" } else { "refused" },
        "exact": is_equal && *is_exact, "differences": differences,
        "verdict": certificate.verdict, "bits_per_byte": certificate.held_out.bits_per_byte,
    })
}

fn print(found: &Verified) {
    let Verified { certificate, differences, is_exact } = found;
    differences.iter().for_each(|text| line(format!("differs {text}")));
    if !differences.is_empty() {
        line("refused what the certificate says does not hold");
        return;
    }
    let how = if *is_exact { "to the last digit" } else { "within 1e-4" };
    line(format!("equal   all hashes, and all figures {how}"));
    line(format!("verdict {}", certificate.verdict_text));
}
