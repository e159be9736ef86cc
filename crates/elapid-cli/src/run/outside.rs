//! A run as others use it while it is under way, stopped or finished: its model, and how far it is.

use super::checkpoints::Checkpoints;
use super::config::RunConfig;
use super::prepare::{self, Texts};
use super::{finish, read_json, write_json};
use crate::base;
use crate::files;
use crate::report::Done;
use crate::report::data::{Fact, ReportData, Summary};
use crate::report::live::{Live, Moment};
use crate::report::metrics::{self, Record};
use crate::report::{n_threads_default, page};
use elapid::{Device, Method};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The step that `model` or `adapter` of a run was last written at.
const EXPORTED: &str = "exported.json";

/// What `Model::open` takes for a path: the file of `elapid-code`; of a run that is not finished,
/// the model of its newest checkpoint is written first, unless it was.
pub fn usable(path: &Path) -> Done<PathBuf> {
    let path = &*base::resolve(path)?;
    // What has no metrics is no run, though a model may have checkpoints beside it.
    let is_open = path.join("checkpoints").is_dir()
        && path.join(metrics::FILE).is_file()
        && !path.join(finish::SUMMARY).exists();
    if !is_open {
        return Ok(path.into());
    }
    let config = RunConfig::read(path)?;
    let checkpoints = Checkpoints::open(&path.join("checkpoints"), 1)?;
    let saved = checkpoints.newest(&mut |problem| eprintln!("note    {problem}"))?;
    let (step, mark) = (saved.step, path.join(EXPORTED));
    let place = path.join(export_name(&config.method));
    let is_fresh = place.is_dir() && read_json::<u64>(&mark).is_ok_and(|at| at == step);
    if !is_fresh {
        let device = Device::cpu(n_threads_default())?;
        let (mut session, _) =
            prepare::session(&config, prepare::open(&config, Texts::Run(path))?, &device)?;
        session.restore(&saved, 1.0)?;
        session.save(&place)?;
        write_json(&mark, &step)?;
    }
    eprintln!("note    {} is not finished: this is its model of step {step}", path.display());
    Ok(path.into())
}

/// The folder of a run that its result is written to.
pub fn export_name(method: &Method) -> &'static str {
    match method {
        Method::Lora(_) | Method::Bc => "adapter",
        Method::Full | Method::Embeddings => "model",
    }
}

/// What a look at a run found.
pub struct Look {
    pub is_finished: bool,
    /// The report page, fresh.
    pub page: PathBuf,
}

/// Tells what is new in a run since the first `seen` records, and writes its report page.
pub fn look(dir: &Path, seen: &mut usize, live: &mut Live) -> Done<Look> {
    let config = RunConfig::read(dir)?;
    let is_finished = dir.join(finish::SUMMARY).exists();
    let records = metrics::read(dir)?;
    let n_steps = config.settings.end();
    let last = records.iter().map(Record::step).max().unwrap_or(0);
    let n_steps = if n_steps == elapid::Settings::OPEN { last + 1 } else { n_steps };
    // Lines are taken back when a run goes back: then from the start.
    if *seen > records.len() {
        *seen = 0;
    }
    for record in &records[*seen..] {
        match record {
            Record::Step(step) => live.step(&Moment {
                now: Duration::from_secs_f64(step.elapsed_s.max(0.0)),
                step,
                n_steps,
                limit_share: None,
            }),
            Record::Eval(eval) => live.eval(eval, n_steps),
            Record::Note(note) => live.note(note, n_steps),
            Record::Save(save) => live.save(save),
        }
    }
    *seen = records.len();
    let page = dir.join(page::FILE);
    if !is_finished {
        let facts = vec![Fact { name: "method".into(), value: config.method.to_string() }];
        let summary = Summary {
            title: config.source.display().to_string(),
            outcome: format!("under way: step {last}"),
            facts,
            left_out: json!([]),
            config: json!(config),
            ..Summary::default()
        };
        let html = page::html(&ReportData::gather(dir, summary)?)?;
        // The page asks for itself again until the run is finished.
        let html = html.replacen("<head>", "<head><meta http-equiv=\"refresh\" content=\"5\">", 1);
        files::write_bytes(&page, html.as_bytes())?;
    }
    Ok(Look { is_finished, page })
}
