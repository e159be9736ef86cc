//! Moments of a run or a server at which tests make something happen, by name.
//!
//! `ELAPID_FAIL` is a list of `NAME#N=ACTION`, separated by commas: at the N-th time (from 1) that
//! the moment NAME comes, this happens, once:
//!
//! | action      | what                                                                 |
//! |-------------|----------------------------------------------------------------------|
//! | `panic`     | a panic                                                              |
//! | `kill`      | the process ends as if it was killed                                 |
//! | `oom`       | a GPU is out of memory                                               |
//! | `lost`      | a GPU is lost                                                        |
//! | `wait:PATH` | waits until there is a file PATH; says so on stderr                  |
//!
//! Builds without debug assertions do not look at it.

use elapid::{Error, Result};

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use elapid::hit_failpoint as hit;

struct Point {
    name: String,
    n_left: usize,
    action: String,
}

static POINTS: Mutex<Vec<Point>> = Mutex::new(Vec::new());

/// Reads the variable.
pub fn install() {
    if !cfg!(debug_assertions) {
        return;
    }
    let Ok(text) = std::env::var("ELAPID_FAIL") else { return };
    let points = text.split(',').filter_map(|item| {
        let (moment, action) = item.split_once('=')?;
        let (name, n) = moment.split_once('#').unwrap_or((moment, "1"));
        Some(Point { name: name.into(), n_left: n.parse().ok()?, action: action.into() })
    });
    POINTS.lock().unwrap_or_else(PoisonError::into_inner).extend(points);
    elapid::install_failpoints(act);
}

/// What happens at this moment, if anything does.
fn act(name: &str) -> Result<()> {
    let mut action = None;
    for point in POINTS.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
        if point.name == name && point.n_left > 0 {
            point.n_left -= 1;
            action = action.or((point.n_left == 0).then(|| point.action.clone()));
        }
    }
    let Some(action) = action else { return Ok(()) };
    let (device, problem) = ("a GPU".to_string(), format!("fail point {name}"));
    match action.split_once(':') {
        Some(("wait", path)) => {
            eprintln!("fail point {name}");
            while !Path::new(path).exists() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
        _ => match &action[..] {
            "oom" => Err(Error::OutOfMemory { device, problem }),
            "lost" => Err(Error::DeviceLost { device, problem }),
            "kill" => std::process::abort(),
            _ => panic!("fail point {name}"),
        },
    }
}
