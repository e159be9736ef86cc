//! The one binary `elapid`: commands, files, reports. What models compute is in the engine.

mod commands;
mod compute;
mod failpoint;
mod files;
mod machine;
mod report;
mod run;
mod server;
mod source;
mod talk;

use clap::{Parser, Subcommand};
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
    Train(Box<commands::train::Train>),
    Plan(Box<commands::train::Plan>),
    Watch(commands::watch::Watch),
    Info(commands::info::Info),
    Convert(commands::convert::Convert),
    Quantize(commands::convert::Quantize),
    Merge(commands::convert::Merge),
    Tokenize(commands::tokenize::Tokenize),
    TrainTokenizer(commands::train_tokenizer::TrainTokenizer),
    Generate(Box<commands::generate::Generate>),
    Chat(Box<commands::chat::Chat>),
    Serve(Box<commands::serve::Serve>),
    Eval(commands::eval::Eval),
    Check(commands::check::Check),
    Bench(commands::bench::Bench),
}

fn main() -> ExitCode {
    failpoint::install();
    let done = match Cli::parse().command {
        Command::Train(args) => args.run(),
        Command::Plan(args) => args.run(),
        Command::Info(args) => args.run(),
        Command::Convert(args) => args.run(),
        Command::Quantize(args) => args.run(),
        Command::Merge(args) => args.run(),
        Command::Watch(args) => args.run(),
        Command::Tokenize(args) => args.run(),
        Command::TrainTokenizer(args) => args.run(),
        Command::Generate(args) => args.run(),
        Command::Chat(args) => args.run(),
        Command::Serve(args) => args.run(),
        Command::Eval(args) => args.run(),
        Command::Check(args) => args.run(),
        Command::Bench(args) => args.run(),
    };
    match done {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(1)
        }
    }
}
