//! Ids against the tools that made them: a small vocabulary of our own, and more where real files
//! lie beside the project.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::*;

fn ids(line: &Value, key: &str) -> Vec<u32> {
    line[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Every piece of a stream is whole characters, and all together are what `decode` says.
fn expect_streams(tokenizer: &Tokenizer, ids: &[u32]) {
    for special in [Special::Parse, Special::Plain] {
        let mut stream = tokenizer.stream().showing(special);
        let mut text = String::new();
        for id in ids {
            text += &stream.push(*id);
        }
        text += &stream.finish();
        assert_eq!(text, tokenizer.decode(ids, special), "{ids:?}");
    }
}

fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::from_json(&path.display().to_string(), &read(path)).unwrap()
}

/// Ids and decoded texts of a tokenizer.json against those of Hugging Face.
fn expect_hugging_face(tokenizer: &Tokenizer, vectors: &Path) {
    let lines = jsonl(vectors);
    assert!(lines.len() > 100, "{}: {} lines", vectors.display(), lines.len());
    for line in &lines {
        let text = line["text"].as_str().unwrap();
        let want = ids(line, "ids");
        assert_eq!(tokenizer.encode(text, Special::Parse).unwrap(), want, "{text:?}");
        let mut whole = tokenizer.encode_with_begin(text, Special::Parse).unwrap();
        whole.extend(tokenizer.end());
        assert_eq!(whole, ids(line, "ids_special"), "{text:?} with its ends");
        assert_eq!(tokenizer.decode(&want, Special::Parse), line["decoded"], "{want:?}");
        assert_eq!(tokenizer.decode(&want, Special::Plain), line["decoded_skip"], "{want:?}");
        expect_streams(tokenizer, &want);
    }
}

/// The same file, through the crate.
fn through_the_crate(tokenizer: &Tokenizer) -> Tokenizer {
    foreign::read("tokenizer.json", &tokenizer.to_json().unwrap()).unwrap()
}

#[test]
fn tokenizer_json_gives_the_ids_of_hugging_face() {
    let Some(folder) = real("tokenizers") else { return };
    for name in ["gpt2", "gpt-neox-20b", "qwen2.5", "smollm2", "tok512"] {
        let tokenizer = tokenizer(&folder.join(name).join("tokenizer.json"));
        assert!(matches!(tokenizer.codec, Codec::Own(_)), "{name} is not read by ourselves");
        expect_hugging_face(&tokenizer, &folder.join(name).join("vectors.jsonl"));
    }
}

#[test]
fn the_crate_gives_the_same_ids_as_we_do() {
    let Some(folder) = real("tokenizers") else { return };
    for name in ["smollm2", "tok512"] {
        let tokenizer = tokenizer(&folder.join(name).join("tokenizer.json"));
        let foreign = through_the_crate(&tokenizer);
        expect_hugging_face(&foreign, &folder.join(name).join("vectors.jsonl"));
        assert_eq!(foreign.begin(), tokenizer.begin());
    }
}

/// Pieces that make hard texts: white space, digits, marks, special tokens and parts of them.
const PIECES: [&str; 48] = [
    " ",
    "  ",
    "    ",
    "\n",
    "\r\n",
    "\t",
    "a",
    "the",
    " the",
    "Hello",
    "WORLD",
    "world's",
    "'S",
    "'re",
    "''",
    "1",
    "23",
    "456",
    " 7",
    "½",
    "٣",
    "e\u{301}",
    "é",
    "\u{301}",
    "中文",
    "가나",
    "🚀",
    "👩\u{200d}💻",
    "\u{a0}",
    "\u{3000}",
    "\u{85}",
    ".",
    "!!",
    "/",
    "//",
    "_",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "<s>",
    "</s>",
    "\u{2581}",
    "ſ",
    "\u{fb01}",
    "\u{e000}",
    "fn main() {\n    let x = 5;\n}",
    "\u{0}",
];

fn draw(seed: &mut u64, n: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*seed >> 33) as usize % n
}

