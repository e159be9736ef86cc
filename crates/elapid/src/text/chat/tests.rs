//! Templates against jinja2's renderings in `golden/chat.json`, and hostile ones.

use super::*;
use serde_json::{Value, json};

fn golden() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/chat.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn moment(golden: &Value) -> DateTime {
    let part = |idx: usize| golden["moment"][idx].as_i64().unwrap();
    jiff::civil::date(part(0) as i16, part(1) as i8, part(2) as i8).at(
        part(3) as i8,
        part(4) as i8,
        part(5) as i8,
        0,
    )
}

fn messages(list: &Value) -> Vec<Message> {
    let list = list.as_array().unwrap().iter();
    list.map(|message| message.as_object().unwrap().clone()).collect()
}

fn options(golden: &Value, case: &Value) -> ChatOptions {
    let text = |key: &str| case[key].as_str().map(str::to_string);
    ChatOptions {
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        bos_token: text("bos_token"),
        eos_token: text("eos_token"),
        tools: case.get("tools").filter(|tools| !tools.is_null()).cloned(),
        extra: case["extra"].as_object().unwrap().clone(),
        now: Some(moment(golden)),
    }
}

fn render(source: &str, options: &ChatOptions) -> Result<String> {
    ChatTemplate::new("test", source)?.render(&[], options)
}

/// The problem of a template that must fail.
fn problem(source: &str) -> String {
    render(source, &ChatOptions::default()).unwrap_err().report()
}

#[test]
fn every_family_renders_as_jinja2_does() {
    let golden = golden();
    let (mut n_text, mut n_refusal) = (0, 0);
    for (idx, case) in golden["cases"].as_array().unwrap().iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let template =
            ChatTemplate::new(name, golden["templates"][name].as_str().unwrap()).unwrap();
        let got =
            template.render(&messages(&case["messages"]), &options(&golden, &case["options"]));
        match (case.get("text"), got) {
            (Some(text), Ok(got)) => {
                assert_eq!(got, text.as_str().unwrap(), "case {idx}, {name}");
                n_text += 1;
            }
            (None, Err(error)) => {
                if let Some(message) = case["error"].as_str() {
                    assert!(error.report().starts_with(message), "case {idx}, {name}: {error}");
                    n_refusal += 1;
                }
            }
            (want, got) => panic!("case {idx}, {name}: expected {want:?}, got {got:?}"),
        }
    }
    assert!(n_text > 100 && n_refusal > 20, "{n_text} texts, {n_refusal} refusals");
}

#[test]
fn every_construct_gives_what_jinja2_gives() {
    let golden = golden();
    let extra = golden["vars"].as_object().unwrap().clone();
    let options = ChatOptions { extra, now: Some(moment(&golden)), ..Default::default() };
    let mut offences = Vec::new();
    // In jinja2 `'\/'` keeps its backslash, as in Python; minijinja reads it as JSON does.
    let known = "'a\\u0001\\u007f\\/'";
    for snippet in golden["snippets"].as_array().unwrap() {
        let (source, want) = (snippet["source"].as_str().unwrap(), snippet["text"].as_str());
        let got = render(source, &options);
        if source.contains(known) {
            assert_eq!(got.unwrap(), want.unwrap().replace(r"\\/", "/"));
            continue;
        }
        if got.as_ref().ok().map(String::as_str) != want {
            offences.push(format!("{source}\n  jinja2: {want:?}\n  ours:   {got:?}"));
        }
    }
    assert!(offences.is_empty(), "{}", offences.join("\n"));
}

#[test]
fn slices_past_both_ends_are_those_of_python() {
    for (slice, want) in [
        ("[:-9:-1]", "dcba"),
        ("[2:-9:-1]", "cba"),
        ("[-9::-1]", ""),
        ("[9:0:-2]", "db"),
        ("[-9:9:3]", "ad"),
        ("[3:1]", ""),
        ("[::-9]", "d"),
    ] {
        let text = render(&format!("{{{{ 'abcd'{slice} }}}}"), &ChatOptions::default());
        assert_eq!(text.unwrap(), want, "{slice}");
    }
}

#[test]
fn a_minus_takes_the_item_or_attribute_behind_it() {
    let source = "{% set x = [1, 2.5] %}{% set y = {'z': 3} %}{{ -x[1] }} {{ -y.z }} \
        {{ - -x[0] }} {{ 4 -x[0] }}";
    assert_eq!(render(source, &ChatOptions::default()).unwrap(), "-2.5 -3 1 3");
}

#[test]
fn the_words_of_a_template_that_refuses_come_through() {
    let text = problem("{{ raise_exception('roles must alternate') }}");
    assert!(text.starts_with("roles must alternate\n\nhint: "), "{text}");
}

