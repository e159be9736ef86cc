//! JSONL: one record to a line, in one of four forms.
//!
//! | record                                            | learned                              |
//! |---------------------------------------------------|--------------------------------------|
//! | `{"text": ".."}`                                  | all of it                            |
//! | `{"prompt": "..", "completion": ".."}`            | the completion                       |
//! | `{"messages": [{"role": "..", "content": ".."}]}` | what the assistant says, and its end |
//! | `{"parts": [{"text": "..", "scored": true}]}`     | the parts that are scored            |
//!
//! Other keys are left alone, but `tools`, which a chat template may show. Blank lines are skipped.
//!
//! Messages are rendered by the model's chat template, or as ChatML where there is none. What the
//! assistant says is found by rendering twice, for the i-th message
//!
//! ```text
//! before = render(messages 0 to i-1, with the prompt to begin)
//! after  = render(messages 0 to i)
//! ```
//!
//! and taking what `after` has beyond `before`: just what the model would have to write. A template
//! that changes earlier text when more follows (some take out thoughts of earlier turns) does not
//! have this property; such a record is an error, since no single text shows all its turns.
//!
//! Not here: reading files; tokens.

use super::{Document, Part};
use crate::error::{Error, Result};
use crate::text::chat::{ChatOptions, ChatTemplate, Message};
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// A part of a record, as `elapid adapt` stores held-out text.
#[derive(serde::Deserialize)]
struct Scored {
    text: String,
    scored: bool,
}

/// How conversations are rendered.
#[derive(Debug, Clone, Copy)]
pub struct ChatStyle<'a> {
    /// The model's template; ChatML where it has none.
    pub template: Option<&'a ChatTemplate>,
    /// What the template is given besides messages and tools.
    pub options: &'a ChatOptions,
}

