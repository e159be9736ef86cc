#!/usr/bin/env python3
"""The perplexity of a model on a text, by Elapid and by llama.cpp, on the same windows.

Windows do not overlap; each is asked for the token behind it too. Begin and end of the text are
tokens of their own.

    python lab/interop/perplexity.py target/release/elapid model.gguf text.txt [context]

Wants llama-cpp-python. The tokens are compared first: they must be the same.
"""
import json
import subprocess
import sys

import numpy as np
from llama_logits import Model

binary, path, text = sys.argv[1:4]
context = int(sys.argv[4]) if len(sys.argv) > 4 else 512
model = Model(path, n_ctx=context)
ids = model.tokenize(open(text, encoding="utf-8").read())
done = subprocess.run([binary, "tokenize", path, "--file", text], capture_output=True, text=True)
print("tokens ", len(ids), "alike" if ids == [int(x) for x in done.stdout.split()] else "DIFFERENT")
done = subprocess.run([binary, "eval", path, text, "--context", str(context), "--overlap", "0",
                       "--json"], capture_output=True, text=True)
ours = json.loads(done.stdout)
ends = [[ours[key]] if ours[key] is not None else [] for key in ("begin", "end")]
ids = ends[0] + ids + ends[1]
total, count = 0.0, 0
for begin in range(0, len(ids) - 1, context):
    window = ids[begin:begin + context + 1]
    logits = model.logits(window[:-1]).astype(np.float64)
    top = logits.max(-1)
    log_sum = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    total += (log_sum - logits[np.arange(len(window) - 1), window[1:]]).sum()
    count += len(window) - 1
theirs = total / count
print(f"elapid     {ours['n_tok']} tokens  loss {ours['loss']:.6f}  perplexity {ours['perplexity']:.5f}")
print(f"llama.cpp  {count} tokens  loss {theirs:.6f}  perplexity {np.exp(theirs):.5f}")
print(f"ratio      {ours['perplexity'] / np.exp(theirs):.6f}")
