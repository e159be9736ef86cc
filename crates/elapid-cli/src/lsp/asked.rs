//! A completion that an editor asks for: its place in a text, and the answer in the editor's form.
//!
//! The text that is made is inserted at the cursor. Where an editor says what its own list of
//! completions has selected, the model continues that, and the answer replaces what is typed of it.
//! An item of such a list has to begin with the word at the cursor, by which editors filter it.

use super::document::{Encoding, Position, Span, last_word};
use serde::Deserialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `textDocument/inlineCompletion`
    Inline,
    /// `textDocument/completion`
    List,
}

pub struct Asked {
    pub id: Value,
    pub uri: String,
    form: Form,
    text: Rc<String>,
    /// What the answer replaces, for us and for the editor.
    range: Range<usize>,
    span: Span,
    /// What it begins with.
    typed: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Params {
    text_document: Named,
    position: Position,
    context: Option<Context>,
}

#[derive(Deserialize)]
struct Named {
    uri: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Context {
    selected_completion_info: Option<Selected>,
}

#[derive(Deserialize)]
struct Selected {
    range: Span,
    text: String,
}

impl Asked {
    /// What a message asks, with the text of the document that it names.
    pub fn new(
        id: &Value,
        params: Value,
        form: Form,
        text_of: impl FnOnce(&str) -> Result<(Rc<String>, Encoding), String>,
    ) -> Result<Asked, String> {
        let params: Params = serde_json::from_value(params).map_err(|error| error.to_string())?;
        let Params { text_document: Named { uri }, position, context } = params;
        let (text, encoding) = text_of(&uri)?;
        let selected = context.and_then(|context| context.selected_completion_info);
        let (span, typed) = match (form, selected) {
            (Form::Inline, Some(Selected { range, text })) => (range, text),
            (Form::Inline, None) => (Span { start: position, end: position }, String::new()),
            (Form::List, _) => {
                let word = last_word(&text[..encoding.offset(&text, position)]).to_string();
                let n_units = encoding.length(&word);
                let character = position.character.saturating_sub(n_units);
                (Span { start: Position { character, ..position }, end: position }, word)
            }
        };
        let range = encoding.range(&text, span);
        Ok(Asked { id: id.clone(), uri, form, text, range, span, typed })
    }

    /// The text before and after what is to be made.
    pub fn around(&self) -> [Cow<'_, str>; 2] {
        let before = &self.text[..self.range.start];
        let before = match self.typed == self.text[self.range.clone()] {
            true => Cow::from(&self.text[..self.range.end]),
            false => Cow::from(format!("{before}{}", self.typed)),
        };
        [before, Cow::from(&self.text[self.range.end..])]
    }

    /// The answer: nothing where nothing is to be seen. A line break at its end, which `elapid
    /// complete` prints, would leave a blank line before the next one.
    pub fn result(&self, made: &str) -> Value {
        let made = made.trim_end();
        let text = format!("{}{made}", self.typed);
        let item = match self.form {
            Form::Inline => json!({"insertText": text, "range": self.span}),
            Form::List => json!({
                "label": text.lines().find(|line| !line.trim().is_empty()).map(str::trim),
                "kind": 1, "detail": "elapid", "filterText": text, "insertTextFormat": 1,
                "insertTextMode": 1, "documentation": text,
                "textEdit": {"range": self.span, "newText": text},
            }),
        };
        let items = if made.is_empty() { json!([]) } else { json!([item]) };
        match self.form {
            Form::Inline => json!({"items": items}),
            Form::List => json!({"isIncomplete": true, "items": items}),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(params: Value, form: Form) -> Asked {
        let text = Rc::new("x = \"🦀\"; pri\nend".to_string());
        Asked::new(&json!(1), params, form, |_| Ok((text, Encoding::Utf16))).unwrap()
    }

    fn place(line: u32, character: u32) -> Value {
        json!({"line": line, "character": character})
    }

    #[test]
    fn an_item_of_a_list_replaces_the_word_at_the_cursor_and_begins_with_it() {
        let params = json!({"textDocument": {"uri": "u"}, "position": place(0, 13)});
        let list = asked(params.clone(), Form::List);
        assert_eq!(list.around(), ["x = \"🦀\"; pri", "\nend"]);
        let item = &list.result("nt(x)\nprint(y)")["items"][0];
        assert_eq!(item["label"], "print(x)");
        assert_eq!(item["textEdit"]["newText"], "print(x)\nprint(y)");
        assert_eq!(item["textEdit"]["range"]["start"], place(0, 10));
        let inline = asked(params, Form::Inline);
        assert_eq!(inline.around(), ["x = \"🦀\"; pri", "\nend"]);
        let item = &inline.result("nt(x)\n")["items"][0];
        assert_eq!(item["insertText"], "nt(x)");
        assert_eq!(item["range"], json!({"start": place(0, 13), "end": place(0, 13)}));
        assert_eq!(inline.result(" \n")["items"], json!([]));
    }

    #[test]
    fn what_the_editors_own_list_has_selected_is_continued() {
        let range = json!({"start": place(0, 10), "end": place(0, 13)});
        let params = json!({
            "textDocument": {"uri": "u"}, "position": place(0, 13),
            "context": {"triggerKind": 2,
                "selectedCompletionInfo": {"range": range, "text": "println"}},
        });
        let asked = asked(params, Form::Inline);
        assert_eq!(asked.around(), ["x = \"🦀\"; println", "\nend"]);
        let item = &asked.result("!()")["items"][0];
        assert_eq!((&item["insertText"], &item["range"]), (&json!("println!()"), &range));
    }
}
