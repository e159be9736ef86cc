"""Greedy text of a GGUF file by llama.cpp and by `elapid generate`, token by token.

usage: python llamacpp_greedy.py MODEL.gguf [PROMPTS] [--elapid PATH] [--tokens 64] [--threads 2]

PROMPTS is a file of one prompt per line; without it twenty are used that are written here. Both
begin with the same ids, those that elapid made of the prompt. Where they part, the two likeliest
logits of llama.cpp at that place are compared: a difference is only allowed where they are within
--gap of each other. Behind that place the texts have nothing in common any more, so that it ends
the comparison of its prompt. Exit code 1 if any prompt fails.
"""
import argparse
import json
import subprocess
import sys

import llama_cpp as C
import numpy as np
from llama_logits import Model

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "fn main() {\n    let mut total = 0;\n",
    "The three laws of motion are",
    "Water boils at",
    "In the year 1969,",
    "Dear Sir or Madam,\n\n",
    "import numpy as np\n\n",
    "Photosynthesis is the process by which",
    "1, 2, 3, 5, 8,",
    "Roses are red,",
    "The quick brown fox",
    "A good recipe for bread begins with",
    "SELECT name, count(*) FROM",
    "She opened the door and",
    "The largest planet in the solar system",
    "To be, or not to be,",
    "<html>\n<head>\n",
    "How do you do? I am",
]


def by_elapid(elapid, path, prompt, args):
    command = [elapid, "generate", path, "-p", prompt, "-n", str(args.tokens), "--temperature", "0",
               "--repeat-penalty", "1", "--threads", str(args.threads), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"elapid failed on {prompt!r}: {done.stderr}")
    return json.loads(done.stdout)


def by_llama(model, begin, n_tokens):
    """Greedy tokens of llama.cpp, one pass each, with the logits that each was chosen from."""
    C.llama_memory_clear(C.llama_get_memory(model.context), True)
    ids, rows, new = [], [], begin
    while len(ids) < n_tokens:
        tokens = (C.llama_token * len(new))(*new)
        if C.llama_decode(model.context, C.llama_batch_get_one(tokens, len(new))) != 0:
            raise SystemExit("llama_decode failed")
        row = np.ctypeslib.as_array(C.llama_get_logits_ith(model.context, -1), (model.n_vocab,)).copy()
        rows.append(row)
        new = [int(np.argmax(row))]
        if C.llama_vocab_is_eog(model.vocab, new[0]):
            break
        ids += new
    return ids, rows


def compare(model, found, n_tokens):
    """Where the two part: (position, its token, ours, gap), or None."""
    ours = found["ids"]
    theirs, rows = by_llama(model, found["prompt_ids"], n_tokens)
    if ours == theirs and (found["finish"] == "length" or len(ours) < n_tokens):
        return None
    at = lambda list, position: list[position] if position < len(list) else None
    position = next(n for n in range(n_tokens + 1) if at(ours, n) is None or at(ours, n) != at(theirs, n))
    return position, at(theirs, position), at(ours, position), gap(rows[position])


def gap(row):
    two = np.partition(row, -2)[-2:]
    return float(abs(two[1] - two[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="?")
    parser.add_argument("--elapid", default="target/release/elapid")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gap", type=float, default=1e-2)
    args = parser.parse_args()
    prompts = PROMPTS
    if args.prompts:
        prompts = [line.rstrip("\n") for line in open(args.prompts, encoding="utf-8") if line.strip()]
    model = Model(args.model, threads=args.threads)
    n_equal, n_near, n_failed = 0, 0, 0
    for prompt in prompts:
        found = by_elapid(args.elapid, args.model, prompt, args)
        parted = compare(model, found, args.tokens)
        if parted is None:
            n_equal += 1
            print(f"equal   {len(found['ids']):3} tokens  {prompt!r}")
            continue
        position, theirs, ours, distance = parted
        is_near = distance <= args.gap
        n_near, n_failed = n_near + is_near, n_failed + (not is_near)
        word = "near" if is_near else "FAILED"
        print(f"{word:<8}differs at token {position}: llama.cpp {theirs}, elapid {ours}, "
              f"its two likeliest logits are {distance:.2e} apart  {prompt!r}")
    print(f"total   {len(prompts)} prompts: {n_equal} equal, {n_near} near, {n_failed} failed")
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