#[test]
fn errors_name_file_and_line() {
    let text = problem("a\nb\n{{ x.y }}");
    assert!(text.contains("test: chat template, line 3: undefined value"), "{text}");
    for (source, line, part) in [
        ("a\n{% if x %}b", 2, "unexpected end of input"),
        ("\n\n{{ 'a }}", 3, "unexpected end of string"),
        ("{{ a", 1, "unexpected end of input"),
        ("\n{% frob %}", 2, "unknown statement frob"),
        ("{{ 1 + }}", 1, "unexpected end of variable block"),
        ("{# x", 1, "unexpected end of comment"),
        ("{% endif %}", 1, "unknown statement endif"),
        ("{% break %}", 1, "'break' must be placed inside a loop"),
        ("{% raw %} x", 1, "unexpected end of raw block"),
        ("\n\n{% include 'x' %}", 3, "the tag `include` is not supported"),
    ] {
        let text = ChatTemplate::new("f.json", source).unwrap_err().report();
        let want = format!("line {line}: {part}");
        assert!(
            text.starts_with("f.json: chat template") && text.contains(&want),
            "{source}: {text}"
        );
    }
}

#[test]
fn tags_that_mark_a_generation_change_nothing() {
    let source = "a {%- generation -%} b {% endgeneration +%} {{ generation }}\
        {% raw %}{% generation %}{% endraw %}";
    assert_eq!(render(source, &ChatOptions::default()).unwrap(), "ab  {% generation %}");
}

#[test]
fn the_time_comes_from_outside() {
    let text = problem("{{ strftime_now('%Y') }}");
    assert!(text.contains("asks for the time"), "{text}");
    // Week days across leap years and centuries, from a calendar.
    for (year, month, day, want) in
        [(2000, 2, 29, "Tue 060"), (1900, 3, 1, "Thu 060"), (2026, 12, 31, "Thu 365")]
    {
        let now = jiff::civil::date(year, month, day).at(0, 0, 0, 0);
        let options = ChatOptions { now: Some(now), ..Default::default() };
        assert_eq!(render("{{ strftime_now('%a %j') }}", &options).unwrap(), want);
    }
}

#[test]
fn keys_of_tools_keep_their_order() {
    let tools = Some(json!([{"z": 1, "a": {"y": 2, "b": 3}}]));
    let options = ChatOptions { tools, ..Default::default() };
    let text = render("{{ tools | tojson }}", &options).unwrap();
    assert_eq!(text, r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#);
}

/// Templates that would take all time, memory or stack, and what stops each.
fn hostile() -> Vec<(String, &'static str)> {
    let bytes = "handles too many bytes";
    let double = |x: &str, step: &str, end: &str| {
        format!(
            "{{% set n = namespace(x={x}) %}}{{% for i in range(99) %}}{{% set n.x = {step} %}}\
             {{% endfor %}}{end}"
        )
    };
    let many = |part: &str| {
        format!(
            "{{% set r = range(99999)|list %}}{{% for i in range(99999) %}}{{% set q = {part} %}}\
             {{% endfor %}}"
        )
    };
    let mut list: Vec<(String, &str)> = [
        (
            "{% set r = range(9999)|list %}{% for a in r %}{% for b in r %}{% endfor %}\
             {% endfor %}",
            "too many steps",
        ),
        ("{{ range(1000000000) }}", "at most 100000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion limit"),
        (
            "{% macro f(a) %}{% if a %}{{ f([f(a)]) }}{% endif %}{% endmacro %}{{ f(1) }}",
            "recursion",
        ),
        ("{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}", "recursion limit"),
        (
            "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
            "a namespace cannot be used as a value",
        ),
        ("{% set n = namespace() %}{{ {n: [n]} }}", "a namespace cannot be used as a value"),
        ("{{ 'a' * 10 ** 30 }}", "repeats too often"),
        ("{{ [1] * 10 ** 18 }}", bytes),
        ("{{ 1 in [1] * 10 ** 18 }}", bytes),
        ("{{ 10 ** 1000 }}", "`**`"),
        ("{{ ('a' * 10 ** 7).replace('', 'b' * 10 ** 7) }}", bytes),
        ("{{ (range(99999)|list)|join('a' * 10 ** 6) }}", bytes),
        ("{{ ('\\n' * 10 ** 6)|indent(10 ** 6) }}", bytes),
        ("{{ [[1]]|tojson(indent=10 ** 9) }}", bytes),
        ("{{ ('{0}' * 10 ** 6).format('a' * 10 ** 6) }}", bytes),
        ("{{ ('%s' * 10 ** 6) % ('a' * 10 ** 6) }}", bytes),
        ("{{ '%999999999d' % 1 }}", "a width of more than"),
        ("{{ '{:>999999999}'.format(1) }}", "a width of more than"),
        ("{{ ('a' * 10 ** 7)|list|length }}", bytes),
        ("{{ ('a' * 10 ** 7).split('a')|length }}", bytes),
        ("{{ (range(9999)|list)|select('in', range(9999)|list)|list }}", bytes),
        ("{% for i in range(99999) %}{{ 'x' * 10 ** 6 }}{% endfor %}", bytes),
        ("{{ 170141183460469231731687303715884105727 + 1 }}", "`+`"),
        ("{{ (-170141183460469231731687303715884105727 - 1) // -1 }}", "//"),
        ("{{ 1 % 0 }}", "`%`"),
        ("{{ 'abc'[::0] }}", "step 0"),
    ]
    .map(|(source, part)| (source.to_string(), part))
    .to_vec();
    list.push((double("'ab'", "n.x ~ n.x", ""), bytes));
    list.push((double("'ab'", "n.x + n.x", ""), bytes));
    list.push((double("[1]", "n.x + n.x", ""), bytes));
    list.push((double("[1]", "[n.x, n.x]", ""), bytes));
    list.push((double("[]", "{'a': n.x, 'b': n.x}", ""), bytes));
    list.push((double("[]", "[[n.x]]", ""), "nested too deep"));
    list.push((double("[]", "namespace(x=n.x)", ""), "a namespace cannot be used as a value"));
    for part in ["-1 in r", "r[1:]", "r|select('odd')|list", "r|map('string')|first", "range(9999)"]
    {
        list.push((many(part), bytes));
    }
    list.push((
        format!(
            "{{% set x %}}{}{{% endset %}}",
            many("1").replace("{% set q = 1 %}", &"X".repeat(9999))
        ),
        bytes,
    ));
    let deep = |open: &str, close: &str, n: usize| open.repeat(n) + "1" + &close.repeat(n);
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("{1:", "}"),
        ("-", ""),
        ("not ", ""),
        ("a[", "]"),
        ("a(", ")"),
        ("1 + ", ""),
        ("'' ~ ", ""),
        ("1 if 1 else ", ""),
    ] {
        list.push((format!("{{{{ {} }}}}", deep(open, close, 20_000)), "tokens"));
    }
    list.push((deep("{% if 1 %}", "{% endif %}", 10_000), "recursion"));
    list.push((format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)), "`elif`"));
    list.push(("x".repeat(2 << 20), "bytes"));
    list
}

