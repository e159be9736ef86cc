//! Finds what nobody wants a model to repeat: keys, tokens, passwords, addresses of people.
//!
//! One pass of Aho-Corasick over the text finds words that such things begin with or stand beside;
//! what lies around each is then looked at:
//!
//! | at                        | is a secret                                                     |
//! |---------------------------|-----------------------------------------------------------------|
//! | `-----BEGIN`              | a private key with a body, up to its end                        |
//! | `ghp_`, `AKIA`, `xoxb-` … | a token of its service: characters, length, not a placeholder   |
//! | `eyJ`                     | a JSON Web Token: three parts                                   |
//! | `://`                     | the password of `user:password@host`                            |
//! | `password`, `token` …     | a random value that a name like this is given                   |
//! | `@`                       | an e-mail address in a domain that exists                       |
//!
//! "Random" is told by words: names and sentences are made of long runs of letters of one case,
//! random values of short ones. Hashes and UUIDs are random too, but stand beside other names.
//!
//! Not here: files that are left out as a whole because of their names or a private key in them
//! (the engine's `data/filter.rs`).

mod rules;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use rules::{AFTER, NAMES, TOKENS, Token};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

/// A place in a text that must not be learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    pub kind: SecretKind,
    /// Where it lies, in bytes.
    pub range: Range<usize>,
}

/// What a secret is. Of two that overlap the earlier in this list is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SecretKind {
    PrivateKey,
    /// Of a service, by the form of its tokens.
    Token(&'static str),
    WebToken,
    UrlPassword,
    /// By the name it is given to.
    Assigned(&'static str),
    Email,
}

impl SecretKind {
    /// In words.
    pub fn describe(self) -> &'static str {
        match self {
            SecretKind::PrivateKey => "private key",
            SecretKind::Token(name) | SecretKind::Assigned(name) => name,
            SecretKind::WebToken => "JSON Web Token",
            SecretKind::UrlPassword => "password in a URL",
            SecretKind::Email => "e-mail address",
        }
    }

    fn replacement(self) -> &'static str {
        if self == SecretKind::Email { "user@example.com" } else { "<secret>" }
    }
}