#[test]
fn random_texts_have_the_ids_of_the_crate() {
    let Some(folder) = real("tokenizers") else { return };
    for name in ["gpt2", "gpt-neox-20b", "qwen2.5", "smollm2", "tok512"] {
        let tokenizer = tokenizer(&folder.join(name).join("tokenizer.json"));
        let foreign = through_the_crate(&tokenizer);
        let mut seed = 11;
        for _ in 0..3000 {
            let n = draw(&mut seed, 12);
            let text: String = (0..n).map(|_| PIECES[draw(&mut seed, PIECES.len())]).collect();
            for special in [Special::Parse, Special::Plain] {
                let got = tokenizer.encode(&text, special).unwrap();
                let want = foreign.encode(&text, special).unwrap();
                assert_eq!(got, want, "{name}, {special:?}: {text:?}");
                if special == Special::Parse {
                    let plain = tokenizer.decode(&got, special);
                    assert_eq!(plain, foreign.decode(&got, special), "{name}: {got:?}");
                    expect_streams(&tokenizer, &got);
                }
            }
        }
    }
}

#[test]
fn random_ids_stream_as_they_decode() {
    let Some(folder) = real("tokenizers") else { return };
    for name in ["smollm2", "tok512"] {
        let tokenizer = tokenizer(&folder.join(name).join("tokenizer.json"));
        let mut seed = 5;
        for _ in 0..2000 {
            let n = draw(&mut seed, 12);
            // Low ids are bytes and letters, which make broken characters.
            let ids: Vec<u32> = (0..n).map(|_| draw(&mut seed, 520) as u32).collect();
            expect_streams(&tokenizer, &ids);
        }
    }
}

#[test]
fn gguf_vocabularies_give_the_ids_of_llama_cpp() {
    let Some(folder) = real("gguf-vocab") else { return };
    for name in ["deepseek-coder", "gpt-2", "qwen2", "starcoder"] {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = Tokenizer::from_gguf(name, gguf_vocab(&path)).unwrap();
        let texts = String::from_utf8(read(&path.with_extension("gguf.inp"))).unwrap();
        let wants = String::from_utf8(read(&path.with_extension("gguf.out"))).unwrap();
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        assert!(texts.len() > 40 && texts.len() <= wants.lines().count() + 1, "{}", texts.len());
        for (text, want) in texts.iter().zip(wants.lines()) {
            let want: Vec<u32> = want.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text, Special::Plain).unwrap(), want, "{name}: {text:?}");
        }
        let vectors = folder.join(format!("vectors-ggml-vocab-{name}.jsonl"));
        expect_llama_cpp(&tokenizer, &vectors);
    }
}

/// Ids against those of llama.cpp, with special tokens as text and not.
fn expect_llama_cpp(tokenizer: &Tokenizer, vectors: &Path) {
    let lines = jsonl(vectors);
    assert!(lines.len() > 100, "{}: {} lines", vectors.display(), lines.len());
    for line in &lines {
        let text = line["text"].as_str().unwrap();
        let plain = tokenizer.encode(text, Special::Plain).unwrap();
        assert_eq!(plain, ids(line, "ids"), "{text:?} plain");
        let parsed = tokenizer.encode_with_begin(text, Special::Parse).unwrap();
        assert_eq!(parsed, ids(line, "ids_parse_special"), "{text:?} parsed");
        // A U+2581 in the text comes back as the space it stands for.
        if !text.contains(tokens::SPACE_MARK) {
            assert_eq!(tokenizer.decode(&plain, Special::Parse), text, "{plain:?}");
        }
        expect_streams(tokenizer, &parsed);
    }
}

#[test]
fn sentencepiece_in_gguf_gives_the_ids_of_llama_cpp() {
    let Some(folder) = real("models/stories260K/hf") else { return };
    let vocab = gguf_vocab(&folder.join("stories260K-f32.gguf"));
    let tokenizer = Tokenizer::from_gguf("stories260K", vocab).unwrap();
    expect_llama_cpp(&tokenizer, &folder.join("llamacpp_vectors.jsonl"));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert_eq!(tokenizer.eog(), [2]);
}

