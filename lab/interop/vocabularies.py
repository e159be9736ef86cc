#!/usr/bin/env python3
"""Tokenizers that Elapid writes, read by transformers and llama.cpp.

    python lab/interop/vocabularies.py target/release/elapid model.gguf DIRECTORY ...

Each model is converted to a directory and to a GGUF file. Then transformers' ids (from the
directory) and llama.cpp's ids (from the file) are compared with Elapid's from the original, text by
text, special tokens as text and as tokens.
"""
import os
import subprocess
import sys
import tempfile

import transformers
from llama_logits import Model

TEXTS = [
    "Hello, world!", " leading", "trailing ", "two  spaces", "tab\tand\nnewlines\n\n\n", "",
    "fn main() {\n    println!(\"{}\", 1_000_000);\n}\n", "I'm you're WE'LL it's", "3.14159 12345678",
    "Äpfel naïve café", "你好，世界", "привет мир", "👩‍👩‍👧 emoji 🚀", "a\u0301 combining", "\u00a0nbsp\u3000wide",
    "<|im_start|>user\nhi<|im_end|>", "</s><s>", "x" * 300, "   \n   indented\n\t\tmore", "\r\n\r\nwindows\r\n",
]


def ours(binary, path, text, special):
    args = [binary, "tokenize", path] + (["--special"] if special else [])
    done = subprocess.run(args, input=text.encode(), capture_output=True)
    return [int(x) for x in done.stdout.split()]


def main():
    binary = os.path.abspath(sys.argv[1])
    print(f"{'model':<28}{'texts':>6}{'transformers':>14}{'llama.cpp':>11}")
    for path in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as tmp:
            for out in ("dir", "model.gguf"):
                done = subprocess.run([binary, "convert", path, f"{tmp}/{out}"], capture_output=True, text=True)
                if done.returncode:
                    print(path, done.stderr)
            theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{tmp}/dir/tokenizer.json")
            model = Model(f"{tmp}/model.gguf", n_ctx=64)
            alike = [0, 0]
            for text in TEXTS:
                plain, parsed = (ours(binary, path, text, special) for special in (False, True))
                # transformers always takes special tokens in a text for what they are.
                alike[0] += theirs.encode(text, add_special_tokens=False) == parsed
                both = model.tokenize(text) == plain and model.tokenize(text, True) == parsed
                alike[1] += both
                if not both:
                    print("  llama.cpp:", repr(text), model.tokenize(text), plain)
                if theirs.encode(text, add_special_tokens=False) != parsed:
                    print("  transformers:", repr(text), theirs.encode(text, add_special_tokens=False), parsed)
            name = os.path.basename(path.rstrip("/"))[:26]
            print(f"{name:<28}{len(TEXTS):>6}{alike[0]:>14}{alike[1]:>11}")


main()
