//! What was said in a chat: a system message, then turns of user and assistant.
//!
//! When the prompt leaves no room for an answer, the oldest turns are forgotten, a question with
//! its answer at a time; the system message and the last question stay.
//!
//! A conversation on disk is `{"messages": [{"role", "content"}, ...]}`, one record of the chats
//! that `elapid train` learns from.

use crate::files;
use crate::report::{Done, Failure};
use elapid::Message;
use serde::Deserialize;
use serde_json::json;
use std::path::Path;

const ROLES: [&str; 2] = ["user", "assistant"];

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// What the assistant is told before all.
    pub system: Option<String>,
    /// Questions, each but perhaps the last with its answer behind it.
    texts: Vec<String>,
}

/// A conversation on disk.
#[derive(Deserialize)]
struct Saved {
    messages: Vec<Said>,
}

#[derive(Deserialize)]
struct Said {
    role: String,
    content: String,
}

impl Conversation {
    pub fn new(system: Option<String>) -> Conversation {
        Conversation { system, texts: Vec::new() }
    }

    pub fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| ("system", text));
        let message = |(role, text): (&str, &String)| {
            let pairs = [("role", role), ("content", text)].into_iter();
            pairs.map(|(key, text)| (key.to_string(), json!(text))).collect()
        };
        system.chain(ROLES.into_iter().cycle().zip(&self.texts)).map(message).collect()
    }

    /// Questions so far.
    pub fn n_turns(&self) -> usize {
        self.texts.len().div_ceil(2)
    }

    /// Takes a question, or the answer to the last one.
    pub fn push(&mut self, text: String) {
        self.texts.push(text);
    }

    /// Forgets all but the system message.
    pub fn reset(&mut self) {
        self.texts.clear();
    }

    /// Takes the last question back, with its answer.
    pub fn undo(&mut self) -> Option<String> {
        self.retry();
        self.texts.pop()
    }

    /// Takes the last answer back; whether there is a question to answer.
    pub fn retry(&mut self) -> bool {
        self.texts.truncate((2 * self.n_turns()).saturating_sub(1));
        !self.texts.is_empty()
    }

    /// The prompt, of `n_max` tokens at most, and how many old turns were forgotten for it.
    pub fn fit(
        &mut self,
        n_max: usize,
        prompt: &mut dyn FnMut(&[Message]) -> Done<Vec<u32>>,
    ) -> Done<(Vec<u32>, usize)> {
        let mut n_forgotten = 0;
        loop {
            let ids = prompt(&self.messages())?;
            if ids.len() <= n_max {
                return Ok((ids, n_forgotten));
            }
            if self.n_turns() < 2 {
                let problem =
                    format!("the message takes {} tokens, there is room for {n_max}", ids.len());
                return Err(Failure::new(problem, "shorten it, or use a larger --context"));
            }
            self.texts.drain(..2);
            n_forgotten += 1;
        }
    }

    pub fn save(&self, path: &Path) -> Done<()> {
        let text = json!({"messages": self.messages()});
        Ok(files::write_bytes(path, format!("{text}\n").as_bytes())?)
    }

    pub fn load(path: &Path) -> Done<Conversation> {
        let text = files::read_text(path)?;
        let saved = serde_json::from_str(&text).map_err(|error| error.to_string());
        saved.and_then(Conversation::of).map_err(|problem| {
            let hint = "give a file that /save wrote: {\"messages\": [{\"role\", \"content\"}]}";
            Failure::new(format!("{}: {problem}", path.display()), hint)
        })
    }

    fn of(saved: Saved) -> Result<Conversation, String> {
        let mut conversation = Conversation::default();
        for (idx, Said { role, content }) in saved.messages.into_iter().enumerate() {
            match role.as_str() {
                "system" if idx == 0 => conversation.system = Some(content),
                role if role == ROLES[conversation.texts.len() % 2] => conversation.push(content),
                _ => return Err(format!("message {idx} of role {role:?} is out of turn")),
            }
        }
        Ok(conversation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn talked() -> Conversation {
        let mut conversation = Conversation::new(Some("be brief".into()));
        for n in 0..3 {
            conversation.push(format!("question {n}"));
            conversation.push(format!("answer {n}"));
        }
        conversation
    }

    /// Ten tokens for each message.
    fn prompt(messages: &[Message]) -> Done<Vec<u32>> {
        Ok(vec![7; 10 * messages.len()])
    }

    #[test]
    fn the_oldest_turns_are_forgotten_first() {
        let mut conversation = talked();
        conversation.push("question 3".into());
        let (ids, n_forgotten) = conversation.fit(45, &mut prompt).unwrap();
        assert_eq!((ids.len(), n_forgotten), (40, 2));
        let texts: Vec<Value> =
            conversation.messages().into_iter().map(|message| message["content"].clone()).collect();
        assert_eq!(texts, ["be brief", "question 2", "answer 2", "question 3"]);
        let error = conversation.fit(15, &mut prompt).unwrap_err().to_string();
        assert!(error.contains("20 tokens, there is room for 15"), "{error}");
    }

    #[test]
    fn a_conversation_is_the_same_after_it_was_saved_and_loaded() {
        let path = std::env::temp_dir().join(format!("elapid-chat-{}.json", std::process::id()));
        let mut conversation = talked();
        conversation.push("open \"question\"\n".into());
        conversation.save(&path).unwrap();
        assert_eq!(Conversation::load(&path).unwrap(), conversation);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn messages_out_of_turn_are_refused() {
        let of = |roles: &[&str]| {
            let list: Vec<Value> =
                roles.iter().map(|role| json!({"role": role, "content": "x"})).collect();
            Conversation::of(serde_json::from_value(json!({"messages": list})).unwrap())
        };
        assert!(of(&["system", "user", "assistant", "user"]).is_ok());
        for roles in [&["assistant"][..], &["user", "user"], &["user", "system"], &["tool"]] {
            assert!(of(roles).unwrap_err().contains("out of turn"), "{roles:?}");
        }
        assert!(serde_json::from_value::<Saved>(json!({"messages": [{"role": "user"}]})).is_err());
    }

    #[test]
    fn the_last_turn_can_be_taken_back_or_answered_again() {
        let mut conversation = talked();
        assert!(conversation.retry());
        assert_eq!(conversation.messages().len(), 6);
        assert_eq!(conversation.undo().as_deref(), Some("question 2"));
        assert_eq!(conversation.n_turns(), 2);
        conversation.reset();
        assert!(!conversation.retry() && conversation.undo().is_none());
        assert_eq!(conversation.system.as_deref(), Some("be brief"));
    }
}