/// A folder of real files beside the project, if it is there.
fn real(folder: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/realdata").join(folder);
    if !path.exists() {
        println!("skipped: no {} beside the project", path.display());
        return None;
    }
    Some(path)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn jsonl(path: &Path) -> Vec<Value> {
    let text = String::from_utf8(read(path)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Walks the metadata of a GGUF file.
struct Reader<'b> {
    bytes: &'b [u8],
}

#[derive(Debug)]
enum Entry {
    Number(f64),
    Text(Vec<u8>),
    List(Vec<Entry>),
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.bytes.split_first_chunk::<N>().unwrap();
        self.bytes = rest;
        *head
    }

    fn text(&mut self) -> Vec<u8> {
        let n = u64::from_le_bytes(self.take()) as usize;
        let (text, rest) = self.bytes.split_at(n);
        self.bytes = rest;
        text.to_vec()
    }

    fn entry(&mut self, kind: u32) -> Entry {
        match kind {
            0 | 7 => Entry::Number(f64::from(self.take::<1>()[0])),
            1 => Entry::Number(f64::from(i8::from_le_bytes(self.take()))),
            2 => Entry::Number(f64::from(u16::from_le_bytes(self.take()))),
            3 => Entry::Number(f64::from(i16::from_le_bytes(self.take()))),
            4 => Entry::Number(f64::from(u32::from_le_bytes(self.take()))),
            5 => Entry::Number(f64::from(i32::from_le_bytes(self.take()))),
            6 => Entry::Number(f64::from(f32::from_le_bytes(self.take()))),
            8 => Entry::Text(self.text()),
            9 => {
                let kind = u32::from_le_bytes(self.take());
                let n = u64::from_le_bytes(self.take());
                Entry::List((0..n).map(|_| self.entry(kind)).collect())
            }
            10 => Entry::Number(u64::from_le_bytes(self.take()) as f64),
            11 => Entry::Number(i64::from_le_bytes(self.take()) as f64),
            12 => Entry::Number(f64::from_le_bytes(self.take())),
            _ => panic!("type {kind}"),
        }
    }
}

fn texts(entry: Entry) -> Vec<Vec<u8>> {
    let Entry::List(list) = entry else { panic!("{entry:?}") };
    let text = |entry| if let Entry::Text(text) = entry { text } else { panic!("{entry:?}") };
    list.into_iter().map(text).collect()
}

fn numbers(entry: Entry) -> Vec<f64> {
    let Entry::List(list) = entry else { panic!("{entry:?}") };
    let number = |entry| if let Entry::Number(x) = entry { x } else { panic!("{entry:?}") };
    list.into_iter().map(number).collect()
}

/// The vocabulary of a GGUF file.
fn gguf_vocab(path: &Path) -> GgufVocab {
    let bytes = read(path);
    let mut reader = Reader { bytes: &bytes };
    assert_eq!(&reader.take::<4>(), b"GGUF");
    assert!(u32::from_le_bytes(reader.take()) >= 2);
    reader.take::<8>();
    let n = u64::from_le_bytes(reader.take());
    let mut entries = BTreeMap::new();
    for _ in 0..n {
        let key = String::from_utf8(reader.text()).unwrap();
        let kind = u32::from_le_bytes(reader.take());
        entries.insert(key, reader.entry(kind));
    }
    let mut vocab = GgufVocab::default();
    for (key, entry) in entries {
        let Some(key) = key.strip_prefix("tokenizer.ggml.") else { continue };
        match (key, entry) {
            ("model", Entry::Text(text)) => vocab.model = String::from_utf8(text).unwrap(),
            ("pre", Entry::Text(text)) => vocab.pre = Some(String::from_utf8(text).unwrap()),
            ("tokens", entry) => vocab.tokens = texts(entry),
            ("merges", entry) => vocab.merges = Some(texts(entry)),
            ("scores", entry) => {
                vocab.scores = Some(numbers(entry).into_iter().map(|x| x as f32).collect());
            }
            ("token_type", entry) => {
                vocab.token_types = Some(numbers(entry).into_iter().map(|x| x as i32).collect());
            }
            (key, Entry::Number(x)) => match key.strip_suffix("_token_id") {
                Some(role) => drop(vocab.ids.insert(role.into(), x as u32)),
                None => drop(vocab.flags.insert(key.into(), x != 0.0)),
            },
            _ => {}
        }
    }
    vocab
}

/// Texts of a vectors file.
fn texts_of(path: &Path) -> Vec<String> {
    jsonl(path).iter().map(|line| line["text"].as_str().unwrap().to_string()).collect()
}

#[test]
fn a_gguf_vocabulary_written_as_json_gives_the_same_ids() {
    let Some(folder) = real("gguf-vocab") else { return };
    let spm = real("models/stories260K/hf").unwrap().join("stories260K-f32.gguf");
    let names = ["deepseek-coder", "gpt-2", "qwen2", "starcoder"];
    let paths = names.map(|name| folder.join(format!("ggml-vocab-{name}.gguf")));
    for path in paths.iter().chain([&spm]) {
        let tokenizer = Tokenizer::from_gguf("a.gguf", gguf_vocab(path)).unwrap();
        let json = tokenizer.to_json().unwrap();
        let again = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
        assert!(matches!(again.codec, Codec::Own(_)), "{}", path.display());
        let foreign = foreign::read("tokenizer.json", &json).unwrap();
        for text in texts_of(&folder.join("vectors-ggml-vocab-gpt-2.jsonl")) {
            for special in [Special::Parse, Special::Plain] {
                let want = tokenizer.encode_with_begin(&text, special).unwrap();
                for other in [&again, &foreign] {
                    let got = other.encode_with_begin(&text, special).unwrap();
                    assert_eq!(got, want, "{}: {text:?}", path.display());
                }
                assert_eq!(again.decode(&want, special), tokenizer.decode(&want, special));
            }
        }
    }
}

#[test]
fn a_tokenizer_json_written_as_gguf_gives_the_same_ids() {
    let Some(folder) = real("tokenizers") else { return };
    let pres = [
        ("gpt2", Some("gpt-2")),
        ("gpt-neox-20b", Some("gpt-2")),
        ("qwen2.5", Some("qwen2")),
        ("smollm2", Some("smollm")),
        ("tok512", Some("default")),
    ];
    for (name, pre) in pres {
        let tokenizer = tokenizer(&folder.join(name).join("tokenizer.json"));
        let vocab = tokenizer.to_gguf().unwrap();
        assert_eq!(vocab.pre.as_deref(), pre, "{name}");
        let again = Tokenizer::from_gguf("a.gguf", vocab.clone()).unwrap();
        for text in texts_of(&folder.join(name).join("vectors.jsonl")) {
            use unicode_normalization::UnicodeNormalization;
            // llama.cpp does not normalise, and takes a token called `</s>` for an end.
            let text: String = text.nfc().collect::<String>().replace("</s>", "");
            let want = tokenizer.encode_with_begin(&text, Special::Parse).unwrap();
            let got = again.encode_with_begin(&text, Special::Parse).unwrap();
            assert_eq!(got, want, "{name}: {text:?}");
        }
        assert_eq!(again.to_gguf().unwrap().tokens, vocab.tokens);
        assert_eq!(again.to_gguf().unwrap().merges, vocab.merges);
        assert_eq!(again.to_gguf().unwrap().scores, vocab.scores);
    }
}

/// One of our two small tokenizers, and its vectors.
fn tiny(name: &str) -> (Tokenizer, Vec<Value>) {
    let made: Value = serde_json::from_str(include_str!("tiny.json")).unwrap();
    let json = made[name]["tokenizer"].to_string();
    let tokenizer = Tokenizer::from_json("tiny.json", json.as_bytes()).unwrap();
    (tokenizer, made[name]["vectors"].as_array().unwrap().clone())
}

#[test]
fn small_tokenizers_give_the_ids_of_hugging_face() {
    for name in ["bytes", "spaces"] {
        let (tokenizer, vectors) = tiny(name);
        assert!(matches!(tokenizer.codec, Codec::Own(_)), "{name} is not read by ourselves");
        let foreign = through_the_crate(&tokenizer);
        for line in &vectors {
            let text = line["text"].as_str().unwrap();
            for tokenizer in [&tokenizer, &foreign] {
                let want = ids(line, "ids");
                assert_eq!(tokenizer.encode(text, Special::Parse).unwrap(), want, "{text:?}");
                let plain = tokenizer.encode(text, Special::Plain).unwrap();
                assert_eq!(plain, ids(line, "ids_plain"), "{text:?}");
                let whole = tokenizer.encode_with_begin(text, Special::Parse).unwrap();
                assert_eq!(whole, ids(line, "ids_special"), "{text:?}");
                assert_eq!(tokenizer.decode(&want, Special::Parse), line["decoded"], "{text:?}");
                let skip = tokenizer.decode(&want, Special::Plain);
                assert_eq!(skip, line["decoded_skip"], "{text:?}");
                expect_streams(tokenizer, &want);
            }
        }
    }
}

#[test]
fn small_tokenizers_survive_gguf_and_json() {
    for (name, pre) in [("bytes", "dbrx"), ("spaces", "default")] {
        let (tokenizer, vectors) = tiny(name);
        let vocab = tokenizer.to_gguf().unwrap();
        assert_eq!(vocab.pre.as_deref(), Some(pre));
        let again = Tokenizer::from_gguf("a.gguf", vocab.clone()).unwrap();
        let json = again.to_json().unwrap();
        let third = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
        for line in &vectors {
            // GGUF has neither NFC nor tokens that take white space.
            let text = line["text"].as_str().unwrap().replace(['\u{301}', '<'], "");
            let want = tokenizer.encode_with_begin(&text, Special::Parse).unwrap();
            for other in [&again, &third] {
                assert_eq!(other.encode_with_begin(&text, Special::Parse).unwrap(), want);
            }
        }
        let fourth = Tokenizer::from_gguf("b.gguf", again.to_gguf().unwrap()).unwrap();
        assert_eq!(fourth.to_gguf().unwrap(), again.to_gguf().unwrap());
    }
}

#[test]
fn a_stream_after_a_prompt_keeps_its_first_space() {
    let (tokenizer, _) = tiny("spaces");
    let ids = tokenizer.encode("the loss", Special::Parse).unwrap();
    let text = |mut stream: Stream<&Tokenizer>| {
        let text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text + &stream.finish()
    };
    assert_eq!(text(tokenizer.stream()), "the loss");
    assert_eq!(text(tokenizer.stream().after(&ids)), " the loss");
    let foreign = through_the_crate(&tokenizer);
    assert_eq!(text(foreign.stream().after(&ids)), " the loss");
}

#[test]
fn tokens_have_names_bytes_and_roles() {
    let (mut tokenizer, _) = tiny("spaces");
    let mark = tokenizer.id("<mark>").unwrap();
    assert_eq!(tokenizer.n_vocab(), mark as usize + 1);
    assert_eq!(tokenizer.token(mark).as_deref(), Some("<mark>"));
    assert_eq!((tokenizer.token(mark + 1), tokenizer.bytes(mark + 1)), (None, None));
    let newline = tokenizer.id("<0x0A>").unwrap();
    assert_eq!(tokenizer.bytes(newline), Some(vec![b'\n']));
    assert_eq!(tokenizer.bytes(tokenizer.id("\u{2581}the").unwrap()), Some(b" the".to_vec()));
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.role("unk")), (None, None, Some(0)));
    assert_eq!(tokenizer.eog(), [2]);
    tokenizer.set_specials(Some("<s>"), Some("<mark>"));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(mark)));
    assert_eq!(tokenizer.eog(), [2, mark]);
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(mark) && !tokenizer.is_special(9999));
    tokenizer.set_specials(Some("no such token"), None);
    tokenizer.add_eog(u32::MAX);
    assert_eq!((tokenizer.bos(), tokenizer.eog().len()), (Some(1), 2));
    assert_eq!(tokenizer.decode(&[u32::MAX, 5000], Special::Parse), "");
}

