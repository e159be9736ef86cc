//! The groups in which `--help` shows the flags of a training run.

const GROUPS: [(&str, &[&str]); 6] = [
    ("Text", &["data", "eval", "held_out", "keep_secrets", "fim", "spm", "project", "projects"]),
    ("Model", &["model", "init", "method", "preset", "arch", "config", "vocab", "donor"]),
    ("Teacher", &["teacher", "teacher_temperature", "teacher_share", "teacher_tokens"]),
    (
        "Length and memory",
        &[
            "steps",
            "minutes",
            "tokens",
            "epochs",
            "patience",
            "eval_every",
            "save_every",
            "batch",
            "accumulate",
            "context",
            "short_rows",
            "memory",
            "expert_memory",
            "checkpointing",
        ],
    ),
    (
        "Optimizer",
        &[
            "lr",
            "lr_min",
            "warmup",
            "schedule",
            "optimizer",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "clip",
            "trust",
            "spike",
            "seed",
        ],
    ),
    ("Adapter", &["rank", "alpha", "dropout", "rslora", "dora", "targets", "quant"]),
];

/// The flag in its group.
pub fn grouped(arg: clap::Arg) -> clap::Arg {
    let id = arg.get_id().as_str().to_string();
    match GROUPS.iter().find(|(_, names)| names.contains(&&id[..])) {
        Some((heading, _)) => arg.help_heading(*heading),
        None => arg,
    }
}

/// Flags that a run has decided when it is resumed: all but those of its length.
pub fn decided() -> Vec<&'static str> {
    let all = GROUPS.iter().flat_map(|(_, names)| names.iter().copied());
    let is_length = |name: &&str| ["steps", "minutes", "tokens", "epochs"].contains(name);
    all.filter(|name| !is_length(name)).chain(["path", "out"]).collect()
}
