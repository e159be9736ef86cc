#!/usr/bin/env python3
"""Models that Elapid writes, read by llama.cpp and transformers.

    python lab/interop/models.py target/release/elapid [golden/sets]

Wants torch, transformers, gguf, llama-cpp-python and safetensors. Every golden set that has a form
in GGUF goes through it and back, and through a package and back; logits of llama.cpp and of
transformers are compared with the golden ones. Then two larger random models are quantised by
Elapid and by llama.cpp, and every tensor's type and bytes are compared.
"""
import json
import os
import subprocess
import sys
import tempfile

import llama_cpp as C
import numpy as np
import torch
import transformers
from gguf import GGUFReader
from llama_logits import Model
from safetensors.numpy import load_file

MIXES = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
         "q2_k", "q3_k_m", "f16", "bf16"]
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def elapid(binary, *args):
    return subprocess.run([binary, *map(str, args)], capture_output=True, text=True)


def same(a, b):
    return open(a, "rb").read() == open(b, "rb").read()


def round_trips(binary, sets, tmp):
    print(f"{'set':<24}{'llama.cpp':>12}{'top-1':>8}{'transformers':>14}  back by gguf, package")
    worst = 0.0
    for name in sorted(os.listdir(sets)):
        source = f"{sets}/{name}"
        if not os.path.exists(f"{source}/model.safetensors"):
            continue
        package, from_package = f"{tmp}/{name}.elapid", f"{tmp}/{name}.p"
        elapid(binary, "convert", source, package)
        elapid(binary, "convert", package, from_package)
        by_package = same(f"{source}/model.safetensors", f"{from_package}/model.safetensors")
        gguf, back = f"{tmp}/{name}.gguf", f"{tmp}/{name}"
        done = elapid(binary, "convert", source, gguf)
        if done.returncode:
            reason = done.stderr.split("\n")[0].replace("error: this model cannot be written as GGUF: ", "")
            print(f"{name:<24}{'-':>12}{'-':>8}{'-':>14}  -, {by_package}  ({reason})")
            continue
        elapid(binary, "convert", gguf, back)
        grouped = f"{source}/golden_grouped.safetensors"
        golden = load_file(grouped if os.path.exists(grouped) else f"{source}/golden.safetensors")
        ids, want = golden["input_ids"], golden["logits"]
        model = Model(gguf)
        got = np.stack([model.logits(row) for row in ids])
        top1 = (got.argmax(-1) == want.argmax(-1)).mean()
        # transformers norms over all groups of Mamba-2: compare with what it computed itself.
        theirs = load_file(f"{source}/golden.safetensors")["logits"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
        with torch.no_grad():
            again = loaded(torch.from_numpy(ids)).logits.numpy()
        far = np.abs(got - want).max()
        worst = max(worst, far)
        by_gguf = same(f"{source}/model.safetensors", f"{back}/model.safetensors")
        print(f"{name:<24}{far:>12.2e}{top1:>8.4f}{np.abs(again - theirs).max():>14.2e}"
              f"  {by_gguf}, {by_package}")
    print(f"worst against llama.cpp: {worst:.2e}")


def random_models(tmp):
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False)
    mamba = transformers.MambaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, state_size=16, time_step_rank=48)
    mixtral = transformers.MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None)
    qwen2moe = transformers.Qwen2MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=256, shared_expert_intermediate_size=512, norm_topk_prob=False,
        decoder_sparse_step=1)
    models = {"llama": llama, "mamba": mamba, "mixtral": mixtral, "qwen2moe": qwen2moe}
    for name, config in models.items():
        path = f"{tmp}/random-{name}"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(path)
        ids = torch.arange(3, 51)[None]
        with torch.no_grad():
            yield name, path, ids[0].tolist(), model(ids).logits[0].numpy()


def ftype(name):
    names = {"bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16"}
    key = names.get(name, "MOSTLY_" + name.upper())
    return getattr(C, "LLAMA_FTYPE_" + key)


def quantised(binary, tmp):
    print(f"\n{'model':<10}{'type':<8}{'tensors':>8}{'types alike':>13}{'bytes alike':>13}")
    for name, source, ids, want in random_models(tmp):
        plain = f"{tmp}/{name}-f32.gguf"
        done = elapid(binary, "convert", source, plain)
        if done.returncode:
            print(name, done.stderr)
            continue
        got = Model(plain).logits(ids)
        print(f"{name:<10}{'f32':<8} llama.cpp against transformers: {np.abs(got - want).max():.2e}, "
              f"top-1 {(got.argmax(-1) == want.argmax(-1)).mean():.4f}")
        for mix in MIXES:
            ours, theirs = f"{tmp}/{name}-{mix}.gguf", f"{tmp}/{name}-{mix}-theirs.gguf"
            elapid(binary, "quantize", plain, ours, "--type", mix)
            params = C.llama_model_quantize_default_params()
            params.ftype, params.nthread = ftype(mix), 2
            if C.llama_model_quantize(plain.encode(), theirs.encode(), params) != 0:
                print(f"{name:<10}{mix:<8} llama.cpp refuses")
                continue
            a = {t.name: t for t in GGUFReader(ours).tensors}
            b = {t.name: t for t in GGUFReader(theirs).tensors}
            types = sum(a[k].tensor_type == b[k].tensor_type for k in b)
            data = sum(a[k].tensor_type == b[k].tensor_type and a[k].data.tobytes() == b[k].data.tobytes()
                       for k in b)
            print(f"{name:<10}{mix:<8}{len(b):>8}{types:>13}{data:>13}")
            for k in b:
                if a[k].tensor_type != b[k].tensor_type:
                    print(f"    {k}: {a[k].tensor_type.name}, llama.cpp {b[k].tensor_type.name}")


if __name__ == "__main__":
    binary = os.path.abspath(sys.argv[1])
    sets = sys.argv[2] if len(sys.argv) > 2 else "golden/sets"
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__,
                      "llama_cpp": C.__version__}))
    with tempfile.TemporaryDirectory() as tmp:
        round_trips(binary, sets, tmp)
        quantised(binary, tmp)