/// The cases of one kind that are known to be hard, with the wanted outcome.
fn malformed(kind: &str) -> Vec<(PathBuf, String)> {
    let Some(folder) = real("malformed/files") else { return Vec::new() };
    let cases = jsonl(&folder.join("cases.jsonl"));
    let cases = cases.iter().filter(|case| case["kind"] == kind);
    let text = |case: &Value, key: &str| case[key].as_str().unwrap().to_string();
    cases.map(|case| (folder.join(text(case, "file")), text(case, "expect"))).collect()
}

/// Whether `result` is what is wanted; what is accepted must encode and decode.
fn expect_outcome(path: &Path, want: &str, result: Result<Tokenizer>) {
    let name = path.display();
    match &result {
        Ok(tokenizer) => {
            assert_ne!(want, "reject", "{name} is accepted");
            // One of the files has a token of a megabyte for what is unknown.
            let is_large = tokenizer.token(0).is_some_and(|token| token.len() > 1000);
            let run = "a".repeat(if is_large { 1 } else { 2000 });
            let text = format!("abc <x> {run}b\u{1F680}\n");
            for special in [Special::Parse, Special::Plain] {
                let ids = tokenizer.encode(&text, special).unwrap_or_default();
                assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_vocab()), "{name}");
                tokenizer.decode(&ids, special);
                expect_streams(tokenizer, &ids);
            }
            let _ = (tokenizer.to_json(), tokenizer.to_gguf());
        }
        Err(error) => {
            assert_ne!(want, "accept", "{name}: {error}");
            assert!(error.report().contains("hint: "), "{error}");
        }
    }
}

