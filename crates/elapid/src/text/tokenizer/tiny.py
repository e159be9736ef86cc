"""Makes tiny.json: two small tokenizers and what Hugging Face tokenizers says of some texts.

Run in the root of the project, with `pip install tokenizers`:
    python crates/elapid/src/tokenizer/tiny.py
"""

import json
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

TEXTS = [
    "", " ", "  ", "a", " a", "Hello world", " Hello  world\n", "the tape's records, the TAPE'S",
    "x = 12345.678\n\n\tfn step(tok: usize) -> Result<()> {\n        loss += 1;\n    }\r\n",
    "e\u0301 \u00e9 \u00bd \u0663\u0664", "\u4e2d\u6587 \uac00\ub098 \U0001f680\U0001f469\u200d\U0001f4bb",
    "\u00a0\u3000\u0085 a", "<|end|>", "a<|end|> b <|end|>", "<|end", "<mark>x <mark>", "  <mark>  y",
    "<|end|><mark><|end|>", "\u2581a \u2581", "a\u0000b", "''' 'Re 'LL 'd 's", "!!??...///\n\n//",
    "gradients of the loss gradients of the loss" * 3, "z" * 70, " " * 70, "\n" * 5 + " \n x",
]
FAMILY = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(FAMILY), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)


def spaces_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    # Words for training only: without them lines would become tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "<|end|>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, limit_alphabet=50, show_progress=False)


def finished(tokenizer, name):
    if name == "spaces":
        tokenizer.pre_tokenizer = None
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
        # Training made the bytes special.
        file = json.loads(tokenizer.to_str())
        file["added_tokens"] = [t for t in file["added_tokens"] if not t["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.add_tokens([AddedToken("<mark>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


def vectors(tokenizer):
    for text in TEXTS:
        tokenizer.encode_special_tokens = False
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        whole = tokenizer.encode(text, add_special_tokens=True).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        yield {
            "text": text, "ids": ids, "ids_special": whole, "ids_plain": plain,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),
            "decoded_skip": tokenizer.decode(ids, skip_special_tokens=True),
        }


corpus = [path.read_text() for path in sorted(pathlib.Path(".").glob("*.md"))]
made = {}
for name, (tokenizer, trainer) in [("bytes", bytes_tokenizer()), ("spaces", spaces_tokenizer())]:
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer = finished(tokenizer, name)
    made[name] = {"tokenizer": json.loads(tokenizer.to_str()), "vectors": list(vectors(tokenizer))}
path = pathlib.Path("crates/elapid/src/tokenizer/tiny.json")
path.write_text(json.dumps(made, separators=(",", ":")) + "\n")
