//! `elapid list`: what `elapid adapt` made in a project.

use crate::project::{Adapted, Project};
use crate::report::text::bytes;
use crate::report::{Done, Failure, line};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// List what `elapid adapt` made in a project.
///
/// The project is the nearest parent directory with .elapid or .git. The run marked with * is the
/// one that serve, complete, generate and chat use when they are given no model: the newest whose
/// verdict is "better".
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid list\n  elapid list ~/src/project --json")]
pub struct List {
    /// Directory or file of the project
    #[arg(default_value = ".", hide_default_value = true)]
    path: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl List {
    pub fn run(&self) -> Done<ExitCode> {
        // A path that is not there has no project.
        let path = self.path.canonicalize().map_err(|error| {
            let problem = format!("cannot read {}: {error}", self.path.display());
            Failure::new(problem, "give a directory or a file of the project")
        })?;
        let project = Project::of(&path);
        let (runs, used) = (project.runs(), project.newest().map(|run| run.number));
        if self.json {
            let list: Vec<Value> = runs.iter().map(|run| to_json(run, used)).collect();
            line(json!({"project": project.root, "runs": list}));
        } else if runs.is_empty() {
            let root = project.root.display();
            eprintln!("nothing is adapted in {root} yet: run `elapid adapt`");
        } else {
            print_table(&runs, used);
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn to_json(run: &Adapted, used: Option<u64>) -> Value {
    let [before, after] = run.bits();
    json!({
        "number": run.number, "path": run.dir, "created": run.created(), "base": run.base(),
        "bits_per_byte": {"before": before, "after": after}, "verdict": run.verdict(),
        "finished": run.certificate.is_some(), "used": used == Some(run.number),
        "bytes": run.n_bytes(),
    })
}

fn print_table(runs: &[Adapted], used: Option<u64>) {
    let head = ["run", "date", "base", "before", "after", "verdict", "size"].map(String::from);
    let bits = |bits: Option<f64>| bits.map_or("-".into(), |bits| format!("{bits:.3}"));
    let row = |run: &Adapted| {
        let mark = if used == Some(run.number) { "*" } else { "" };
        let date = run.created().unwrap_or("-").chars().take(16).collect::<String>();
        let verdict = match &run.certificate {
            Some(_) => run.verdict().unwrap_or("-"),
            None => "not finished",
        };
        let [before, after] = run.bits().map(bits);
        let base = run.base().unwrap_or("-").to_string();
        let size = bytes(run.n_bytes() as f64);
        let number = format!("{}{mark}", run.number);
        [number, date.replace('T', " "), base, before, after, verdict.into(), size]
    };
    let rows: Vec<[String; 7]> = [head].into_iter().chain(runs.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..7).map(|column| width(column).unwrap_or(0)).collect();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        line(cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