#[test]
fn malformed_tokenizer_files_are_refused_or_harmless() {
    let cases = malformed("tokenizer");
    for (path, want) in &cases {
        expect_outcome(path, want, Tokenizer::from_json("t.json", &read(path)));
    }
    let ok = cases.iter().filter(|case| case.1 == "accept");
    for (path, _) in ok {
        let tokenizer = Tokenizer::from_json("t.json", &read(path)).unwrap();
        assert_eq!(tokenizer.encode("abc", Special::Parse).unwrap(), [2, 3], "{path:?}");
    }
}

#[test]
fn malformed_merges_are_refused_or_harmless() {
    // Every text that a line of these files may name.
    let texts = ["a", "b", "c", "ab", "abc", "#", "##", "####", "a\u{a0}", "a\u{a0}b"];
    let vocab: BTreeMap<&str, usize> = texts.into_iter().zip(0..).collect();
    let vocab = serde_json::to_vec(&vocab).unwrap();
    for (path, want) in malformed("merges") {
        let files = ["vocab.json", "merges.txt"];
        let result = Tokenizer::from_vocab_merges(files, &vocab, &read(&path), "gpt-2");
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        if let Ok(tokenizer) = &result {
            let text = if name == "hash_merge" { "####" } else { "ab" };
            let got = tokenizer.encode(text, Special::Parse).unwrap();
            assert_eq!(
                got,
                tokenizer.id(text).filter(|_| name != "nbsp").map_or(vec![0, 1], |id| vec![id])
            );
        }
        expect_outcome(&path, &want, result);
    }
}