const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
    {% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const HINT: &str = "a line is {\"text\": ..}, {\"prompt\": .., \"completion\": ..}, \
                    {\"messages\": [{\"role\": .., \"content\": ..}]} or \
                    {\"parts\": [{\"text\": .., \"scored\": ..}]}";

/// Reads a line; `name` is that of the document, `file.jsonl:12`, for errors too. None where the
/// line is blank.
pub fn record(name: &str, line: &[u8], style: ChatStyle<'_>) -> Result<Option<Document>> {
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let record: Value = serde_json::from_slice(line).map_err(|error| {
        // serde_json counts from the first line of what it is given, which is always 1.
        let words = error.to_string().replace(" at line 1 column ", ", at column ");
        Error::format(name, format!("this line is not JSON: {words}"), HINT)
    })?;
    match record {
        Value::Object(record) => style.document(name.into(), record).map(Some),
        other => {
            let problem = format!("this line is {}, not an object", kind(&other));
            Err(Error::format(name, problem, HINT))
        }
    }
}

/// What stands in for a template.
static PLAIN: LazyLock<ChatTemplate> = LazyLock::new(|| {
    ChatTemplate::new("the plain chat template", CHATML).expect("this template is ours and parses")
});

impl ChatStyle<'_> {
    fn document(&self, name: String, mut record: Map<String, Value>) -> Result<Document> {
        let has = |key: &str| record.contains_key(key);
        let has_pair = has("prompt") && has("completion");
        let forms = [has("text"), has_pair, has("messages"), has("parts")];
        let part = |text: String, learned: bool| -> Part { Part { text, learned, special: false } };
        let (language, parts) = match forms {
            [true, false, false, false] => {
                ("text", vec![part(string(&name, &mut record, "text")?, true)])
            }
            [false, true, false, false] => {
                let prompt = string(&name, &mut record, "prompt")?;
                let completion = string(&name, &mut record, "completion")?;
                ("text", vec![part(prompt, false), part(completion, true)])
            }
            [false, false, true, false] => ("chat", self.conversation(&name, record)?),
            [false, false, false, true] => {
                let list: Vec<Scored> = serde_json::from_value(record["parts"].take())
                    .map_err(|error| Error::format(&name, format!("`parts`: {error}"), HINT))?;
                ("text", list.into_iter().map(|it| part(it.text, it.scored)).collect())
            }
            [false, false, false, false] => {
                let problem = match (has("prompt"), has("completion")) {
                    (true, _) => "`completion` is missing beside `prompt`".to_string(),
                    (_, true) => "`prompt` is missing beside `completion`".to_string(),
                    _ => format!("none of the known keys is there, only {}", keys(&record)),
                };
                return Err(Error::format(&name, problem, HINT));
            }
            _ => {
                let problem = format!("more than one form in a record: {}", keys(&record));
                return Err(Error::format(&name, problem, "keep one of the forms"));
            }
        };
        if !parts.iter().any(|part| part.learned && !part.text.is_empty()) {
            let problem = "there is nothing to learn in it: the learned text is empty";
            return Err(Error::format(&name, problem, "fill it, or take the line out"));
        }
        Ok(Document { name, language, parts })
    }

    /// The parts of a conversation.
    fn conversation(&self, name: &str, mut record: Map<String, Value>) -> Result<Vec<Part>> {
        let messages = messages(name, record.remove("messages").unwrap_or_default())?;
        let mut options = self.options.clone();
        options.tools = record.remove("tools").or(options.tools);
        let mut render = |n: usize, add_generation_prompt: bool| {
            options.add_generation_prompt = add_generation_prompt;
            let text = self.template.unwrap_or(&PLAIN).render(&messages[..n], &options);
            text.map_err(|error| in_line(name, n, error))
        };
        let whole = render(messages.len(), false)?;
        let mut parts = Vec::new();
        let mut n_done = 0;
        let part = |text: &str, learned| Part { text: text.into(), learned, special: true };
        for idx in (0..messages.len()).filter(|idx| messages[*idx]["role"] == "assistant") {
            let (before, after) = (render(idx, true)?, render(idx + 1, false)?);
            if !whole.starts_with(&after) {
                let problem = format!(
                    "`messages[{idx}]`: the chat template changes earlier text when more follows, \
                     so that no text shows all that the assistant says"
                );
                let hint = "let the conversation end with its first answer, make a record of each \
                            answer, or give a template that keeps all turns as they are";
                return Err(Error::format(name, problem, hint));
            }
            if !after.starts_with(&before) || before.len() < n_done {
                let problem = format!(
                    "`messages[{idx}]`: the chat template asks for an answer with words that this \
                     answer does not begin with"
                );
                let hint = "put them into `content` (thoughts, mostly), or give a template that \
                            does not ask for them";
                return Err(Error::format(name, problem, hint));
            }
            parts.push(part(&whole[n_done..before.len()], false));
            parts.push(part(&whole[before.len()..after.len()], true));
            n_done = after.len();
        }
        if parts.is_empty() {
            let problem = "`messages`: none is of the role assistant, so nothing is learned";
            return Err(Error::format(name, problem, "add what the assistant is to say"));
        }
        parts.push(part(&whole[n_done..], false));
        parts.retain(|part| !part.text.is_empty());
        Ok(parts)
    }
}

/// An error of the template, with the line it was about.
fn in_line(name: &str, n: usize, error: Error) -> Error {
    let said = match &error {
        Error::Input { problem, .. } | Error::Format { problem, .. } => problem.clone(),
        other => other.to_string(),
    };
    let problem = format!("the first {n} of `messages` cannot be rendered: {said}");
    Error::format(name, problem, "change roles, order or contents to what the template takes")
}

/// Checks the messages, which may hold more than is looked at here.
fn messages(name: &str, value: Value) -> Result<Vec<Message>> {
    let Value::Array(list) = value else {
        let problem = format!("`messages` is {}, not a list", kind(&value));
        return Err(Error::format(name, problem, HINT));
    };
    let check = |(idx, value): (usize, Value)| {
        let wrong =
            |problem: String| Err(Error::format(name, format!("`messages[{idx}]`{problem}"), HINT));
        let Value::Object(message) = value else {
            return wrong(format!(" is {}, not an object", kind(&value)));
        };
        match message.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => return wrong(format!(": `role` is {}, not a text", kind(other))),
            None => return wrong(format!(": `role` is missing, there is only {}", keys(&message))),
        }
        match message.get("content") {
            Some(Value::String(_) | Value::Array(_)) => {}
            // A call of a tool needs no words.
            None | Some(Value::Null) if message.contains_key("tool_calls") => {}
            Some(other) => return wrong(format!(": `content` is {}, not a text", kind(other))),
            None => return wrong(": `content` is missing".to_string()),
        }
        Ok(message)
    };
    list.into_iter().enumerate().map(check).collect()
}

