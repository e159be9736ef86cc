#!/usr/bin/env python3
"""Training steps of Mamba-1 and Mamba-2 by mamba_ssm, to be measured beside ours on a GPU.

  export MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE
  pip download --no-deps --no-binary :all: --no-build-isolation -d FOLDER mamba_ssm causal_conv1d
  cd FOLDER && for archive in *.tar.gz; do tar xzf $archive; done
  python lab/bench/bench_mamba_ssm.py FOLDER

Fetching wants torch; running wants torch, triton, einops, transformers, nvcc, a C++ compiler and
ninja. Last run with mamba_ssm 2.3.2.post1, causal_conv1d 1.7.0, torch 2.11 and CUDA 13.0. Nothing
is installed: their Python is imported from FOLDER, their CUDA is built into FOLDER/build with the
flags of their setup.py. Only the kernels that these steps call are built: bf16 inputs, f32 weights,
real numbers, and one value of each switch of theirs, which is checked at every launch. The kernels
themselves are as they came. The Triton kernels that Mamba-2 tries out are compiled meanwhile, on
all cores; else the first step compiles them one by one. Half a minute in all on 16 cores.

A step is forward, cross entropy of f32 logits, backward, gradient clipping and fused AdamW, with
f32 weights under bf16 autocast. For each model it prints which compiled kernels a step called,
tokens/s, peak memory, what the memory holds, and the kernels of one step by time: where their sum
is far below the step, the step waits for the host.
"""
import argparse
import collections
import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import sys
import time
import types
from pathlib import Path

# What a Triton kernel is compiled for: H100 and H200.
ARCH, N_MULTIPROCESSORS = 90, 132
B, T, D_MODEL, N_LAYER, VOCAB = 16, 1024, 768, 24, 50280
FLAGS = ["-O3", "-lineinfo", "--use_fast_math", "--expt-relaxed-constexpr",
         "--expt-extended-lambda"] + [
    f"-U__CUDA_NO_{name}__" for name in (
        "HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS", "BFLOAT16_CONVERSIONS",
        "BFLOAT162_OPERATORS", "BFLOAT162_CONVERSIONS")]
# Module: (folder of sources, sources).
EXTENSIONS = {
    "selective_scan_cuda": ("mamba_ssm-*/csrc/selective_scan", [
        "selective_scan.cpp", "selective_scan_fwd_bf16.cu", "selective_scan_bwd_bf16_real.cu"]),
    "causal_conv1d_cuda": ("causal_conv1d-*/csrc", [
        "causal_conv1d.cpp", "causal_conv1d_fwd.cu", "causal_conv1d_bwd.cu",
        "causal_conv1d_update.cu"]),
}
# The one value of each switch that a step of this size takes.
SWITCHES = dict(
    kIsEvenLen=True, kIsVariableB=True, kIsVariableC=True, kDeltaSoftplus=True, kHasZ=True,
    kIsVecLoad=True, kSiluAct=True, kDeterministic=False, kHasSeqIdx=False,
    kHasDfinalStates=False, kChunkSizeL64=False)
SWITCH_HEADER = "#pragma once\n#include <c10/util/Exception.h>\n" + "".join(
    f"#define ONLY_{name} {str(value).lower()}\n" for name, value in SWITCHES.items()) + r"""
#define BOOL_SWITCH(COND, CONST_NAME, ...)                                \
    [&] {                                                                 \
        constexpr bool CONST_NAME = ONLY_##CONST_NAME;                    \
        TORCH_CHECK(static_cast<bool>(COND) == CONST_NAME, #CONST_NAME);  \
        return __VA_ARGS__();                                             \
    }()
"""


def one_type(macro, alias, type_name):
    """Their dispatch over types, with one type left."""
    scalar = {"at::BFloat16": "BFloat16", "float": "Float"}[type_name]
    return (f"#undef {macro}\n#define {macro}(TYPE, NAME, ...) do {{ \\\n"
            f"    TORCH_CHECK(TYPE == at::ScalarType::{scalar}, NAME, \": only {scalar}\"); \\\n"
            f"    using {alias} = {type_name}; __VA_ARGS__(); }} while (0)\n")


DISPATCH = (one_type("DISPATCH_ITYPE_FLOAT_AND_HALF_AND_BF16", "input_t", "at::BFloat16")
            + one_type("DISPATCH_WTYPE_FLOAT_AND_HALF_AND_BF16", "weight_t", "float")
            + one_type("DISPATCH_WTYPE_FLOAT_AND_COMPLEX", "weight_t", "float"))


def trim(source, target, names):
    """Copies sources and leaves in them what a bf16 step with f32 weights instantiates."""
    shutil.copytree(source, target)
    (target / "static_switch.h").write_text(SWITCH_HEADER)
    for name in names:
        text = (target / name).read_text()
        if name.endswith(".cpp"):
            first = "\ntemplate<typename input_t"
            assert first in text, f"{name}: no kernel declared, another version?"
            text = text.replace(first, "\n" + DISPATCH + first, 1)
        else:
            kept = "at::BFloat16, float>"
            assert re.search(rf"^template void \w+<{kept}", text, re.M), f"{name}: nothing is left"
            text = re.sub(rf"^template void \w+<(?!{kept}).*;\s*$", "", text, flags=re.M)
        (target / name).write_text(text)


