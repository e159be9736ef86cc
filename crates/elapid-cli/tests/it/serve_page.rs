//! The page of the server in a real browser: Chromium without a window, driven by the DevTools
//! protocol over pipes. Skipped where there is no Chromium.

use crate::common::Scratch;
use crate::common::http::world;
use crate::common::server::Server;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    n_sent: u64,
    /// What the page complained about.
    complaints: Vec<String>,
}

impl Browser {
    /// One with a profile of its own; none where there is no Chromium.
    fn start(dir: &Path) -> Option<Browser> {
        let is_there = |name: &&&str| {
            let found = Command::new(name).arg("--version").output();
            found.is_ok_and(|output| output.status.success())
        };
        let Some(name) = NAMES.iter().find(is_there) else {
            eprintln!("skip: no Chromium on this machine ({})", NAMES.join(", "));
            return None;
        };
        let pipes = ["to", "from"].map(|name| dir.join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().unwrap().success());
        let line = format!(
            "exec {name} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage \
             --no-first-run --user-data-dir={0}/profile --window-size=360,740 \
             --remote-debugging-pipe about:blank 3<{0}/to 4>{0}/from",
            dir.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &line]).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn().unwrap();
        let to = File::options().write(true).open(&pipes[0]).unwrap();
        let from = BufReader::new(File::open(&pipes[1]).unwrap());
        let (session, complaints) = (None, Vec::new());
        let mut browser = Browser { child, to, from, session, n_sent: 0, complaints };
        let target = browser.ask("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.ask("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(String::from);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.ask(domain, json!({}));
        }
        Some(browser)
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.n_sent += 1;
        let mut message = json!({"id": self.n_sent, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).unwrap();
            bytes.pop();
            let message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] == self.n_sent {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            let is_bad = match message["method"].as_str() {
                Some("Log.entryAdded") => message["params"]["entry"]["level"] != "verbose",
                method => method == Some("Runtime.exceptionThrown"),
            };
            if is_bad {
                self.complaints.push(message["params"].to_string());
            }
        }
    }

    /// The value of an expression on the page.
    fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true,
            "allowUnsafeEvalBlockedByCSP": false});
        let done = self.ask("Runtime.evaluate", params);
        assert!(done.get("exceptionDetails").is_none(), "{expression}: {done}");
        done["result"]["value"].clone()
    }

    fn wait_for(&mut self, expression: &str) {
        let begin = Instant::now();
        while self.value(expression) != true {
            let late = begin.elapsed() > Duration::from_secs(60);
            assert!(!late, "{expression}: {}", self.value("document.body.innerText"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn open(&mut self, url: &str) {
        self.ask("Page.navigate", json!({"url": url}));
        self.wait_for("document.readyState === 'complete' && document.title.length > 8");
    }

    fn press_enter(&mut self) {
        for kind in ["keyDown", "keyUp"] {
            let key = json!({"type": kind, "key": "Enter", "code": "Enter", "text": "\r",
                "windowsVirtualKeyCode": 13});
            self.ask("Input.dispatchKeyEvent", key);
        }
    }

    fn say(&mut self, text: &str) {
        self.value("document.getElementById('message').focus()");
        self.ask("Input.insertText", json!({"text": text}));
        self.press_enter();
        self.wait_for("!document.getElementById('send').disabled");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_page_talks_keeps_conversations_and_makes_no_html_of_what_is_said() {
    let (w, dir) = (world("page"), Scratch::new("page-browser"));
    std::fs::create_dir_all(&dir.0).unwrap();
    let Some(mut browser) = Browser::start(&dir.0) else { return };
    let server = Server::start(&w.model, "--max-tokens 24 --context 1024");
    browser.open(&server.url);
    // A model with a template: the page opens on the chat, and fits a small screen.
    let selected = "document.querySelector('[role=tab][aria-selected=true]').textContent";
    browser.wait_for(&format!("{selected} === 'Chat'"));
    assert_eq!(browser.value("document.documentElement.scrollWidth <= innerWidth"), true);
    browser.say("hello <img src=x onerror=alert(1)>");
    assert_eq!(browser.value("document.querySelectorAll('article').length"), 2);
    assert_eq!(browser.value("document.querySelectorAll('img').length"), 0);
    let speed = browser.value("document.querySelector('#status').textContent");
    assert!(speed.as_str().unwrap().contains("tokens/s"), "{speed}");
    browser.say("more");
    assert_eq!(browser.value("document.querySelectorAll('article').length"), 4);
    // Kept over a reload; the first message is edited, and what came after it goes.
    browser.open(&server.url);
    browser.wait_for("document.querySelectorAll('article').length === 4");
    browser.value("document.querySelector('article.user button').click()");
    browser.value("document.getElementById('message').value = ''");
    browser.say("other");
    let texts = browser
        .value("[...document.querySelectorAll('article.user div')].map(it => it.textContent)");
    assert_eq!(texts, json!(["other"]));
    browser.value("document.getElementById('new').click()");
    assert_eq!(browser.value("document.querySelectorAll('article').length"), 0);
    assert_eq!(browser.value("document.querySelectorAll('#talks option').length"), 2);
    // Markdown and code become elements, and nothing else does.
    let text = "# Title\n\n* `a<b>` **bold** [x](javascript:alert(1)) [y](https://y.example)\n\n\
        | a | b |\n|---|---|\n| 1 | <i> |\n\n```rust\nlet s = \"<b>\"; // done\n```\n> quoted";
    let rendered = browser.value(&format!(
        "(() => {{ const it = document.createElement('div'); it.append(...markdown({})); \
         return it.innerHTML; }})()",
        json!(text)
    ));
    let rendered = rendered.as_str().unwrap();
    for part in [
        "<h2>Title</h2>",
        "<code>a&lt;b&gt;</code> <strong>bold</strong> [x](javascript:alert(1)) <a href=\"https",
        "<th>a</th>",
        "<td>&lt;i&gt;</td>",
        "<span class=\"k\">let</span> s = <span class=\"s\">\"&lt;b&gt;\"</span>",
        "<span class=\"c\">// done</span>",
        "<blockquote><p>quoted</p></blockquote>",
    ] {
        assert!(rendered.contains(part), "{part} in {rendered}");
    }
    // Other pages of it, too.
    for (tab, answer) in [("completion", "completed"), ("infill", "filled")] {
        browser.value(&format!("document.getElementById('tab-{tab}').click()"));
        browser.value("document.getElementById('send').click()");
        browser.wait_for("!document.getElementById('send').disabled");
        let answer =
            browser.value(&format!("document.querySelector('#{answer} mark').textContent"));
        assert!(!answer.as_str().unwrap().is_empty());
    }
    // Strict: what is not the page's own does not run.
    let eval = browser.value("(() => { try { return eval('1'); } catch { return 'refused'; } })()");
    assert_eq!(eval, "refused");
    let complaints: Vec<_> = browser.complaints.iter().filter(|it| !it.contains("eval")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}
