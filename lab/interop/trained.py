"""An adapter that `elapid train` wrote, in peft: the same loss on a text, unmerged and merged.

    python lab/interop/trained.py ELAPID BASE_DIRECTORY ADAPTER_DIRECTORY TEXT
"""

import json
import subprocess
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

elapid, base, adapter, text = sys.argv[1:]
CONTEXT = 256
command = [elapid, "eval", base, text, "--adapter", adapter, "--json"]
command += ["--context", str(CONTEXT), "--overlap", "0"]
ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

tokenizer = AutoTokenizer.from_pretrained(base)
ids = tokenizer(open(text).read(), add_special_tokens=False)["input_ids"]
ids = ([ours["begin"]] if ours["begin"] is not None else []) + ids
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()


def loss(model):
    total, n = 0.0, 0
    for start in range(0, len(ids) - 1, CONTEXT):
        window = torch.tensor([ids[start : start + CONTEXT + 1]])
        with torch.no_grad():
            logits = model(input_ids=window[:, :-1]).logits
        nll = torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum")
        total, n = total + nll.item(), n + window.shape[1] - 1
    return total / n


unmerged = loss(model)
merged = loss(model.merge_and_unload())
worst = max(abs(ours["loss"] - unmerged), abs(ours["loss"] - merged))
print(f"elapid {ours['loss']:.6f}  peft {unmerged:.6f}  merged {merged:.6f}  worst {worst:.1e}")
sys.exit(worst > 1e-4)
