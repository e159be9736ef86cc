//! Manual pages and shell completions.

use crate::common::{Scratch, elapid};

#[test]
fn every_command_has_a_manual_page_and_shells_complete_it() {
    let dir = Scratch::new("manual");
    assert!(elapid(&["manual", "--out", &dir.path("share")]).status.success());
    let read = |name: &str| std::fs::read_to_string(dir.0.join("share").join(name)).unwrap();
    let help = String::from_utf8(elapid(&["--help"]).stdout).unwrap();
    assert!(!help.contains("manual"), "it is for those who make packages");
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = commands.lines().filter_map(|line| line.split_whitespace().next());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let page = read(&format!("man/elapid-{name}.1"));
        assert!(page.starts_with(".ie") && page.contains(".SH SYNOPSIS"), "{name}: {page}");
        for shell in ["bash", "zsh", "fish", "elvish", "ps1"] {
            assert!(read(&format!("completions/elapid.{shell}")).contains(name), "{shell} {name}");
        }
    }
    assert!(read("man/elapid-limbic-train.1").contains("elapid"));
}
