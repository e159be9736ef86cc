//! The real binary on GPUs: runs that are killed and resumed, runs that continue
//! elsewhere, and text. What is not found is passed over; `ELAPID_REQUIRE` in the engine's
//! `it/devices.rs` says what must be.

use crate::common::Scratch;
use crate::common::tiny::{Kind, Tiny, lines};
use crate::common::training::{elapid, losses, model, ok};
use elapid::{Device, Precision};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// Steps of a run.
const N_STEPS: u64 = 12;

fn is_there(device: &str) -> bool {
    let is_there = Device::by_name(device, Precision::F32, 1).is_ok();
    if !is_there {
        eprintln!("skip: no {device} is found");
    }
    is_there
}

/// A model and a text to learn.
fn world(name: &str, kind: Kind) -> Scratch {
    let dir = Scratch::new(name);
    Tiny::new(kind).write(&dir.0.join("tiny"));
    let src = dir.0.join("src");
    std::fs::create_dir_all(&src).unwrap();
    for n in 0..10 {
        std::fs::write(src.join(format!("part_{n}.rs")), lines(16, n).join("\n")).unwrap();
    }
    dir
}

/// Flags of a run from its beginning.
fn begin<'a>(out: &'a str, device: &'a str) -> Vec<&'a str> {
    let flags = "--model tiny --method full --steps 12 --save-every 3 --eval-every 6 --context 24 \
                 --batch 2 --precision f32 --threads 1";
    let head = ["train", "src", "--out", out, "--device", device];
    head.into_iter().chain(flags.split_whitespace()).collect()
}

fn resume<'a>(out: &'a str, device: &'a str) -> Vec<&'a str> {
    let head = ["train", "--resume", out, "--device", device];
    head.into_iter().chain(["--precision", "f32", "--threads", "1"]).collect()
}

fn n_steps(run: &Path) -> u64 {
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    metrics.matches("\"kind\":\"step\"").count() as u64
}

/// Begins a run and kills it once it has made so many steps; whether that was before its end.
fn kill_at(step: u64, args: &[&str], dir: &Path, run: &Path) -> bool {
    let errors = std::fs::File::create(dir.join("errors")).unwrap();
    let mut command = elapid(args, dir);
    let mut child = command.stdout(Stdio::null()).stderr(errors).spawn().unwrap();
    while n_steps(run) < step {
        if let Some(status) = child.try_wait().unwrap() {
            let errors = std::fs::read_to_string(dir.join("errors")).unwrap();
            panic!("{args:?} ended with {status} before step {step}: {errors}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    n_steps(run) < N_STEPS
}

/// Begins a run and kills it in the middle.
fn begin_and_kill(out: &str, device: &str, dir: &Path) {
    let run = dir.join(out);
    // A fast one may come to its end before it is killed.
    while !kill_at(5, &begin(out, device), dir, &run) {
        std::fs::remove_dir_all(&run).unwrap();
    }
}

fn killed_goes_on_to_the_bit(device: &str) {
    if !is_there(device) {
        return;
    }
    let dir = world(&format!("train-kill-{device}"), Kind::Hybrid);
    let (whole, killed) = (dir.0.join("whole"), dir.0.join("killed"));
    ok(&begin("whole", device), &dir.0);
    begin_and_kill("killed", device, &dir.0);
    // Nothing says where: it resumes where it started.
    ok(&["train", "--resume", "killed"], &dir.0);
    assert_eq!(losses(&killed).len() as u64, N_STEPS);
    assert_eq!(losses(&killed), losses(&whole), "{device}");
    assert!(model(&killed) == model(&whole), "{device}: the models differ");
}

#[test]
fn a_run_killed_on_wgpu_goes_on_to_the_bit() {
    killed_goes_on_to_the_bit("wgpu");
}

#[test]
fn a_run_killed_on_cuda_goes_on_to_the_bit() {
    killed_goes_on_to_the_bit("cuda");
}

#[test]
fn a_run_whose_device_is_gone_says_so() {
    let dir = world("train-gone", Kind::Hybrid);
    ok(&begin("run", "cpu"), &dir.0);
    let path = dir.0.join("run/config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let moved = config.replace("\"device\": \"cpu\"", "\"device\": \"cuda:99\"");
    assert_ne!(config, moved);
    std::fs::write(&path, moved).unwrap();
    let output = elapid(&["train", "--resume", "run"], &dir.0).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("started on `cuda:99`"), "{errors}");
    ok(&["train", "--resume", "run", "--device", "cpu"], &dir.0);
}

fn goes_on_elsewhere(device: &str) {
    if !is_there(device) {
        return;
    }
    let dir = world(&format!("train-move-{device}"), Kind::Hybrid);
    ok(&begin("whole", "cpu"), &dir.0);
    let number = |(step, loss): &(u64, String)| (*step, loss.parse::<f64>().unwrap());
    let curve = |run: &str| losses(&dir.0.join(run)).iter().map(number).collect::<Vec<_>>();
    let want = curve("whole");
    for (run, from, to) in [("there", "cpu", device), ("back", device, "cpu")] {
        begin_and_kill(run, from, &dir.0);
        ok(&resume(run, to), &dir.0);
        let got = curve(run);
        assert_eq!(got.len(), want.len(), "{from} to {to}");
        for ((step, want), (at, got)) in want.iter().zip(&got) {
            assert_eq!(step, at, "{from} to {to}");
            let off = (got - want).abs() / want;
            assert!(off <= 1e-3, "{from} to {to}, step {step}: a loss of {got}, not {want}");
        }
    }
}

#[test]
fn a_run_goes_on_between_wgpu_and_the_processor() {
    goes_on_elsewhere("wgpu");
}

#[test]
fn a_run_goes_on_between_cuda_and_the_processor() {
    goes_on_elsewhere("cuda");
}

#[test]
fn text_is_the_same_on_every_device() {
    for kind in Kind::ALL {
        let dir = world(&format!("generate-device-{kind:?}"), kind);
        let prompt = lines(4, 5).join("\n");
        let ids = |device: &str| -> Value {
            let flags = "-n 12 --temperature 0 --json --precision f32 --threads 1 --device";
            let head = ["generate", "tiny", "-p", &prompt];
            let args: Vec<&str> = head.into_iter().chain(flags.split(' ')).collect();
            let output = ok(&[&args[..], &[device]].concat(), &dir.0);
            serde_json::from_slice::<Value>(&output.stdout).unwrap()["ids"].take()
        };
        let want = ids("cpu");
        assert_eq!(want.as_array().unwrap().len(), 12);
        for device in ["wgpu", "cuda"].into_iter().filter(|device| is_there(device)) {
            assert_eq!(ids(device), want, "{kind:?} on {device}");
        }
    }
}
