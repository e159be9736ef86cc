#!/usr/bin/env python3
"""Adapters against PEFT and llama.cpp.

    python lab/interop/adapters.py target/release/elapid [--sets golden/sets] [--only qwen2]
        [--convert-lora path/to/llama.cpp/convert_lora_to_gguf.py]

For each base an adapter of every linear map is made up: ranks and alphas that differ, both halves
random. What it should compute is known without PEFT: the base with the products added to its
weights, run by transformers. Then, each against that reference, as the largest difference of a
logit:

    ours       elapid, with the adapter as PEFT writes it
    peft       PEFT, with the directory that `elapid convert` wrote (no key missing or unexpected)
    llama.cpp  llama.cpp, with the GGUF adapter that `elapid convert` wrote
    back       PEFT, with that GGUF adapter converted to a directory again
    theirs     PEFT, with the GGUF adapter of llama.cpp's own converter converted to a directory;
               one rank and one alpha, since that converter knows no others
    dora       elapid, with a DoRA adapter as PEFT writes it
    dora peft  PEFT, with that adapter as `elapid convert` wrote it

Some modules are left out of the adapters for PEFT: `out_proj` on the families where PEFT refuses
it, and the `dt_proj` of Mamba-1, whose weight transformers takes past the adapter. Needs torch,
transformers, peft, safetensors, numpy and llama-cpp-python. Exits with 1 when something differs.
"""
import argparse
import json
import math
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from llama_logits import Model as LlamaModel

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Set, and whether llama.cpp and GGUF take part.
SETS = {
    "llama_gqa_untied": True,
    "qwen2": True,
    "qwen3": True,
    "mamba": True,
    "mamba2": True,
    "jamba": True,
    "granitemoehybrid_dense": True,
    "falcon_h1": True,
    "mixtral": True,
    "falcon_mamba": False,
}
# Families, and modules of theirs that PEFT refuses (its function _check_lora_target_modules_mamba)
# or that transformers' forward pass does not see as adapted.
NOT_IN_PEFT = {
    "mamba": {"out_proj", "dt_proj"},
    "falcon_mamba": {"out_proj", "dt_proj"},
    "mamba2": {"out_proj"},
    "falcon_h1": {"out_proj"},
    "jamba": {"dt_proj"},
}
# llama.cpp's converter fails on Falcon-H1; with transformers 5, which renames the layer types of
# Granite, it leaves the rows of Granite's queries and keys unpaired.
NOT_THEIRS = {"falcon_h1", "granitemoehybrid_dense"}
TOLERANCE = 1e-3


def load_base(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def norm_per_group(n_groups):
    """The gated norm of mamba_ssm and llama.cpp, where transformers takes all channels at once."""

    def forward(self, hidden, gate=None):
        if gate is not None:
            hidden = hidden * torch.nn.functional.silu(gate)
        split = hidden.unflatten(-1, (n_groups, -1))
        split = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * split.flatten(-2)

    transformers.models.mamba2.modeling_mamba2.MambaRMSNormGated.forward = forward


def linears(model):
    """Linear maps that can be adapted: a head that is the embedding cannot."""
    tied = model.config.tie_word_embeddings
    return {name: module for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and not (tied and name == "lm_head")}


def make_adapter(model, names, out, uniform=False, rslora=False, dora=False):
    """Writes an adapter as PEFT would; returns what it adds to each weight."""
    rng = torch.Generator().manual_seed(7)
    ranks, alphas = ([4], [8]) if uniform else ([4, 4, 2, 6], [8, 8, 8, 3, 5])
    tensors, deltas, rank_pattern, alpha_pattern = {}, {}, {}, {}
    for idx, name in enumerate(names):
        weight = model.get_submodule(name).weight
        rank, alpha = ranks[idx % len(ranks)], alphas[idx % len(alphas)]
        a = torch.randn(rank, weight.shape[1], generator=rng) * 0.15
        b = torch.randn(weight.shape[0], rank, generator=rng) * 0.15
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        factor = alpha / (math.sqrt(rank) if rslora else rank)
        delta = b.double() @ a.double() * factor
        if dora:
            whole = weight.detach().double() + delta
            lengths = weight.detach().norm(dim=1) * (1 + 0.2 * torch.randn(len(b), generator=rng))
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = lengths
            delta = whole * (lengths / whole.norm(dim=1))[:, None] - weight.detach()
        deltas[name] = delta.float()
        if rank != 4:
            rank_pattern[name] = rank
        if alpha != 8:
            alpha_pattern[name] = alpha
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(names), use_rslora=rslora, task_type="CAUSAL_LM",
        rank_pattern=rank_pattern, alpha_pattern=alpha_pattern, inference_mode=True,
        base_model_name_or_path=str(Path(model.config._name_or_path).resolve()), use_dora=dora,
    )
    out.mkdir(parents=True)
    config.save_pretrained(out)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return deltas


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def merged_logits(base_dir, deltas, ids):
    model = load_base(base_dir)
    with torch.no_grad():
        for name, delta in deltas.items():
            model.get_submodule(name).weight += delta
    return logits_of(model, ids)