#[test]
fn malformed_gguf_vocabularies_are_refused_or_harmless() {
    let names = [
        "ok",
        "scores_short",
        "types_short",
        "types_bad",
        "eos_range",
        "bos_300",
        "tokens_dup",
        "tokens_nonutf8",
        "tok_model_unknown",
        "bpe_no_merges",
        "bpe_merges_bad",
        "bpe_merges_unknown",
        "token_1mb",
    ];
    let cases = malformed("gguf_model");
    let find = |name: &str| {
        let is_it = |case: &&(PathBuf, String)| case.0.file_stem().unwrap() == name;
        cases.iter().find(is_it).unwrap()
    };
    for name in names.iter().filter(|_| !cases.is_empty()) {
        let (path, want) = find(name);
        let result = Tokenizer::from_gguf("m.gguf", gguf_vocab(path));
        if let Ok(tokenizer) = &result {
            let n = tokenizer.n_vocab() as u32;
            assert!(tokenizer.eog().iter().chain(&tokenizer.eos()).all(|id| *id < n), "{name}");
        }
        expect_outcome(path, want, result);
    }
}

#[test]
fn vocab_and_merges_give_the_ids_of_the_tokenizer_json_beside_them() {
    let Some(folder) = real("tokenizers/gpt2") else { return };
    let [vocab, merges] = ["vocab.json", "merges.txt"].map(|name| read(&folder.join(name)));
    let files = ["vocab.json", "merges.txt"];
    let tokenizer = Tokenizer::from_vocab_merges(files, &vocab, &merges, "gpt-2").unwrap();
    for line in jsonl(&folder.join("vectors.jsonl")) {
        let text = line["text"].as_str().unwrap();
        let got = tokenizer.encode(text, Special::Parse).unwrap();
        // This vocabulary knows its special token by name alone, as the other does by its file.
        assert_eq!(got, ids(&line, "ids"), "{text:?}");
    }
    let error = Tokenizer::from_vocab_merges(files, &vocab, b"a b c", "gpt-2").err().unwrap();
    assert!(error.report().contains("line 1"), "{error}");
    let error = Tokenizer::from_vocab_merges(files, &vocab, b"qq zz", "gpt-2").err().unwrap();
    assert!(error.report().contains("is not in the vocabulary"), "{error}");
}