/// Takes a text out of a record.
fn string(name: &str, record: &mut Map<String, Value>, key: &str) -> Result<String> {
    match record.remove(key).unwrap_or_default() {
        Value::String(text) => Ok(text),
        other => {
            let problem = format!("`{key}` is {}, not a text", kind(&other));
            Err(Error::format(name, problem, HINT))
        }
    }
}

fn keys(record: &Map<String, Value>) -> String {
    let list: Vec<String> = record.keys().take(8).map(|key| format!("`{key}`")).collect();
    if list.is_empty() { "nothing".to_string() } else { list.join(", ") }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(file: &str, bytes: &[u8], style: ChatStyle<'_>) -> Result<Vec<Document>> {
        let lines = bytes.split(|byte| *byte == b'\n').enumerate();
        let read = |(idx, line)| record(&format!("{file}:{}", idx + 1), line, style).transpose();
        lines.filter_map(read).collect()
    }

    fn read(text: &str) -> Result<Vec<Document>> {
        let options = ChatOptions::default();
        documents("d.jsonl", text.as_bytes(), ChatStyle { template: None, options: &options })
    }

    fn with_template(source: &str, text: &str) -> Result<Vec<Document>> {
        let template = ChatTemplate::new("chat_template.jinja", source).unwrap();
        let options = ChatOptions::default();
        let style = ChatStyle { template: Some(&template), options: &options };
        documents("d.jsonl", text.as_bytes(), style)
    }

    /// (text, learned) of each part.
    fn parts(document: &Document) -> Vec<(&str, bool)> {
        document.parts.iter().map(|part| (part.text.as_str(), part.learned)).collect()
    }

    #[test]
    fn texts_and_completions_are_learned_and_prompts_are_read() {
        let list = read(
            "\u{feff}{\"text\": \"one\\n\", \"id\": 1}\n\n  \r\n\
             {\"completion\": \"yes\", \"prompt\": \"no?\"}\r\n",
        )
        .unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!((list[0].name.as_str(), list[1].name.as_str()), ("d.jsonl:1", "d.jsonl:4"));
        assert_eq!(parts(&list[0]), [("one\n", true)]);
        assert_eq!(parts(&list[1]), [("no?", false), ("yes", true)]);
        assert!(list.iter().all(|document| document.parts.iter().all(|part| !part.special)));
        assert_eq!(read("\n").unwrap(), []);
    }

    #[test]
    fn of_parts_those_that_are_scored_are_learned_and_wrong_ones_are_refused() {
        let line = r#"{"file": "a.rs", "parts": [{"text": "old\n", "scored": false},
            {"text": "new\n", "scored": true}]}"#;
        let list = read(&line.replace('\n', " ")).unwrap();
        assert_eq!(parts(&list[0]), [("old\n", false), ("new\n", true)]);
        for (line, word) in [
            (r#"{"parts": 3}"#, "`parts`: invalid type"),
            (r#"{"parts": [{"text": "a"}]}"#, "missing field `scored`"),
            (r#"{"parts": [{"text": "a", "scored": false}]}"#, "nothing to learn"),
            (r#"{"text": "a", "parts": []}"#, "more than one form"),
        ] {
            let error = read(line).unwrap_err().to_string();
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    const TALK: &str = r#"{"messages": [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Bye"}]}"#;

    #[test]
    fn of_a_conversation_only_the_answers_and_their_ends_are_learned() {
        let list = read(&TALK.replace('\n', " ")).unwrap();
        assert_eq!(
            parts(&list[0]),
            [
                (
                    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n\
                     <|im_start|>assistant\n",
                    false
                ),
                ("2<|im_end|>\n", true),
                ("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", false),
                ("Yes.<|im_end|>\n", true),
                ("<|im_start|>user\nBye<|im_end|>\n", false),
            ]
        );
        assert!(list[0].parts.iter().all(|part| part.special));
        assert_eq!(list[0].language, "chat");
    }

    #[test]
    fn the_models_own_template_renders_and_one_that_rewrites_the_past_is_refused() {
        let own = "{{ tools | length if tools else 0 }}{% for m in messages %}[{{ m.role }}] \
                   {{ m.content | trim }}</s>{% endfor %}\
                   {% if add_generation_prompt %}[assistant] {% endif %}";
        let line = r#"{"tools": [1, 2], "messages": [{"role": "user", "content": " a "},
            {"role": "assistant", "content": " b "}]}"#;
        let list = with_template(own, &line.replace('\n', " ")).unwrap();
        assert_eq!(parts(&list[0]), [("2[user] a</s>[assistant] ", false), ("b</s>", true)]);
        // Shows only the last two messages.
        let forgets = "{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}{% endfor %}\
                       {% if add_generation_prompt %}[assistant]{% endif %}";
        let error = with_template(forgets, &TALK.replace('\n', " ")).unwrap_err().report();
        assert!(error.contains("d.jsonl:1: `messages[2]`: the chat template changes"), "{error}");
        // Takes the thoughts out of all answers but the last.
        let thoughts = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last \
                        else m.content.split('=')[-1] }}{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}";
        let line = r#"{"messages": [{"role": "assistant", "content": "hm=b"}]}"#;
        assert_eq!(parts(&with_template(thoughts, line).unwrap()[0])[1], ("hm=b", true));
        let twice = line.replace("]}", ", {\"role\": \"assistant\", \"content\": \"c\"}]}");
        let error = with_template(thoughts, &twice).unwrap_err().report();
        assert!(error.contains("`messages[0]`: the chat template changes"), "{error}");
        // Begins an answer with what no answer begins with.
        let begins = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\
                      {% if add_generation_prompt %}[assistant]ä{% endif %}";
        let error = with_template(begins, line).unwrap_err().report();
        assert!(error.contains("`messages[0]`: the chat template asks for an answer"), "{error}");
        let refuses = "{{ raise_exception('roles must alternate') }}";
        let error = with_template(refuses, &TALK.replace('\n', " ")).unwrap_err().report();
        assert!(error.contains("d.jsonl:1: ") && error.contains("must alternate"), "{error}");
    }

    #[test]
    fn what_is_wrong_is_said_with_the_line_and_the_field() {
        for (line, want) in [
            ("{\"text\": 1}", "`text` is a number, not a text"),
            ("{\"text\": \"\"}", "the learned text is empty"),
            ("{\"prompt\": \"a\"}", "`completion` is missing"),
            ("{\"completion\": \"a\"}", "`prompt` is missing"),
            ("{\"prompt\": \"a\", \"completion\": null}", "`completion` is null, not a text"),
            ("{\"txt\": \"a\", \"n\": 1}", "only `txt`, `n`"),
            ("{}", "only nothing"),
            ("{\"text\": \"a\", \"messages\": []}", "more than one form"),
            ("[1]", "a list, not an object"),
            ("{\"text\": \"a\"", "not JSON: EOF while parsing an object, at column 12"),
            ("{\"text\": \"\\ud800\"}", "not JSON"),
            ("{\"messages\": {}}", "`messages` is an object, not a list"),
            ("{\"messages\": []}", "none is of the role assistant"),
            ("{\"messages\": [1]}", "`messages[0]` is a number, not an object"),
            ("{\"messages\": [{\"content\": \"a\"}]}", "`messages[0]`: `role` is missing"),
            ("{\"messages\": [{\"role\": 1, \"content\": \"a\"}]}", "`role` is a number"),
            ("{\"messages\": [{\"role\": \"assistant\"}]}", "`content` is missing"),
            ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}", "role assistant"),
        ] {
            let error = read(&format!("{{\"text\": \"fine\"}}\n\n{line}\n")).unwrap_err();
            let error = error.report();
            assert!(error.starts_with("d.jsonl:3: ") && error.contains(want), "{line}: {error}");
            assert!(error.contains("\n\nhint: "), "{error}");
        }
    }

    #[test]
    fn hostile_lines_end_in_errors() {
        let deep = "[".repeat(100_000);
        let deep_messages = format!("{{\"messages\": {deep}");
        let long_key = format!("{{\"{}\": 1}}", "k".repeat(1 << 20));
        for line in [deep.as_str(), &deep_messages, &long_key, "\u{0}", "nul", "{\"a\":1e999}"] {
            let error = read(line).unwrap_err().report();
            assert!(error.len() < 2000, "{}", error.len());
        }
        let options = ChatOptions::default();
        let style = ChatStyle { template: None, options: &options };
        assert!(documents("d.jsonl", b"{\"text\": \"\xff\"}", style).is_err());
    }
}
