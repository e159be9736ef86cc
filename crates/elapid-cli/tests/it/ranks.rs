//! Several ranks: started by MPI's launcher, and by the variables that torchrun sets.

use crate::common::Scratch;
use crate::common::tiny::{Kind, Tiny, lines};
use crate::common::training::{elapid, losses, model, ok, stderr};
use serde_json::Value;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Open MPI's launcher, if it is there.
fn mpirun() -> Option<Command> {
    let is_open_mpi = |name: &&str| {
        let said = Command::new(name).arg("--version").output().ok();
        said.is_some_and(|it| String::from_utf8_lossy(&it.stdout).contains("Open MPI"))
    };
    let Some(name) = ["mpirun.openmpi", "mpirun"].into_iter().find(is_open_mpi) else {
        eprintln!("skip: no mpirun of Open MPI is found");
        return None;
    };
    let mut command = Command::new(name);
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    Some(command)
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

const FLAGS: &str = "--model tiny --method full --context 24 --batch 4 --eval-every 10 \
                     --save-every 5 --threads 1 --steps 20 --device cpu";

fn begin<'a>(out: &'a str, more: &'a str) -> Vec<&'a str> {
    let head = ["train", "src", "--out", out];
    head.into_iter().chain(FLAGS.split_whitespace()).chain(more.split_whitespace()).collect()
}

/// Ranks that meet by TCP; each has variables of its own besides.
fn by_variables(args: &[&str], dir: &Path, each: &[&[(&str, &str)]]) -> Vec<Child> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |(rank, own): (usize, &&[(&str, &str)])| {
        let mut command = elapid(args, dir);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", each.len().to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.envs(own.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    each.iter().enumerate().map(start).collect()
}

fn ends(ranks: Vec<Child>) -> Vec<Output> {
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

fn all_fine(ranks: Vec<Child>) {
    for (rank, output) in ends(ranks).iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", stderr(output));
        let is_quiet = output.stdout.is_empty() && output.stderr.is_empty();
        assert_eq!(is_quiet, rank > 0, "rank {rank} says: {}", stderr(output));
    }
}

#[test]
fn two_ranks_by_mpi_make_the_steps_of_one_and_the_same_bits_every_time() {
    for kind in [Kind::Attention, Kind::Mamba, Kind::Hybrid, Kind::Experts] {
        let dir = world("ranks-mpi", kind);
        let by_mpi = |out: &str| {
            let mut command = mpirun()?;
            command.args(["-n", "2", env!("CARGO_BIN_EXE_elapid")]).args(begin(out, ""));
            let output = command.current_dir(&dir.0).stdin(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "{}", stderr(&output));
            let said = stderr(&output);
            assert!(said.contains("rank 1: moments"), "{said}");
            Some(())
        };
        if by_mpi("two").is_none() || by_mpi("again").is_none() {
            return;
        }
        ok(&begin("passes", "--accumulate 2"), &dir.0);
        ok(&begin("one", ""), &dir.0);
        let of = |name: &str| losses(&dir.0.join(name));
        assert_eq!(of("two").len(), 20);
        // As two passes of one rank, to the bit; as one pass of it, nearly.
        assert!(of("two") == of("passes") && of("two") == of("again"));
        // The load balance of experts is a mean over each pass: there two passes are not one.
        let both = of("two").into_iter().zip(of("one")).filter(|_| kind != Kind::Experts);
        for ((step, two), (_, one)) in both {
            let [two, one] = [two, one].map(|loss| loss.parse::<f64>().unwrap());
            assert!((two - one).abs() < 1e-5, "{kind:?} step {step}: {two}, not {one}");
        }
        assert!(model(&dir.0.join("two")) == model(&dir.0.join("passes")));
    }
}

#[test]
fn ranks_by_variables_resume_with_other_numbers_of_ranks() {
    let dir = world("ranks-tcp", Kind::Hybrid);
    let none: &[(&str, &str)] = &[];
    all_fine(by_variables(&begin("four", ""), &dir.0, &[none; 4]));
    ok(&begin("passes", "--accumulate 4"), &dir.0);
    assert!(losses(&dir.0.join("four")) == losses(&dir.0.join("passes")));
    assert!(model(&dir.0.join("four")) == model(&dir.0.join("passes")));
    // Killed in the middle: the others end by themselves, and name it.
    for (at, resume_with) in [("7", 4), ("12", 2), ("17", 1)] {
        let out = format!("killed-{resume_with}");
        let fail = format!("train.step#{at}=kill");
        let killed: &[(&str, &str)] = &[("ELAPID_FAIL", &fail)];
        let ended = ends(by_variables(&begin(&out, ""), &dir.0, &[none, none, none, killed]));
        let said: Vec<String> = ended.iter().map(stderr).collect();
        assert!(ended.iter().all(|output| !output.status.success()), "{said:?}");
        assert!(said[..3].iter().all(|said| said.contains("has ended")), "{said:?}");
        // Whoever is told late may see the end of another that was told before.
        assert!(said[..3].iter().any(|said| said.contains("rank 3 has ended")), "{said:?}");
        let args = ["train", "--resume", &out, "--threads", "1"];
        all_fine(by_variables(&args, &dir.0, &vec![none; resume_with]));
        let (got, want) = (losses(&dir.0.join(&out)), losses(&dir.0.join("four")));
        assert_eq!(got.len(), 20);
        for ((step, got), (_, want)) in got.into_iter().zip(want) {
            let [x, y] = [&got, &want].map(|loss| loss.parse::<f64>().unwrap());
            assert!((x - y).abs() < 1e-5, "{resume_with} ranks, step {step}: {got}, not {want}");
            assert!(resume_with != 4 || got == want, "step {step}: {got}, not {want}");
        }
    }
}

#[test]
fn a_rank_that_hangs_is_noticed_and_ranks_that_differ_are_refused() {
    let dir = world("ranks-faults", Kind::Attention);
    let none: &[(&str, &str)] = &[("ELAPID_RANK_TIMEOUT", "2")];
    let never = format!("train.step#3=wait:{}", dir.path("never"));
    let hangs: &[(&str, &str)] = &[("ELAPID_FAIL", &never), none[0]];
    let mut ranks = by_variables(&begin("hung", ""), &dir.0, &[none, hangs]);
    let first = ranks.remove(0).wait_with_output().unwrap();
    assert!(!first.status.success());
    assert!(stderr(&first).contains("no answer from rank 1 for 2 s"), "{}", stderr(&first));
    std::fs::write(dir.path("never"), "").unwrap();
    assert!(!ends(ranks)[0].status.success());
    // Other flags on one rank.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize, more: &str| {
        let mut command = elapid(&begin("other", more), &dir.0);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for output in ends(vec![start(0, "--seed 1"), start(1, "--seed 2")]) {
        let said = stderr(&output);
        assert!(!output.status.success() && said.contains("rank 1 runs `elapid train"), "{said}");
    }
    assert!(!dir.0.join("other").exists());
    // A batch that cannot be divided, and work that is not shared.
    let three = ends(by_variables(&begin("three", ""), &dir.0, &[none; 3]));
    assert!(stderr(&three[0]).contains("cannot be divided among 3 ranks"), "{}", stderr(&three[0]));
    let adapt = ends(by_variables(&["adapt"], &dir.0, &[none; 2]));
    assert!(stderr(&adapt[1]).contains("does not share its work"), "{}", stderr(&adapt[1]));
}

#[test]
fn a_measurement_is_shared_out_and_says_the_same() {
    let dir = world("ranks-eval", Kind::Mamba);
    let args = ["eval", "tiny", "src", "--json", "--threads", "1", "--device", "cpu"];
    let alone: Value = serde_json::from_slice(&ok(&args, &dir.0).stdout).unwrap();
    let none: &[(&str, &str)] = &[];
    let ranks = ends(by_variables(&args, &dir.0, &[none; 3]));
    assert!(ranks.iter().all(|rank| rank.status.success()), "{}", stderr(&ranks[1]));
    assert!(ranks[1].stdout.is_empty() && ranks[2].stdout.is_empty());
    let shared: Value = serde_json::from_slice(&ranks[0].stdout).unwrap();
    let names = |value: &Value| -> Vec<Value> {
        value["files"].as_array().unwrap().iter().map(|file| file["name"].clone()).collect()
    };
    assert_eq!(names(&shared), names(&alone));
    for key in ["n_tok", "n_bytes", "n_files"] {
        assert_eq!(shared[key], alone[key]);
    }
    let [x, y] = [&shared, &alone].map(|it| it["loss"].as_f64().unwrap());
    assert!((x - y).abs() < 1e-6, "{x}, not {y}");
}

#[test]
fn two_ranks_share_an_emulated_gpu_by_messages_and_through_the_host() {
    if elapid::Device::by_name("cuda", elapid::Precision::F32, 1).is_err() {
        eprintln!("skip: no cuda is found");
        return;
    }
    let dir = world("ranks-cuda", Kind::Attention);
    let flags = "--model tiny --method full --context 24 --batch 2 --threads 1 --steps 4 \
                 --device cuda --precision f32";
    let args = |out, more| -> Vec<&str> {
        let head = ["train", "src", "--out", out];
        head.into_iter().chain(flags.split_whitespace()).chain(more).collect()
    };
    let run = |out, env: &[(&str, &str)]| {
        all_fine(by_variables(&args(out, vec![]), &dir.0, &[env, env]));
    };
    run("nccl", &[]);
    run("host", &[("ELAPID_EMULATOR_NCCL", "refuse")]);
    ok(&args("passes", vec!["--accumulate", "2"]), &dir.0);
    let of = |name: &str| losses(&dir.0.join(name));
    assert_eq!(of("nccl").len(), 4);
    assert!(of("nccl") == of("host") && of("nccl") == of("passes"), "{:?}", of("nccl"));
}
