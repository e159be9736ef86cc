//! Calls in answers, whole and as they grow.

use super::*;

fn call_of(name: &str, arguments: Value) -> Part {
    Part::Call(Call { name: name.into(), arguments })
}

fn text(text: &str) -> Part {
    Part::Text(text.into())
}

/// The same parts whether the text comes at once or byte by byte.
fn parts(syntax: Syntax, answer: &str) -> Vec<Part> {
    let whole = Parser::new(Some(syntax), usize::MAX).all(answer);
    let (mut parser, mut grown) = (Parser::new(Some(syntax), usize::MAX), Vec::new());
    answer.chars().for_each(|ch| grown.extend(parser.push(&ch.to_string())));
    grown.extend(parser.finish());
    let spelled = |parts: &[Part]| {
        parts.iter().fold(String::new(), |all, part| match part {
            Part::Text(text) => all + text,
            Part::Call(call) => format!("{all}\u{1}{call:?}\u{1}"),
        })
    };
    assert_eq!(spelled(&whole), spelled(&grown), "{answer}");
    whole
}

#[test]
fn calls_are_found_in_the_syntax_of_each_family() {
    let hermes = "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n\
                  </tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
    let f = call_of("f", json!({"a": 1}));
    let want = vec![text("I look."), f.clone(), call_of("g", json!({}))];
    assert_eq!(parts(Syntax::Hermes, hermes), want);
    let llama = "{\"name\": \"f\", \"parameters\": {\"a\": 1}}";
    assert_eq!(parts(Syntax::Llama, llama), vec![f.clone()]);
    let two = format!("<|python_tag|>{llama}; {llama}");
    assert_eq!(parts(Syntax::Llama, &two), vec![f.clone(), f.clone()]);
    let mistral = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}]";
    assert_eq!(parts(Syntax::Mistral, mistral), [f]);
}

#[test]
fn harmony_has_channels_of_which_what_is_thought_is_left_out() {
    let thought = "<|channel|>analysis<|message|>I need <b>.<|end|><|start|>assistant";
    let call =
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    let f = call_of("f", json!({"a": 1}));
    assert_eq!(parts(Syntax::Harmony, &format!("{thought}{call}")), std::slice::from_ref(&f));
    // The end of a call ends the answer, and is not part of it; the recipient may come first.
    let other = " to=functions.f<|channel|>commentary<|message|>{\"a\": 1}";
    assert_eq!(parts(Syntax::Harmony, other), std::slice::from_ref(&f));
    let said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
    assert_eq!(parts(Syntax::Harmony, &format!("{said}{call}")), [text("I look."), f]);
    let last = format!("{thought}<|channel|>final<|message|>Done: a < b<|return|>");
    assert_eq!(parts(Syntax::Harmony, &last), [text("Done: a < b")]);
    assert_eq!(parts(Syntax::Harmony, "no marks"), [text("no marks")]);
    let broken = "<|channel|>commentary to=functions.f<|message|>{\"a\"";
    assert_eq!(parts(Syntax::Harmony, broken), [text("{\"a\"")]);
    assert_eq!(Syntax::of("{{ tools }}<|channel|><|message|>"), Some(Syntax::Harmony));
}

#[test]
fn what_is_no_call_is_text() {
    for (syntax, answer) in [
        (Syntax::Hermes, "a < b <tool"),
        (Syntax::Hermes, "<tool_call>{\"name\": 5}</tool_call> and more"),
        (Syntax::Hermes, "<tool_call>{\"name\": \"f\""),
        (Syntax::Llama, "{\"a\": 1}"),
        (Syntax::Llama, "so {\"name\": \"f\", \"parameters\": {}}"),
        (Syntax::Mistral, "[TOOL_CALLS] none"),
        (Syntax::Mistral, "  indented"),
    ] {
        assert_eq!(parts(syntax, answer), [text(answer)]);
    }
    let calls = "{\"name\": \"f\"} {\"name\": \"g\"}";
    assert_eq!(Parser::new(Some(Syntax::Llama), 1).all(calls).len(), 1);
    assert_eq!(Parser::new(None, 1).all(calls), [text(calls)]);
}

#[test]
fn a_template_says_its_syntax() {
    assert_eq!(Syntax::of("{% if tools %}<tool_call>"), Some(Syntax::Hermes));
    assert_eq!(Syntax::of("{{ tools }}[TOOL_CALLS]"), Some(Syntax::Mistral));
    assert_eq!(Syntax::of("{{ tools }}Environment: ipython"), Some(Syntax::Llama));
    assert_eq!(Syntax::of("{{ messages }}"), None);
}