/// What a match of the automaton asks for, by its number.
#[derive(Clone, Copy)]
enum Mark {
    Pem,
    WebToken,
    Url,
    At,
    Bearer,
    Token(&'static Token),
    Name(&'static str),
}

static MARKS: LazyLock<(Option<AhoCorasick>, Vec<Mark>)> = LazyLock::new(|| {
    let plain = [
        ("-----BEGIN ", Mark::Pem),
        ("eyJ", Mark::WebToken),
        ("://", Mark::Url),
        ("@", Mark::At),
        ("Bearer ", Mark::Bearer),
    ];
    let tokens = TOKENS.iter().map(|token| (token.prefix, Mark::Token(token)));
    let names = NAMES.iter().map(|(name, kind)| (*name, Mark::Name(kind)));
    let (words, marks): (Vec<_>, Vec<_>) = plain.into_iter().chain(tokens).chain(names).unzip();
    let automaton = AhoCorasick::builder()
        .ascii_case_insensitive(true)
        .match_kind(MatchKind::LeftmostLongest)
        .kind(Some(AhoCorasickKind::DFA))
        .build(words);
    (automaton.ok(), marks) // a few hundred states: it is far from its limits
});

/// The secrets of a text, by place; none overlaps another.
pub fn find(text: &str) -> Vec<Secret> {
    let (Some(automaton), marks) = &*MARKS else { return Vec::new() };
    let bytes = text.as_bytes();
    let mut found: Vec<(Range<usize>, SecretKind)> = Vec::new();
    let mut end_pem = 0;
    for word in automaton.find_iter(bytes) {
        let (start, end) = (word.start(), word.end());
        let one = match marks[word.pattern().as_usize()] {
            Mark::Pem if start >= end_pem => private_key(bytes, start).map(|range| {
                end_pem = range.end;
                (range, SecretKind::PrivateKey)
            }),
            Mark::Pem => None,
            Mark::WebToken => web_token(bytes, start).map(|range| (range, SecretKind::WebToken)),
            Mark::Url => url_password(bytes, end).map(|range| (range, SecretKind::UrlPassword)),
            Mark::At => email(text, start).map(|range| (range, SecretKind::Email)),
            Mark::Bearer => bearer(bytes, end).map(|range| (range, SecretKind::Assigned("token"))),
            Mark::Token(token) => {
                token_at(bytes, start, token).map(|range| (range, SecretKind::Token(token.kind)))
            }
            Mark::Name(kind) => {
                assigned(bytes, end, kind).map(|range| (range, SecretKind::Assigned(kind)))
            }
        };
        found.extend(one);
    }
    place(text, without_overlaps(found))
}

/// The text with what was found in it replaced. It has the same lines.
pub fn redact(text: &str) -> (Cow<'_, str>, Vec<Secret>) {
    let found = find(text);
    if found.is_empty() {
        return (Cow::Borrowed(text), found);
    }
    let (mut clean, mut end) = (String::with_capacity(text.len()), 0);
    for secret in &found {
        clean += &text[end..secret.range.start];
        clean += secret.kind.replacement();
        clean.extend(text[secret.range.clone()].chars().filter(|letter| *letter == '\n'));
        end = secret.range.end;
    }
    clean += &text[end..];
    (Cow::Owned(clean), found)
}

fn without_overlaps(mut found: Vec<(Range<usize>, SecretKind)>) -> Vec<(Range<usize>, SecretKind)> {
    found.sort_by_key(|(range, kind)| (range.start, *kind));
    let mut list: Vec<(Range<usize>, SecretKind)> = Vec::new();
    for (range, kind) in found {
        match list.last_mut() {
            Some((last, other)) if range.start < last.end => {
                last.end = last.end.max(range.end);
                *other = kind.min(*other);
            }
            _ => list.push((range, kind)),
        }
    }
    list
}

fn place(text: &str, found: Vec<(Range<usize>, SecretKind)>) -> Vec<Secret> {
    let (mut line, mut begin, mut seen) = (1, 0, 0);
    let place = |(range, kind): (Range<usize>, SecretKind)| {
        for (at, _) in text[seen..range.start].match_indices('\n') {
            (line, begin) = (line + 1, seen + at + 1);
        }
        seen = range.start;
        let column = text[begin..range.start].chars().count() + 1;
        Secret { line, column, kind, range }
    };
    found.into_iter().map(place).collect()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Letters of base64, of its form for URLs, and of hexadecimal numbers.
fn is_code(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/=_-".contains(&byte)
}

/// How many bytes from `start` on are so, at most `n_max`.
fn run(bytes: &[u8], start: usize, n_max: usize, is_so: impl Fn(u8) -> bool) -> usize {
    bytes[start..].iter().take(n_max).take_while(|byte| is_so(**byte)).count()
}

/// Whether nothing of a longer word stands before `start`.
fn begins(bytes: &[u8], start: usize) -> bool {
    start == 0 || !is_word(bytes[start - 1])
}

/// Longest secret on one line, and longest private key, in bytes.
const CODE_MAX: usize = 4096;
const PEM_MAX: usize = 1 << 14;

/// A header, a body of base64 with line breaks, written out or not, and the end where there is one.
fn private_key(bytes: &[u8], start: usize) -> Option<Range<usize>> {
    let label = start + "-----BEGIN ".len();
    let n_label = run(bytes, label, 40, |byte| byte.is_ascii_uppercase() || byte == b' ');
    let body = label + n_label;
    let is_private = bytes[label..body].windows(11).any(|words| words == b"PRIVATE KEY");
    if !is_private || !bytes[body..].starts_with(b"-----") {
        return None;
    }
    let body = body + 5;
    let is_body = |byte: u8| is_code(byte) || b"\\\n\r\t \"',:".contains(&byte);
    let mut end = body + run(bytes, body, PEM_MAX, is_body);
    // The hyphens of the end line are letters of the body too.
    let n_tail = run(bytes, end, 40, |byte| byte != b'\n');
    let rest = &bytes[body..end + n_tail];
    if let Some(at) = rest.windows(9).position(|words| words == b"-----END ") {
        let label = body + at + 9;
        end = label + run(bytes, label, 40, |byte| byte.is_ascii_uppercase() || byte == b' ');
        end += run(bytes, end, 5, |byte| byte == b'-');
    }
    let n_code = bytes[body..end].iter().filter(|byte| byte.is_ascii_alphanumeric()).count();
    while end > body && bytes[end - 1].is_ascii_whitespace() {
        end -= 1;
    }
    (n_code >= 40).then_some(start..end)
}

/// `header.payload.signature`, each base64; the first two are JSON objects.
fn web_token(bytes: &[u8], start: usize) -> Option<Range<usize>> {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    let part = |at: usize| at + run(bytes, at, CODE_MAX, is_part);
    let first = if begins(bytes, start) { part(start) } else { start };
    if first < start + 10 || !bytes[first..].starts_with(b".eyJ") {
        return None;
    }
    let second = part(first + 1);
    let signature = (bytes.get(second) == Some(&b'.')).then(|| part(second + 1))?;
    (second > first + 10 && signature > second + 16).then_some(start..signature)
}

/// The password of `user:password@host`, from behind `://`.
fn url_password(bytes: &[u8], start: usize) -> Option<Range<usize>> {
    let is_user = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+%".contains(&byte);
    let colon = start + run(bytes, start, 64, is_user);
    if bytes.get(colon) != Some(&b':') {
        return None;
    }
    let is_password = |byte: u8| byte.is_ascii_graphic() && !b"/@\"'`<>{}()[]\\$".contains(&byte);
    let end = colon + 1 + run(bytes, colon + 1, 128, is_password);
    let (user, password) = (&bytes[start..colon], &bytes[colon + 1..end]);
    let is_host = bytes.get(end + 1).is_some_and(|byte| is_word(*byte));
    let is_real = password.len() >= 4 && password != user && !rules::is_placeholder(password);
    (bytes.get(end) == Some(&b'@') && is_host && is_real).then_some(colon + 1..end)
}

/// What a header of HTTP authorises with.
fn bearer(bytes: &[u8], start: usize) -> Option<Range<usize>> {
    let end = start + run(bytes, start, CODE_MAX, |byte| is_code(byte) || byte == b'.');
    let value = &bytes[start..end];
    let is_code = rules::is_random(value) && !rules::is_placeholder(value);
    (value.len() >= 20 && is_code).then_some(start..end)
}

fn token_at(bytes: &[u8], start: usize, token: &Token) -> Option<Range<usize>> {
    let body = start + token.prefix.len();
    // The automaton does not tell case.
    if &bytes[start..body] != token.prefix.as_bytes() || !begins(bytes, start) {
        return None;
    }
    let end = body + run(bytes, body, CODE_MAX, |byte| (token.is_letter)(byte));
    let value = &bytes[body..end];
    let is_long = (token.n_min..=token.n_max).contains(&value.len());
    // In two letters many words begin.
    let is_real = token.is_sure || rules::is_random(value);
    (is_long && is_real && !rules::is_placeholder(value)).then_some(start..end)
}

/// A random value that the name is given whose telling part ends at `end`.
fn assigned(bytes: &[u8], end: usize, kind: &str) -> Option<Range<usize>> {
    let last = bytes[end - 1];
    let next = *bytes.get(end)?;
    // `tokenizer` is another word, `tokenValue` is not.
    if next.is_ascii_alphabetic() && !(next.is_ascii_uppercase() && last.is_ascii_lowercase()) {
        return None;
    }
    let n_name = run(bytes, end, 40, |byte| is_word(byte) || byte == b'-');
    let name_end = end + n_name;
    let rest = bytes[end..name_end].to_ascii_lowercase();
    if AFTER.split(' ').any(|word| rest.ends_with(word.as_bytes())) {
        return None;
    }
    let (start, quote) = value_after(bytes, name_end)?;
    let value_end = match quote {
        Some(quote) => {
            let n = run(bytes, start, CODE_MAX, |byte| byte != quote && byte != b'\n');
            (bytes.get(start + n) == Some(&quote)).then_some(start + n)?
        }
        None => {
            let end = start + run(bytes, start, CODE_MAX, is_code);
            // What follows a name in code follows no value.
            let next = bytes.get(end).copied().unwrap_or(b'\n');
            (next.is_ascii_whitespace() || b",;\"'&#\\".contains(&next)).then_some(end)?
        }
    };
    let value = &bytes[start..value_end];
    let is_weak = kind == "password" && quote.is_some() && rules::is_password(value);
    let is_long = value.len() >= 16 && value.iter().all(|byte| is_code(*byte) || *byte == b'.');
    let is_secret = is_weak || (is_long && rules::is_random(value));
    (is_secret && !rules::is_placeholder(value) && !rules::is_uuid(value))
        .then_some(start..value_end)
}

/// Where a value begins after a name, and in which quotes: after `=`, `:`, `=>`, `:=`, `: type =`,
/// `", "` or `("`.
fn value_after(bytes: &[u8], name_end: usize) -> Option<(usize, Option<u8>)> {
    let skip = |at: usize, letters: &[u8]| at + run(bytes, at, 32, |byte| letters.contains(&byte));
    let is_quoted = bytes.get(name_end).is_some_and(|byte| b"\"'`".contains(byte));
    let sign = skip(skip(name_end, b"\\\"'`])"), b" \t");
    let mut at = match bytes.get(sign)? {
        b'=' | b':' => skip(sign, b"=:>~"),
        b',' if is_quoted => sign + 1,
        b'(' => sign + 1,
        _ => return None,
    };
    let is_opening = |at: usize| bytes.get(at).filter(|byte| b"\"'`".contains(byte)).copied();
    at = skip(at, b" \t");
    if is_opening(at).is_none() && bytes[sign] == b':' {
        let is_type = |byte: u8| is_word(byte) || b"&<>'?: ".contains(&byte);
        let after = at + run(bytes, at, 32, is_type);
        if bytes.get(after) == Some(&b'=') {
            at = skip(after + 1, b" \t");
        }
    }
    // `b"..."`, `f'...'`, and quotes that are written out inside of a string.
    let prefix = run(bytes, at, 2, |byte| b"bfru\\$@".contains(&byte));
    match (is_opening(at), is_opening(at + prefix)) {
        (Some(quote), _) => Some((at + 1, Some(quote))),
        (None, Some(quote)) if bytes[at] != b'\\' => Some((at + prefix + 1, Some(quote))),
        (None, Some(_)) => Some((at + prefix + 1, None)),
        (None, None) if matches!(bytes[sign], b'=' | b':') => Some((at, None)),
        _ => None,
    }
}

/// The address around the `@` at `at`.
fn email(text: &str, at: usize) -> Option<Range<usize>> {
    let bytes = text.as_bytes();
    let is_local = |byte: u8| byte.is_ascii_alphanumeric() || b"._%+-".contains(&byte);
    let n_local = bytes[..at].iter().rev().take(65).take_while(|byte| is_local(**byte)).count();
    let is_domain = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
    let n_domain = run(bytes, at + 1, 128, is_domain);
    let local = text[at - n_local..at].trim_start_matches(['.', '-', '%', '+', '_']);
    let domain = text[at + 1..at + 1 + n_domain].trim_end_matches(['.', '-']);
    let (start, end) = (at - local.len(), at + 1 + domain.len());
    let is_url = text[..start].ends_with("://");
    let is_call = bytes.get(end).is_some_and(|byte| b"([@_/:".contains(byte));
    (!is_url && !is_call && rules::is_person(local, domain)).then_some(start..end)
}

#[cfg(test)]
mod tests;
