//! What a training run leaves behind and says while it goes.
//!
//! | file           | writes                                                            |
//! |----------------|-------------------------------------------------------------------|
//! | `metrics.rs`   | `metrics.jsonl`, one object per line, cut back on resume          |
//! | `samples.rs`   | `samples.jsonl`, what the model wrote before and after            |
//! | `events.rs`    | `events.out.tfevents.*` for TensorBoard                           |
//! | `live.rs`      | lines and the bar on the terminal, or JSON lines                  |
//! | `data.rs`      | `ReportData`: everything the report shows, as plain numbers       |
//! | `html.rs`      | `report.html` from `ReportData`, with `page.css`                  |
//! | `chart.rs`     | curves: fewer points, smoothing, ticks, SVG                       |
//! | `text.rs`      | escaping, and numbers as people write them                        |
//!
//! Not here: the loop that calls these, checkpoints, and what is measured.

mod chart;
pub mod data;
pub mod events;
pub mod html;
pub mod live;
pub mod metrics;
pub mod samples;
mod text;

/// An empty directory of its own for a test.
#[cfg(test)]
fn scratch(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("elapid-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("the directory for temporary files takes one more");
    dir
}
