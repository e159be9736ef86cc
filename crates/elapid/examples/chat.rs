//! Chat by the template of a model: `cargo run --release --example chat Instruct.gguf`.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Device, Message, Result, Session};
use serde_json::json;

/// For a model that comes without a template.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
    {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

fn message(role: &str, content: &str) -> Message {
    Message::from_iter([("role".into(), json!(role)), ("content".into(), json!(content))])
}

/// Runs it.
pub fn main() -> Result<()> {
    let path = std::env::args().nth(1).filter(|path| std::path::Path::new(path).exists());
    let mut session = match path {
        Some(path) => Session::open(path, &Device::cpu(2)?)?,
        None => {
            // A directory with a chat_template.jinja can chat.
            let dir = tiny::folder("chat");
            tiny::session(10)?.save(&dir)?;
            elapid::write(&dir.join("chat_template.jinja"), |sink| sink(TEMPLATE.as_bytes()))?;
            Session::open(&dir, &Device::cpu(2)?)?
        }
    };
    let mut messages = vec![message("user", "What does add do?")];
    for question in ["And sub?", "Thank you."] {
        let request = session.chat(&messages)?.max_tokens(24);
        let answer = session.tokens(request)?.text()?;
        println!("> {answer}");
        messages.extend([message("assistant", &answer), message("user", question)]);
    }
    Ok(())
}
