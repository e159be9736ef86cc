//! Nothing leaves the machine: training and serving work where there is no network, and open no
//! socket but those of the machine itself.
//!
//! The first is tried in a network namespace of its own that has loopback and nothing else, the
//! second by a trace of all system calls that name an address.

use crate::common::Scratch;
use crate::common::tiny::{Kind, Tiny};
use crate::common::training::{SMALL, sources};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// System calls that open a socket or name the other side.
const CALLS: &str = "trace=socket,connect,bind,sendto,sendmsg,sendmmsg";

/// Runs what follows in a new network namespace, where only loopback is.
const NO_NETWORK: &str = "ip link set lo up && exec \"$@\"";

/// Trains, then serves the model and asks for one completion. `$1` is what elapid is run by: a
/// tracer with its flags, or nothing.
const SCRIPT: &str = r#"
set -eu
$1 "$2" train src --out run --steps 3 $3
$1 "$2" adapt src --model run --steps 2 --threads 2 || [ $? = 3 ]
$1 "$2" serve model --port 0 --json --threads 2 >said 2>log &
server=$!
trap 'kill $server' EXIT
for _ in $(seq 600); do
    grep -q url said && break
    kill -0 $server
    sleep 0.1
done
port=$(sed -nE 's/.*"url":"http:..127.0.0.1:([0-9]+)".*/\1/p' said)
exec 3<>"/dev/tcp/127.0.0.1/$port"
body='{"prompt": "fn main", "max_tokens": 4, "temperature": 0}'
printf 'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n' >&3
printf 'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body" >&3
cat <&3
"#;

/// A project to train on, and a model to serve.
fn world(name: &str) -> Scratch {
    let dir = Scratch::new(name);
    sources(&dir.0);
    Tiny::new(Kind::Hybrid).write(&dir.0.join("model"));
    dir
}

