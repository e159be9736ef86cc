//! `elapid watch`: follows a run from another terminal, and keeps its report page fresh.

use crate::report::live::{Live, Output};
use crate::report::{Done, line};
use crate::run;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Follow a run: its lines as they come, and a report page that refreshes itself.
///
/// RUN/report.html is written every few seconds; open it in a browser. Ends with the run, or with
/// Ctrl-C, which does not touch the run.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid watch runs/1\n  elapid watch runs/1 --once --json")]
pub struct Watch {
    /// Directory of the run
    run: PathBuf,
    /// Seconds between two looks
    #[arg(long, value_name = "N", default_value_t = 2.0)]
    every: f64,
    /// Look once
    #[arg(long)]
    once: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Watch {
    pub fn run(&self) -> Done<ExitCode> {
        let mut live = Live::new(if self.json { Output::json() } else { Output::for_people() });
        let pause = Duration::from_secs_f64(self.every.clamp(0.1, 3600.0));
        let mut seen = 0;
        loop {
            let look = run::look(&self.run, &mut seen, &mut live)?;
            if look.is_finished || self.once {
                live.finish();
                if !self.json {
                    line(look.page.display());
                }
                return Ok(ExitCode::SUCCESS);
            }
            std::thread::sleep(pause);
        }
    }
}
