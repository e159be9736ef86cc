//! `elapid check`: a model directory against the reference values beside it.

use crate::base;
use crate::compute::Compute;
use crate::report::{Done, Failure, line};
use elapid::{GoldenComparison as Comparison, check_golden as check_directory};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compare a model with reference values in golden.safetensors.
///
/// Compares logits, loss, hidden states, every gradient and the weights after some AdamW steps with
/// those of a reference implementation. golden_grouped.safetensors takes precedence if it exists. A
/// directory with an adapter/ is checked on its base model. Exits with 1 if a value is out of
/// tolerance or cannot be read.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid check golden/sets/jamba\n  \
    elapid check golden/sets/lora_llama_qv --all\n  elapid check DIR --json")]
pub struct Check {
    /// Directory with config.json, model.safetensors and golden.safetensors
    model_dir: PathBuf,
    /// Check this model instead of the one in the directory
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    #[command(flatten)]
    compute: Compute,
    /// Print every gradient, not just the worst
    #[arg(long)]
    all: bool,
    /// Print one JSON object per quantity
    #[arg(long)]
    json: bool,
}

impl Check {
    pub fn run(&self) -> Done<ExitCode> {
        Failure::unless_there(&self.model_dir, "a directory with a model and its golden values")?;
        let device = self.compute.open_exact()?;
        let model = self.model.as_deref().map(base::resolve).transpose()?;
        let (comparisons, skipped) = check_directory(&self.model_dir, model.as_deref(), &device)?;
        self.print(&comparisons, skipped);
        let all_hold = comparisons.iter().all(Comparison::holds);
        Ok(if all_hold { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    fn print(&self, comparisons: &[Comparison], skipped: Option<String>) {
        if self.json {
            for c in comparisons {
                let object = json!({
                    "quantity": c.quantity, "error": c.error, "tolerance": c.tolerance,
                    "holds": c.holds(), "note": c.note,
                });
                line(object);
            }
        } else {
            let (grads, others): (Vec<_>, Vec<_>) =
                comparisons.iter().partition(|c| c.quantity.starts_with("grad."));
            let worst = grads.iter().max_by(|a, b| a.error.total_cmp(&b.error)).copied();
            for c in others.iter().copied() {
                print_line(c, &c.quantity, &c.note);
            }
            if let Some(worst) = worst {
                let what = format!("gradients ({})", grads.len());
                print_line(worst, &what, &format!("worst is {}", worst.quantity));
            }
            for c in grads.iter().filter(|c| self.all || !c.holds()) {
                print_line(c, &c.quantity, &c.note);
            }
        }
        if let Some(skipped) = skipped {
            eprintln!("skip    weights after AdamW: {skipped}");
        }
    }
}

fn print_line(c: &Comparison, what: &str, note: &str) {
    let verdict = if c.holds() { "ok" } else { "FAIL" };
    line(format!("{verdict:<7} {what:<16} {:.2e}  of {:.0e}  {note}", c.error, c.tolerance));
}
