//! `elapid manual`: manual pages and shell completions, for packages.

use crate::files;
use crate::report::{Done, line};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write manual pages and shell completions to a directory.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  elapid manual --out share\n  man share/man/elapid-adapt.1\n  \
    source share/completions/elapid.bash"
)]
pub struct Manual {
    /// Directory for them; those in it are replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Manual {
    pub fn run(&self, mut program: Command) -> Done<ExitCode> {
        let (man, completions) = (self.out.join("man"), self.out.join("completions"));
        files::make_directory(&man)?;
        files::make_directory(&completions)?;
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            let mut bytes = Vec::new();
            clap_complete::generate(shell, &mut program, "elapid", &mut bytes);
            let end = match shell {
                Shell::PowerShell => "ps1".to_string(),
                shell => shell.to_string(),
            };
            files::write_bytes(&completions.join(format!("elapid.{end}")), &bytes)?;
        }
        program.build();
        let n_pages = self.pages(program, "elapid")?;
        line(format!("man     {n_pages} pages in {}", man.display()));
        line(format!("shells  completions in {}", completions.display()));
        Ok(ExitCode::SUCCESS)
    }

    /// The page of a command and those of the commands below it; how many.
    fn pages(&self, command: Command, name: &str) -> Done<usize> {
        let below =
            command.get_subcommands().filter(|it| !it.is_hide_set() && it.get_name() != "help");
        let mut n_pages = 1;
        for command in below.cloned().collect::<Vec<_>>() {
            let name = format!("{name}-{}", command.get_name());
            n_pages += self.pages(command, &name)?;
        }
        let mut bytes = Vec::new();
        let page = Man::new(command.display_name(name).disable_help_subcommand(true)).title(name);
        page.render(&mut bytes).map_err(|source| {
            let path = self.out.clone();
            elapid::Error::Write { path, source }
        })?;
        files::write_bytes(&self.out.join("man").join(format!("{name}.1")), &bytes)?;
        Ok(n_pages)
    }
}