#[test]
fn a_million_letters_without_a_break_are_encoded() {
    let (bytes, _) = tiny("bytes");
    let (spaces, _) = tiny("spaces");
    let gguf = Tokenizer::from_gguf("a.gguf", spaces.to_gguf().unwrap()).unwrap();
    for text in ["ab".repeat(500_000), " ".repeat(1_000_000), "\u{4e2d}".repeat(300_000)] {
        for tokenizer in [&bytes, &spaces, &gguf] {
            let ids = tokenizer.encode(&text, Special::Parse).unwrap();
            assert_eq!(tokenizer.decode(&ids, Special::Parse), text);
        }
    }
}

/// A byte-level GGUF vocabulary of all bytes and these tokens.
fn small_gguf(tokens: &[&str], merges: &[&str]) -> GgufVocab {
    let letters = (0..=255).map(|byte| tokens::byte_char(byte).to_string().into_bytes());
    GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: letters.chain(tokens.iter().map(|text| text.as_bytes().to_vec())).collect(),
        merges: Some(merges.iter().map(|text| text.as_bytes().to_vec()).collect()),
        ..GgufVocab::default()
    }
}

#[test]
fn the_first_of_equal_merges_counts_in_gguf_and_the_last_in_files() {
    // With `a b` first, `abc` is `ab c`; with `a b` last it is `a bc`.
    let (tokens, merges) = (["ab", "bc"], ["a b", "b c", "a b"]);
    let tokenizer = Tokenizer::from_gguf("m.gguf", small_gguf(&tokens, &merges)).unwrap();
    let names = |tokenizer: &Tokenizer| -> Vec<String> {
        let ids = tokenizer.encode("abc", Special::Parse).unwrap();
        ids.iter().map(|id| tokenizer.token(*id).unwrap()).collect()
    };
    assert_eq!(names(&tokenizer), ["ab", "c"]);
    let vocab = br#"{"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}"#;
    let text = merges.join("\n");
    let files = ["vocab.json", "merges.txt"];
    let tokenizer = Tokenizer::from_vocab_merges(files, vocab, text.as_bytes(), "gpt-2").unwrap();
    assert_eq!(names(&tokenizer), ["a", "bc"]);
}

