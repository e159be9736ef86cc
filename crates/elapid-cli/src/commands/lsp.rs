//! `elapid lsp`: completions for editors.

use super::Chosen;
use crate::lsp::{self, Log, Settings};
use crate::report::{Done, between};
use crate::talk::flags::ModelFlags;
use crate::talk::hole::Others;
use crate::talk::insert::N_LINES;
use std::path::PathBuf;
use std::process::ExitCode;

/// Language server for editors: completions on stdin and stdout.
///
/// Started by an editor. It answers `textDocument/inlineCompletion`, and `textDocument/completion`
/// for editors without it, with what `elapid complete` would insert. In a project that `elapid
/// adapt` has adapted to, the newest adapter is used, also one that is made while it runs.
///
/// editors/README.md says how to set up Neovim, Helix, VS Code, Zed and Emacs.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid lsp\n  elapid lsp --lines 3\n  \
    elapid lsp --model SmolLM2-135M.gguf --no-context")]
pub struct Lsp {
    /// Model [default: the newest adapter of the project with its base, or elapid-code]
    #[arg(long, short = 'm', value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Stop after N lines
    #[arg(long, value_name = "N", default_value_t = N_LINES, value_parser = between(1, 1000))]
    lines: usize,
    /// Do not show other files of the project to the model
    #[arg(long)]
    no_context: bool,
    /// Print tokens and times of each answer on stderr
    #[arg(long)]
    log: bool,
    /// What editors say that know several ways; it is the only one
    #[arg(long, hide = true)]
    stdio: bool,
    #[command(flatten)]
    source: ModelFlags,
}

impl Lsp {
    pub fn run(&self) -> Done<ExitCode> {
        let settings = Settings {
            n_lines: self.lines,
            others: if self.no_context { Others::Sent } else { Others::Picked },
            log: if self.log { Log::Answers } else { Log::Short },
        };
        Ok(lsp::serve(settings, &|project| {
            let chosen = Chosen::new(self.model.as_deref(), &self.source.adapter, project)?;
            chosen.say();
            self.source.load(&chosen.model, &chosen.adapters)
        }))
    }
}
