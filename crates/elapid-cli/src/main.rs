//! The one binary `elapid`: commands, files, reports. What models compute is in the engine.

mod base;
mod commands;
mod compute;
mod failpoint;
mod files;
mod hub;
mod lsp;
mod machine;
mod project;
mod proof;
mod ranks;
mod report;
mod run;
mod server;
mod source;
mod talk;

use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::json;
use std::process::ExitCode;

/// Train, fine-tune and serve small language models on your own machine.
#[derive(Parser)]
#[command(name = "elapid", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Adapt(Box<commands::adapt::Adapt>),
    Verify(commands::verify::Verify),
    Train(Box<commands::train::Train>),
    Plan(Box<commands::train::Plan>),
    Watch(commands::watch::Watch),
    Info(commands::info::Info),
    Doctor(commands::doctor::Doctor),
    Convert(commands::convert::Convert),
    Quantize(commands::convert::Quantize),
    Merge(commands::convert::Merge),
    Tokenize(commands::tokenize::Tokenize),
    TrainTokenizer(commands::train_tokenizer::TrainTokenizer),
    Generate(Box<commands::generate::Generate>),
    Chat(Box<commands::chat::Chat>),
    Complete(Box<commands::complete::Complete>),
    Serve(Box<commands::serve::Serve>),
    #[cfg(feature = "pull")]
    Pull(commands::pull::Pull),
    Lsp(Box<commands::lsp::Lsp>),
    List(commands::list::List),
    Rm(commands::rm::Rm),
    Eval(commands::eval::Eval),
    Check(commands::check::Check),
    Bench(commands::bench::Bench),
    Kernels(commands::kernels::Kernels),
    Limbic(Box<commands::limbic::Limbic>),
    #[command(hide = true)]
    Manual(commands::manual::Manual),
}

fn main() -> ExitCode {
    failpoint::install();
    let matches = Cli::command().try_get_matches().unwrap_or_else(|error| {
        if error.use_stderr() && std::env::args_os().any(|arg| arg == "--json") {
            let text = error.render().to_string();
            say_json(text.trim_end().trim_start_matches("error: "), "see --help");
        }
        error.exit()
    });
    let wants_json = wants_json(&matches);
    let command = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command;
    let name = matches.subcommand_name().unwrap_or_default();
    let done = join(&command, name).and_then(|()| perform(command));
    let ranks = ranks::here();
    match done {
        Ok(code) => {
            ranks::leave();
            code
        }
        Err(failure) => {
            if wants_json {
                say_json(&failure.problem, &failure.hint);
            }
            match ranks.is_alone() {
                true => eprintln!("error: {failure}"),
                false => eprintln!("error: rank {}: {failure}", ranks.rank),
            }
            ExitCode::from(1)
        }
    }
}

/// Joins other ranks, for what is shared among them; refuses to learn several times over.
fn join(command: &Command, name: &str) -> report::Done<()> {
    match command {
        Command::Train(_) | Command::Plan(_) | Command::Eval(_) => ranks::join(),
        Command::Adapt(_) | Command::Limbic(_) => ranks::expect_alone(name),
        _ => Ok(()),
    }
}

fn perform(command: Command) -> report::Done<ExitCode> {
    match command {
        Command::Adapt(args) => args.run(),
        Command::Verify(args) => args.run(),
        Command::Train(args) => args.run(),
        Command::Plan(args) => args.run(),
        Command::Info(args) => args.run(),
        Command::Doctor(args) => args.run(),
        Command::Convert(args) => args.run(),
        Command::Quantize(args) => args.run(),
        Command::Merge(args) => args.run(),
        Command::Watch(args) => args.run(),
        Command::Tokenize(args) => args.run(),
        Command::TrainTokenizer(args) => args.run(),
        Command::Generate(args) => args.run(),
        Command::Chat(args) => args.run(),
        Command::Complete(args) => args.run(),
        Command::Serve(args) => args.run(),
        #[cfg(feature = "pull")]
        Command::Pull(args) => args.run(),
        Command::Lsp(args) => args.run(),
        Command::List(args) => args.run(),
        Command::Rm(args) => args.run(),
        Command::Eval(args) => args.run(),
        Command::Check(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Kernels(args) => args.run(),
        Command::Limbic(args) => args.run(),
        Command::Manual(args) => args.run(Cli::command()),
    }
}

/// Whether the command, or the one below it, has the flag.
fn wants_json(matches: &ArgMatches) -> bool {
    matches!(matches.try_get_one("json"), Ok(Some(true)))
        || matches.subcommand().is_some_and(|(_, matches)| wants_json(matches))
}

/// An error among the objects that `--json` asks for.
fn say_json(problem: &str, hint: &str) {
    let mut line = json!({ "kind": "error", "error": problem, "hint": hint });
    let ranks = ranks::here();
    if !ranks.is_alone() {
        line["rank"] = ranks.rank.into();
    }
    report::line(line);
}
