#!/usr/bin/env python3
"""One f32 training step of a small model in PyTorch, to be measured beside ours.

  elapid bench --torch 'python lab/bench/bench_torch.py'

Needs torch and transformers, and mambapy for the models of that name. A step is forward, backward
and fused AdamW on random tokens. Prints one JSON object: step times, tokens/s, peak memory.
"""
import argparse
import json
import os
import resource
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = ["llama", "mamba", "mamba_mambapy", "mambapy_native", "mamba2"]
    parser.add_argument("--model", choices=models, default="llama")
    parser.add_argument("--compile", action="store_true")
    sizes = dict(threads=2, B=8, T=256, d=384, layers=6, vocab=8192, reps=9)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def build(a):
    """The model, and a function from it and tokens to logits."""
    import transformers as t
    common = dict(vocab_size=a.vocab, hidden_size=a.d, num_hidden_layers=a.layers, use_cache=False,
                  tie_word_embeddings=True)
    if a.model == "llama":
        config = t.LlamaConfig(intermediate_size=1024, num_attention_heads=6, num_key_value_heads=6,
                               max_position_embeddings=a.T, attn_implementation="sdpa", **common)
        model = t.LlamaForCausalLM(config)
    elif a.model in ("mamba", "mamba_mambapy"):
        config = t.MambaConfig(state_size=16, expand=2, use_mambapy=a.model == "mamba_mambapy",
                               **common)
        model = t.MambaForCausalLM(config)
    elif a.model == "mamba2":
        config = t.Mamba2Config(state_size=128, expand=2, head_dim=64, num_heads=a.d * 2 // 64,
                                n_groups=1, chunk_size=64, **common)
        model = t.Mamba2ForCausalLM(config)
    else:
        from mambapy.lm import LM
        from mambapy.mamba import MambaConfig
        config = MambaConfig(d_model=a.d, n_layers=a.layers, d_state=16, expand_factor=2,
                             pscan=True, use_cuda=False)
        return LM(config, vocab_size=a.vocab), lambda model, x: model(x)
    return model, lambda model, x: model(input_ids=x).logits


def main():
    a = arguments()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(a.threads)
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model, logits_of = build(a)
    model.train()
    x, y = (torch.randint(0, a.vocab, (a.B, a.T)) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def loss_of(x, y):
        logits = logits_of(model, x)
        return torch.nn.functional.cross_entropy(logits.view(-1, a.vocab), y.view(-1))

    if a.compile:
        loss_of = torch.compile(loss_of)

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss_of(x, y).backward()
        optimizer.step()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(2):
        step()
    times = sorted(step() for _ in range(a.reps))
    n_tok = a.B * a.T
    best, median = times[0], times[len(times) // 2]
    print(json.dumps(dict(
        bench="train", engine="torch " + torch.__version__, model=a.model, compile=a.compile,
        params=sum(p.numel() for p in model.parameters()), threads=a.threads, B=a.B, T=a.T, d=a.d,
        layers=a.layers, vocab=a.vocab, step_min_ms=best, step_med_ms=median,
        tok_s_best=n_tok / best * 1e3, tok_s_med=n_tok / median * 1e3,
        peak_rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))))


if __name__ == "__main__":
    main()
