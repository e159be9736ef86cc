//! `elapid list`: what `elapid adapt` made in a project, and what `elapid pull` downloaded.

use crate::hub::cache::{Cache, Pulled};
use crate::project::{Adapted, Project};
use crate::report::text::bytes;
use crate::report::{Done, Failure, line};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// List what `elapid adapt` made in a project, and pulled models.
///
/// The project is the nearest parent directory with .elapid or .git. The run marked with * is the
/// one that serve, complete, generate and chat use when they are given no model: the newest whose
/// verdict is "better". Below are the models in the cache of the Hugging Face hub, by names that
/// all commands take.
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
        let pulled = Cache::of_user().map_or(Vec::new(), |cache| cache.list());
        if self.json {
            let list: Vec<Value> = runs.iter().map(|run| to_json(run, used)).collect();
            let pulled: Vec<Value> = pulled.iter().map(pulled_to_json).collect();
            line(json!({"project": project.root, "runs": list, "pulled": pulled}));
            return Ok(ExitCode::SUCCESS);
        }
        if runs.is_empty() {
            let root = project.root.display();
            eprintln!("nothing is adapted in {root} yet: run `elapid adapt`");
        } else {
            print_runs(&runs, used);
        }
        if !pulled.is_empty() {
            let row = |it: &Pulled| [it.name.clone(), bytes(it.n_bytes as f64)];
            let head = ["pulled", "size"].map(String::from);
            print_table(&[head].into_iter().chain(pulled.iter().map(row)).collect::<Vec<_>>());
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

fn pulled_to_json(model: &Pulled) -> Value {
    json!({"name": model.name, "path": model.path, "bytes": model.n_bytes})
}

fn print_runs(runs: &[Adapted], used: Option<u64>) {
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
    print_table(&[head].into_iter().chain(runs.iter().map(row)).collect::<Vec<_>>());
}

/// Rows of cells, in columns as wide as their widest.
fn print_table<const N: usize>(rows: &[[String; N]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        line(cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