/// Whether a program is there and does this.
fn can(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    let command = command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The script, started by `first` and with elapid started by `tracer`.
fn run(dir: &Path, first: &[&str], tracer: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_elapid");
    let script = ["bash", "-c", SCRIPT, "bash", tracer, program, SMALL];
    let args: Vec<&str> = first.iter().copied().chain(script).collect();
    let mut command = Command::new(args[0]);
    command.args(&args[1..]).current_dir(dir).stdin(Stdio::null()).output().unwrap()
}

fn check_answer(output: &Output) {
    let [answer, talk] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{talk}{answer}");
    assert!(answer.contains("HTTP/1.1 200") && answer.contains("\"text\":"), "{talk}{answer}");
    assert!(talk.contains("verdict "), "{talk}");
}

/// Lines of a trace that name anything beyond this machine: another family of sockets, another
/// address.
fn strangers(trace: &str) -> Vec<&str> {
    let is_strange = |line: &&str| {
        let families = ["AF_UNIX", "AF_LOCAL", "AF_INET", "AF_INET6"];
        let family = |text: &str| {
            let end = text.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
            families.contains(&&text[..end.unwrap_or(text.len())])
        };
        let opened = line.split_once("socket(").map(|(_, rest)| rest);
        if opened.is_some_and(|rest| !family(rest)) {
            return true;
        }
        let named: Vec<&str> = line.split("sa_family=").skip(1).collect();
        let is_home = |text: &&str| match text {
            text if text.starts_with("AF_INET6") => text.contains("(AF_INET6, \"::1\""),
            text if text.starts_with("AF_INET") => text.contains("inet_addr(\"127."),
            text => family(text),
        };
        !named.iter().all(is_home)
    };
    trace.lines().filter(is_strange).collect()
}

#[test]
fn training_and_serving_need_no_network() {
    if !can("unshare", &["-rn", "ip", "link", "set", "lo", "up"]) {
        return eprintln!("skip: no network namespace can be made here");
    }
    let dir = world("offline-namespace");
    check_answer(&run(&dir.0, &["unshare", "-rn", "sh", "-c", NO_NETWORK, "sh"], ""));
}

#[test]
fn training_and_serving_open_no_socket_but_loopback() {
    if !can("strace", &["-f", "-e", CALLS, "true"]) {
        return eprintln!("skip: strace is not found or may not trace");
    }
    let dir = world("offline-trace");
    let tracer = format!("strace -f -A -o trace -e {CALLS}");
    check_answer(&run(&dir.0, &[], &tracer));
    let trace = std::fs::read_to_string(dir.0.join("trace")).unwrap();
    let found = strangers(&trace);
    assert!(found.is_empty(), "{}", found.join("\n"));
    // Both are in it: the tracer saw the end of one and the socket of the other.
    assert!(trace.contains("+++ exited with 0 +++"), "{trace}");
    let listens = |line: &str| line.contains("bind(") && line.contains("inet_addr(\"127.0.0.1\")");
    assert!(trace.lines().any(listens), "{trace}");
}

#[test]
fn an_attempt_to_reach_another_machine_is_seen() {
    let near = "\
        7  socket(AF_UNIX, SOCK_STREAM|SOCK_CLOEXEC, 0) = 4\n\
        7  connect(4, {sa_family=AF_UNIX, sun_path=\"/run/x\"}, 8) = -1 ENOENT (No such file)\n\
        7  socket(AF_INET, SOCK_STREAM|SOCK_CLOEXEC, IPPROTO_IP) = 3\n\
        7  bind(3, {sa_family=AF_INET, sin_addr=inet_addr(\"127.0.0.1\")}, 16) = 0\n\
        7  connect(4, {sa_family=AF_INET6, sin6_port=htons(80), sin6_flowinfo=htonl(0), \
            inet_pton(AF_INET6, \"::1\", &sin6_addr), sin6_scope_id=0}, 28) = 0\n\
        7  sendto(3, \"x\", 1, MSG_NOSIGNAL, NULL, 0) = 1\n\
        7  <... connect resumed>) = 0\n\
        7  +++ exited with 0 +++\n";
    assert_eq!(strangers(near), Vec::<&str>::new());
    for far in [
        "7  socket(AF_NETLINK, SOCK_RAW|SOCK_CLOEXEC, NETLINK_ROUTE) = 3",
        "7  connect(3, {sa_family=AF_INET, sin_port=htons(80), \
            sin_addr=inet_addr(\"192.0.2.1\")}, 16) = -1 EINPROGRESS (Operation now in progress)",
        "7  connect(3, {sa_family=AF_INET, sin_addr=inet_addr(\"10.127.0.1\")}, <unfinished ...>",
        "7  bind(4, {sa_family=AF_INET, sin_addr=inet_addr(\"0.0.0.0\")}, 16) = 0",
        "7  connect(4, {sa_family=AF_INET6, sin6_port=htons(80), sin6_flowinfo=htonl(0), \
            inet_pton(AF_INET6, \"2001:db8::1\", &sin6_addr), sin6_scope_id=0}, 28) = 0",
        "7  sendto(3, \"x\", 1, 0, {sa_family=AF_INET, sin_port=htons(53), \
            sin_addr=inet_addr(\"192.0.2.1\")}, 16) = 1",
        "7  sendmsg(3, {msg_name={sa_family=AF_INET, sin_port=htons(53), \
            sin_addr=inet_addr(\"192.0.2.1\")}, msg_namelen=16, msg_iovlen=1}, 0) = 1",
        "7  connect(3, {sa_family=AF_VSOCK, svm_cid=0x2}, 16) = 0",
    ] {
        assert_eq!(strangers(&format!("{near}{far}\n")), [far]);
    }
    // A real one; 192.0.2.0/24 is nobody's.
    if !can("strace", &["-f", "-e", CALLS, "true"]) {
        return eprintln!("skip: strace is not found or may not trace");
    }
    let dir = Scratch::new("offline-planted");
    let trace = dir.path("trace");
    let reach = "exec 3<>/dev/tcp/192.0.2.1/80";
    let args = ["-f", "-o", &trace, "-e", CALLS, "timeout", "1", "bash", "-c", reach];
    Command::new("strace").args(args).stderr(Stdio::null()).status().unwrap();
    let trace = std::fs::read_to_string(trace).unwrap();
    assert!(strangers(&trace).iter().any(|line| line.contains("192.0.2.1")), "{trace}");
}