#[test]
fn a_result_that_is_no_token_comes_out_as_its_letters() {
    let tokenizer = Tokenizer::from_gguf("m.gguf", small_gguf(&[], &["a b", "ab c"])).unwrap();
    let ids = tokenizer.encode("xabcab", Special::Parse).unwrap();
    assert_eq!(tokenizer.decode(&ids, Special::Parse), "xabcab");
    assert_eq!(ids.len(), 6);
}

#[test]
fn a_word_that_is_a_token_is_taken_whole_only_where_merges_are_ignored() {
    let mut vocab = small_gguf(&["abc"], &[]);
    let n_ids = |vocab: GgufVocab| {
        let tokenizer = Tokenizer::from_gguf("m.gguf", vocab).unwrap();
        tokenizer.encode("abc", Special::Parse).unwrap().len()
    };
    assert_eq!(n_ids(vocab.clone()), 3);
    vocab.pre = Some("llama-bpe".into());
    assert_eq!(n_ids(vocab), 1);
}

#[test]
fn sentencepiece_does_not_cut_where_a_token_holds_a_space() {
    let texts = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "a\u{2581}", "a\u{2581}b"];
    let vocab = GgufVocab {
        model: "llama".into(),
        tokens: texts.iter().map(|text| text.as_bytes().to_vec()).collect(),
        scores: Some(vec![0.0, 0.0, 0.0, -5.0, -5.0, -5.0, -2.0, -1.0]),
        token_types: Some(vec![2, 3, 3, 1, 1, 1, 1, 1]),
        flags: BTreeMap::from([("add_space_prefix".into(), false)]),
        ..GgufVocab::default()
    };
    let tokenizer = Tokenizer::from_gguf("m.gguf", vocab).unwrap();
    assert_eq!(tokenizer.encode("a b", Special::Plain).unwrap(), [7]);
    assert_eq!(tokenizer.encode_with_begin("b b", Special::Plain).unwrap(), [1, 5, 3, 5]);
    assert_eq!(tokenizer.encode("</s>b", Special::Parse).unwrap(), [2, 5]);
}

#[test]
fn metaspace_puts_a_space_where_there_is_none() {
    let (tokenizer, _) = tiny("spaces");
    let mut file: Value = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
    file["normalizer"] = Value::Null;
    for scheme in ["always", "first", "never"] {
        file["pre_tokenizer"] = serde_json::json!({
            "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme,
            "split": false,
        });
        let json = file.to_string();
        let own = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
        assert!(matches!(own.codec, Codec::Own(_)));
        let foreign = foreign::read("tokenizer.json", &json).unwrap();
        let mut seed = 17;
        for _ in 0..500 {
            let n = draw(&mut seed, 8);
            let text: String = (0..n).map(|_| PIECES[draw(&mut seed, PIECES.len())]).collect();
            for text in [text.clone(), format!("<|end|>{text}<mark> {text}")] {
                let got = own.encode(&text, Special::Parse).unwrap();
                assert_eq!(
                    got,
                    foreign.encode(&text, Special::Parse).unwrap(),
                    "{scheme}: {text:?}"
                );
            }
        }
    }
}

#[test]
fn added_ids_that_the_crate_would_not_give_are_left_to_it() {
    let (tokenizer, _) = tiny("bytes");
    let mut file: Value = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
    file["added_tokens"][1]["id"] = 7.into();
    let json = file.to_string();
    let odd = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
    assert!(matches!(odd.codec, Codec::Foreign(_)));
    assert_eq!(odd.encode("<mark>", Special::Parse).unwrap(), [420]);
}

#[test]
fn an_unknown_pre_tokenizer_has_no_place_in_a_gguf() {
    let (tokenizer, _) = tiny("bytes");
    let mut file: Value = serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap();
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "zork+".into();
    let json = file.to_string();
    let odd = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
    let error = odd.to_gguf().err().unwrap().report();
    assert!(error.contains("zork"), "{error}");
}
