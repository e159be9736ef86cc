"""LoRA training of a model directory with PyTorch and peft: tokens a second and peak memory, as JSON.

    python lab/bench/bench_lora_torch.py SmolLM2-135M --rows 4 --context 512 --rank 16

Beside it: `elapid train . --model SmolLM2-135M --batch 4 --context 512 --rank 16 --steps 12 --json`.
"""

import argparse
import json
import resource
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

torch.set_num_threads(args.threads)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
settings = LoraConfig(
    r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
)
model = get_peft_model(model, settings)
model.train()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=4e-4, fused=True)
ids = torch.randint(0, model.config.vocab_size, (args.rows, args.context))
times = []
for step in range(args.steps + 2):
    begin = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step >= 2:
        times.append(time.perf_counter() - begin)
times.sort()
n_tok = args.rows * args.context
print(json.dumps({
    "engine": f"torch {torch.__version__} + peft", "n_trained": sum(p.numel() for p in trained),
    "rows": args.rows, "context": args.context, "rank": args.rank, "threads": args.threads,
    "tok_s_med": n_tok / times[len(times) // 2], "tok_s_best": n_tok / times[0],
    "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