def build(folder, name):
    """The compiled module; done already if its sources have not changed."""
    from torch.utils.cpp_extension import load
    source = folder / "build" / name
    objects = source / "objects"
    objects.mkdir(exist_ok=True)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{ARCH / 10}"
    return load(name, [str(source / file) for file in EXTENSIONS[name][1]],
                extra_cflags=["-O3"], extra_cuda_cflags=FLAGS, build_directory=str(objects),
                extra_include_paths=[str(source)])


class NoDriver:
    """Tells Triton what to compile for, on a process that never touches the GPU."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", ARCH, 32)


def compile_triton(rank, n_ranks):
    """Compiles every n-th configuration of the kernels of Mamba-2 into Triton's cache.

    The ops run on tensors without memory and launch nothing.
    """
    import torch
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    driver.set_active(NoDriver())
    torch.cuda.device = contextlib.nullcontext
    properties = types.SimpleNamespace(multi_processor_count=N_MULTIPROCESSORS)
    torch.cuda.get_device_properties = lambda device=None: properties
    run, seen = JITFunction.run, collections.Counter()

    def run_share(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        self.best_config = self.configs[0]
        for config in self.prune_configs(kwargs):
            seen["configurations"] += 1
            if seen["configurations"] % n_ranks == rank:
                self.fn.run(*args, **kwargs, **config.all_kwargs())

    def only_compile(self, *args, **kwargs):
        kwargs["warmup"] = True
        try:
            return run(self, *args, **kwargs)
        except Exception as error:
            print(f"triton: {self.__name__}: {str(error).splitlines()[:1]}", flush=True)

    JITFunction.run, Autotuner.run = only_compile, run_share
    steps_without_memory()
    if rank == 0:
        print(f"triton   {seen['configurations']} configurations of kernels", flush=True)


def steps_without_memory():
    """Every Triton op of a step once, with the shapes and types of the step."""
    import torch
    from mamba_ssm.modules.mamba2 import Mamba2
    from mamba_ssm.ops.triton.layer_norm import layer_norm_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def backward(*outputs):
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])

    norm = dict(residual_in_fp32=True, is_rms_norm=True, eps=1e-5)
    weight, residual = tensor(D_MODEL), tensor(B, T, D_MODEL)
    inner = tensor(B, T, D_MODEL, dtype=torch.bfloat16)
    backward(*layer_norm_fn(tensor(B, T, D_MODEL), weight, None, prenorm=True, **norm))
    backward(*layer_norm_fn(inner, weight, None, residual=residual, prenorm=True, **norm))
    backward(layer_norm_fn(inner, weight, None, residual=residual, prenorm=False, **norm))
    m = Mamba2(D_MODEL, device="meta")
    backward(mamba_split_conv1d_scan_combined(
        tensor(B, T, m.in_proj.out_features, dtype=torch.bfloat16), m.conv1d.weight.squeeze(1),
        m.conv1d.bias, m.dt_bias, -torch.exp(m.A_log), D=m.D, chunk_size=m.chunk_size,
        activation=m.activation, rmsnorm_weight=m.norm.weight, rmsnorm_eps=m.norm.eps,
        outproj_weight=tensor(D_MODEL, m.d_inner, dtype=torch.bfloat16), headdim=m.headdim,
        ngroups=m.ngroups, norm_before_gate=m.norm_before_gate))


def build_all(folder):
    """Compiles CUDA and Triton side by side, then loads the CUDA modules."""
    for name, (pattern, sources) in EXTENSIONS.items():
        found = sorted(folder.glob(pattern))
        assert found, f"{folder} has no {pattern}: see the head of this script"
        if not (folder / "build" / name).exists():
            trim(found[-1], folder / "build" / name, sources)
        sys.path.insert(0, str(found[-1].parents[len(Path(pattern).parts) - 2]))
    import torch  # noqa: F401, once for all processes that follow
    import triton  # noqa: F401
    start, fork = time.time(), multiprocessing.get_context("fork")
    n_ranks = os.cpu_count()
    jobs = [(build, (folder, name)) for name in EXTENSIONS]
    jobs += [(compile_triton, (rank, n_ranks)) for rank in range(n_ranks)]
    processes = [fork.Process(target=job, args=args, daemon=True) for job, args in jobs]
    for process in processes:
        process.start()
    for process in processes[:len(EXTENSIONS)]:
        process.join()
        assert process.exitcode == 0, "their CUDA sources did not compile"
    print(f"build    CUDA {time.time() - start:.0f} s", flush=True)
    for process in processes[len(EXTENSIONS):]:
        process.join()
    print(f"build    with Triton {time.time() - start:.0f} s", flush=True)
    for name in EXTENSIONS:
        sys.modules[name] = build(folder, name)
        print(f"module   {sys.modules[name].__file__}", flush=True)


def check_scan():
    """The scan and its gradients beside their own plain PyTorch in f32."""
    import torch
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref
    torch.manual_seed(0)
    n_ch, d_state = 64, 16

    def inputs(*shape, scale=1.0):
        return (scale * torch.randn(shape, device="cuda")).bfloat16()

    u, delta, z = inputs(2, n_ch, T), inputs(2, n_ch, T, scale=0.5), inputs(2, n_ch, T)
    b, c = inputs(2, d_state, T), inputs(2, d_state, T)
    a = -torch.rand(n_ch, d_state, device="cuda") - 0.1
    skip, bias = torch.randn(n_ch, device="cuda"), torch.randn(n_ch, device="cuda") - 3
    dy = inputs(2, n_ch, T)

    def results(scan, dtype):
        args = [x.detach().clone().requires_grad_() for x in
                [x.to(dtype) for x in (u, delta)] + [a] + [x.to(dtype) for x in (b, c)]
                + [skip, z.to(dtype), bias]]
        y = scan(*args, delta_softplus=True)
        y.backward(dy.to(dtype))
        return [y.detach()] + [x.grad for x in args]

    fast, plain = results(selective_scan_fn, torch.bfloat16), results(selective_scan_ref,
                                                                      torch.float32)
    names = ["y", "du", "ddelta", "da", "db", "dc", "dskip", "dz", "dbias"]
    errors = [f"{name} {((x - p).norm() / p.norm()).item():.1e}"
              for name, x, p in zip(names, fast, plain)]
    print("check    scan beside plain f32: " + ", ".join(errors), flush=True)


@contextlib.contextmanager
def counted_calls():
    """Counts calls into the compiled modules."""
    calls, replaced = collections.Counter(), []
    for module in (sys.modules[name] for name in EXTENSIONS):
        for name in ("fwd", "bwd", "causal_conv1d_fwd", "causal_conv1d_bwd"):
            function = getattr(module, name, None)
            if function is None:
                continue
            label = f"{module.__name__}.{name}"

            def counting(*args, _function=function, _label=label, **kwargs):
                calls[_label] += 1
                return _function(*args, **kwargs)

            replaced.append((module, name, function))
            setattr(module, name, counting)
    yield calls
    for module, name, function in replaced:
        setattr(module, name, function)


def measure(layer, n_steps):
    import torch
    import torch.nn.functional as F
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    torch.manual_seed(0)
    model = MambaLMHeadModel(MambaConfig(
        d_model=D_MODEL, n_layer=N_LAYER, vocab_size=VOCAB, ssm_cfg=dict(layer=layer),
        rms_norm=True, residual_in_fp32=True, fused_add_norm=True), device="cuda")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCAB, (B, T), device="cuda")
    gib = {}

    def note(name):
        gib[name] = torch.cuda.memory_allocated() / 2**30

    def forward():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens).logits
            note("with what forward keeps and bf16 logits")
            return F.cross_entropy(logits.float().view(-1, VOCAB), tokens.view(-1))

    def step():
        adamw.zero_grad(set_to_none=True)
        note("weights and AdamW")
        loss = forward()
        note("with the loss")
        loss.backward()
        note("with gradients")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        return loss.detach()

    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"model    {layer}, {n_parameters / 1e6:.1f} M parameters, B={B} T={T}", flush=True)
    start = time.time()
    with counted_calls() as calls:
        loss = step()
    torch.cuda.synchronize()
    print(f"calls    {dict(calls)} in the first step of {time.time() - start:.0f} s", flush=True)
    for _ in range(2):
        step()
    # The first step also tries out Triton's configurations, in memory of its own.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.time()
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
        seconds = (time.time() - start) / n_steps
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"step     {seconds * 1e3:.1f} ms  {B * T / seconds:,.0f} tok/s  peak {peak:.2f} GiB",
              flush=True)
    print("memory   " + ", ".join(f"{name} {x:.2f}" for name, x in gib.items()) + " GiB; loss "
          f"{loss.item():.3f} first, {step().item():.3f} last", flush=True)
    print_kernels(step)


def print_kernels(step):
    import torch
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [(x.self_device_time_total / 1e3, x.count, x.key) for x in profiled.key_averages()
               if x.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(reverse=True)
    print(f"kernels  {sum(ms for ms, _, _ in kernels):.1f} ms of one step", flush=True)
    for ms, n_calls, name in kernels[:24]:
        print(f"         {ms:7.2f} ms {n_calls:5d} x  {name[:90]}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="holds mamba_ssm-* and causal_conv1d-*")
    parser.add_argument("--layers", nargs="*", default=["Mamba1", "Mamba2"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--build-only", action="store_true")
    args = parser.parse_args()
    build_all(args.folder.resolve())
    if args.build_only:
        return
    import torch
    import triton
    print(f"device   {torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"triton {triton.__version__}", flush=True)
    check_scan()
    for layer in args.layers:
        measure(layer, args.steps)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
