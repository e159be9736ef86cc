//! Runs every example, in one program.

#![allow(clippy::unwrap_used)] // a test may panic
#![allow(clippy::duplicate_mod)] // each example has the tiny model of its own
#![allow(dead_code)] // and need not use all of it

#[path = "../examples/chat.rs"]
mod chat;
#[path = "../examples/compare.rs"]
mod compare;
#[path = "../examples/convert.rs"]
mod convert;
#[path = "../examples/embed.rs"]
mod embed;
#[path = "../examples/generate.rs"]
mod generate;
#[path = "../examples/limbic.rs"]
mod limbic;
#[path = "../examples/lora.rs"]
mod lora;
#[path = "../examples/stream.rs"]
mod stream;
#[path = "../examples/teacher.rs"]
mod teacher;
#[path = "../examples/train.rs"]
mod train;

#[test]
fn open_and_generate() {
    generate::main().unwrap();
}

#[test]
fn stream_and_fork() {
    stream::main().unwrap();
}

#[test]
fn chat_by_a_template() {
    chat::main().unwrap();
}

#[test]
fn train_from_scratch_and_resume_to_the_bit() {
    train::main().unwrap();
}

#[test]
fn learn_from_a_teacher() {
    teacher::main().unwrap();
}

#[test]
fn adapt_with_lora() {
    lora::main().unwrap();
}

#[test]
fn a_state_moved_by_a_trained_head() {
    limbic::main().unwrap();
}

#[test]
fn compare_two_models() {
    compare::main().unwrap();
}

#[test]
fn embeddings_and_nearest_neighbours() {
    embed::main().unwrap();
}

#[test]
fn convert_and_quantise() {
    convert::main().unwrap();
}

/// A list that forgets one would be green.
#[test]
fn every_example_is_run() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let n = std::fs::read_dir(dir).unwrap().filter(|entry| {
        entry.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "rs")
    });
    assert_eq!(n.count(), 10);
}