def peft_logits(base_dir, adapter, ids):
    model = load_base(base_dir)
    config = peft.LoraConfig.from_pretrained(adapter)
    model = peft.get_peft_model(model, config)
    result = model.load_adapter(str(adapter), "default", is_trainable=False)
    missing = [key for key in result.missing_keys if "lora_" in key]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"missing {missing}, unexpected {result.unexpected_keys}")
    params = [key for key, _ in model.named_parameters() if "lora_" in key]
    wanted = {key.replace(".default", "") for key in params}
    # PEFT leaves the end of this one name out of its files.
    wanted = {key.replace("magnitude_vector.weight", "magnitude_vector") for key in wanted}
    if wanted != set(load_file(adapter / "adapter_model.safetensors")):
        raise RuntimeError("PEFT adapts other modules than the file holds")
    return logits_of(model.eval(), ids)


def elapid(*args):
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True)
    if done.returncode != 0:
        problem = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"{args[1]} {args[2]}: {problem}")
    return done.stdout


def our_difference(binary, base_dir, adapter, ids, reference, scratch):
    """`elapid check` on a set whose reference is that of the merged model."""
    scratch.mkdir()
    (scratch / "adapter").symlink_to(adapter.resolve())
    logits = torch.tensor(reference)[None]
    labels = torch.tensor([ids])
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
    tensors = {"input_ids": labels, "labels": labels.clone(), "logits": logits, "loss": loss}
    # A set has gradients; this one is wrong, and not looked at.
    name, half = next(iter(load_file(adapter / "adapter_model.safetensors").items()))
    tensors[f"grad.{name}"] = torch.zeros_like(half)
    save_file(tensors, scratch / "golden.safetensors")
    args = [binary, "check", scratch, "--json", "--model", base_dir]
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        if row["quantity"] == "logits":
            return row["error"]
    raise RuntimeError(f"check: {done.stderr.strip()}")