#[test]
fn hostile_templates_end_in_an_error() {
    for (source, part) in hostile() {
        let start: String = source.chars().take(100).collect();
        let text = problem(&source);
        assert!(text.contains(part), "{start}: {text}");
    }
}

#[test]
fn chains_up_to_the_limit_fit_the_stack() {
    for (unit, end, want) in [("1 + ", "1", "490"), ("'' ~ ", "1", "1"), ("0 or ", "1", "1")] {
        let source = format!("{{{{ {}{end} }}}}", unit.repeat(489));
        assert_eq!(render(&source, &ChatOptions::default()).unwrap(), want, "{unit}");
    }
    let source = format!("{{{{ 'a'{} }}}}", "|trim".repeat(490));
    assert_eq!(render(&source, &ChatOptions::default()).unwrap(), "a");
    let source = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(499));
    assert_eq!(render(&source, &ChatOptions::default()).unwrap(), "");
}

#[test]
fn long_talks_are_not_hostile() {
    let golden = golden();
    let talk = messages(&golden["cases"][9]["messages"]);
    let long: Vec<Message> = talk.iter().cycle().take(talk.len() * 300).cloned().collect();
    for (name, source) in golden["templates"].as_object().unwrap() {
        let template = ChatTemplate::new(name, source.as_str().unwrap()).unwrap();
        if let Err(error) =
            template.render(&long, &options(&golden, &golden["cases"][1]["options"]))
        {
            assert!(error.report().contains("refuses"), "{name}: {error}");
        }
    }
}

#[test]
fn odd_values_do_not_panic() {
    let big = "170141183460469231731687303715884105727";
    let values = ["none", "-1", big, "-7", "2.5", "1e308 * 10", "'ä'", "[]", "{}", "x", "range"];
    for a in values {
        for b in values {
            for op in ["+", "-", "*", "/", "//", "%", "**", "~", "in", "==", "<"] {
                let _ = render(&format!("{{{{ ({a}) {op} ({b}) }}}}"), &ChatOptions::default());
            }
            for call in ["[A:B]", "[::A]", "[A:B:-1]", ".split(A, B)", ".replace(A, B)", ".find(A)"]
            {
                let call = call.replace('A', a).replace('B', b);
                for value in ["'aäb'", "[1, 2]", "{'a': 1}"] {
                    let _ = render(&format!("{{{{ {value}{call} }}}}"), &ChatOptions::default());
                }
            }
            for filter in ["indent", "round", "int", "join", "sort", "map", "tojson", "default"] {
                let source = format!("{{{{ ({a})|{filter}({b}) }}}}");
                let _ = render(&source, &ChatOptions::default());
            }
        }
    }
}

#[test]
fn cut_and_garbled_templates_do_not_panic() {
    let golden = golden();
    let options = ChatOptions { now: Some(moment(&golden)), ..Default::default() };
    let talk = messages(&golden["cases"][20]["messages"]);
    for source in golden["templates"].as_object().unwrap().values() {
        let source = source.as_str().unwrap();
        for at in (0..source.len()).filter(|at| source.is_char_boundary(*at)).step_by(7) {
            let cut = &source[..at];
            let swapped = format!("{}{}", &source[at..], cut);
            for text in [cut, &swapped] {
                if let Ok(template) = ChatTemplate::new("cut", text) {
                    let _ = template.render(&talk, &options);
                }
            }
        }
    }
}