class Bench:
    def __init__(self, args, name, scratch):
        self.binary, self.converter = args.binary.resolve(), args.convert_lora
        self.base, self.scratch, self.name = args.sets / name, scratch, name
        self.model = load_base(self.base)
        if self.model.config.model_type == "mamba2":
            norm_per_group(self.model.config.n_groups)
        rng = np.random.default_rng(5)
        self.ids = rng.integers(0, self.model.config.vocab_size, 24).tolist()
        self.names = list(linears(self.model))
        left_out = NOT_IN_PEFT.get(self.model.config.model_type, set())
        self.for_peft = [name for name in self.names if name.split(".")[-1] not in left_out]
        self.results = {}

    def note(self, what, got, reference):
        difference = float(np.abs(got - reference).max())
        top1 = bool((got.argmax(-1) == reference.argmax(-1)).all())
        self.results[what] = (difference, top1)

    def attempt(self, what, check):
        try:
            check()
        except Exception as error:  # what fails is a row of the table, not the end of it
            self.results[what] = (math.inf, False)
            print(f"fail    {self.name} {what}: {str(error).splitlines()[0]}", file=sys.stderr)

    def run(self, gguf):
        whole, part = self.scratch / "whole", self.scratch / "part"
        deltas = make_adapter(self.model, self.names, whole)
        reference = merged_logits(self.base, deltas, self.ids)
        plain = logits_of(self.model, self.ids)
        self.effect = float(np.abs(reference - plain).max())
        part_deltas = make_adapter(self.model, self.for_peft, part, rslora=True)
        part_reference = merged_logits(self.base, part_deltas, self.ids)
        self.attempt("ours", lambda: self.ours(whole, reference))
        self.attempt("peft", lambda: self.peft(part, part_reference, "normalised"))
        self.dora()
        if not gguf:
            return
        self.attempt("llama.cpp", lambda: self.llama(whole, reference))
        self.attempt("back", lambda: self.back(part, part_reference))
        if self.converter and self.name not in NOT_THEIRS:
            self.attempt("theirs", self.theirs)

    def ours(self, adapter, reference):
        scratch = self.scratch / "check"
        error = our_difference(self.binary, self.base, adapter, self.ids, reference, scratch)
        self.results["ours"] = (error, True)

    def peft(self, adapter, reference, out):
        out = self.scratch / out
        elapid(self.binary, "convert", adapter, out, "--base", self.base)
        self.note("peft", peft_logits(self.base, out, self.ids), reference)

    def dora(self):
        adapter, out = self.scratch / "dora", self.scratch / "dora_again"
        deltas = make_adapter(self.model, self.for_peft, adapter, dora=True)
        reference = merged_logits(self.base, deltas, self.ids)

        def ours():
            scratch = self.scratch / "check_dora"
            error = our_difference(self.binary, self.base, adapter, self.ids, reference, scratch)
            self.results["dora"] = (error, True)

        def theirs():
            elapid(self.binary, "convert", adapter, out, "--base", self.base)
            self.note("dora peft", peft_logits(self.base, out, self.ids), reference)

        self.attempt("dora", ours)
        self.attempt("dora peft", theirs)

    def llama(self, adapter, reference):
        base, out = self.scratch / "base.gguf", self.scratch / "whole.gguf"
        elapid(self.binary, "convert", self.base, base)
        elapid(self.binary, "convert", adapter, out, "--base", base)
        self.note("llama.cpp", LlamaModel(base, adapter=out).logits(self.ids), reference)

    def back(self, adapter, reference):
        file, out = self.scratch / "part.gguf", self.scratch / "back"
        elapid(self.binary, "convert", adapter, file, "--base", self.base)
        elapid(self.binary, "convert", file, out, "--base", self.base)
        self.note("back", peft_logits(self.base, out, self.ids), reference)

    def theirs(self):
        adapter, file = self.scratch / "uniform", self.scratch / "theirs.gguf"
        deltas = make_adapter(self.model, self.for_peft, adapter, uniform=True)
        reference = merged_logits(self.base, deltas, self.ids)
        command = [sys.executable, self.converter, adapter, "--base", self.base, "--outfile", file]
        done = subprocess.run([str(arg) for arg in command], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"their converter: {done.stderr.strip().splitlines()[-1]}")
        out = self.scratch / "of_theirs"
        elapid(self.binary, "convert", file, out, "--base", self.base)
        self.note("theirs", peft_logits(self.base, out, self.ids), reference)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path, help="the elapid binary")
    default = Path(__file__).resolve().parents[2] / "golden" / "sets"
    parser.add_argument("--sets", type=Path, default=default, help="directory of base models")
    parser.add_argument("--only", nargs="*", help="these sets alone")
    parser.add_argument("--convert-lora", type=Path, help="llama.cpp's convert_lora_to_gguf.py")
    args = parser.parse_args()
    torch.set_num_threads(2)
    columns = ["ours", "peft", "llama.cpp", "back", "theirs", "dora", "dora peft"]
    print(f"{'base':<24}{'modules':>8}{'effect':>10}" + "".join(f"{c:>12}" for c in columns))
    failed = False
    for name, gguf in SETS.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            bench = Bench(args, name, Path(scratch))
            bench.run(gguf)
        cells = ""
        for column in columns:
            difference, top1 = bench.results.get(column, (None, True))
            is_bad = difference is not None and not (difference <= TOLERANCE and top1)
            failed |= is_bad
            text = "-" if difference is None else f"{difference:.1e}" + ("!" if is_bad else "")
            cells += f"{text:>12}"
        print(f"{name:<24}{len(bench.names):>8}{bench.effect:>10.1e}{cells}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
