#!/usr/bin/env python3
"""Reference values for the tests: tiny random models run by torch, transformers and peft.

  make.py NAME OUT [--seed N] [--set key=value ...] [--steps N] [--batch B] [--seq T]
  make.py --all OUTROOT
  make.py --list

A model set OUT/ holds
  config.json              as transformers 4 spells it (rope_theta, rope_scaling, torch_dtype)
  config.v5.json           the same as transformers 5 spells it (rope_parameters, dtype)
  model.safetensors        the weights under their hub names
  golden.safetensors       input_ids, labels, logits, loss, hidden.0 .. hidden.L and
                           grad.<tensor> for every trained tensor of model.safetensors
  after_adamw.safetensors  every trained tensor after N AdamW steps on that one batch
  golden.json              loss trace, gradient norms, optimizer, one greedy continuation, and by
                           how much torch's own float32 differs from its float64
A Mamba-2 set with several groups also holds golden_grouped.safetensors and
after_adamw_grouped.safetensors: the gated norm taken per group, as mamba_ssm does.

A LoRA set OUT/ holds adapter/ (as peft writes it), golden.safetensors (with logits_base: the
adapter off), after_adamw.safetensors (the adapter's tensors), merged_changed.safetensors (the
base tensors that merging changes) and golden.json. Its base is the sibling set ../BASE.

hidden.0 is what enters the first layer, hidden.i what leaves layer i - 1, and hidden.L what leaves
the final norm. The loss is the mean cross entropy of logits[:, :-1] against labels[:, 1:], with
label -100 ignored. All runs are on the CPU, eager, seeded, in float32, with dropout off."""

import argparse
import contextlib
import copy
import json
import math
import os
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mamba2 import modeling_mamba2

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

OPTIMIZER = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
VERSIONS = dict(
    torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__
)


# ---------------------------------------------------------------------------------------- presets


def rope(theta=10000.0, kind="default", **more):
    return dict(rope_parameters=dict(rope_theta=theta, rope_type=kind, **more))


SPECIAL = dict(bos_token_id=1, eos_token_id=2, pad_token_id=None)
DENSE = SPECIAL | dict(
    vocab_size=96,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
WIDE_HEAD = DENSE | dict(head_dim=16, num_attention_heads=2, num_key_value_heads=1)
SPARSE = DENSE | dict(hidden_size=16, num_experts_per_tok=2)
MAMBA = SPECIAL | dict(
    vocab_size=96,
    hidden_size=20,
    num_hidden_layers=4,
    state_size=8,
    conv_kernel=4,
    expand=2,
    time_step_rank=2,
    use_bias=False,
    use_conv_bias=True,
    residual_in_fp32=True,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)
HYBRID = SPECIAL | dict(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
)
MIXER2 = dict(mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_chunk_size=8)
GRANITE = HYBRID | MIXER2 | dict(
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    intermediate_size=12,
    shared_intermediate_size=20,
    num_local_experts=4,
    num_experts_per_tok=2,
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    attention_multiplier=0.25,
    logits_scaling=1.7,
    position_embedding_type="nope",
    tie_word_embeddings=True,
)
FALCON_H1 = HYBRID | rope(100000.0) | dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_chunk_size=8,
    embedding_multiplier=1.3,
    lm_head_multiplier=0.8,
    key_multiplier=0.7,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.9,
    ssm_in_multiplier=1.1,
    ssm_out_multiplier=0.85,
    ssm_multipliers=[0.9, 1.15, 0.75, 1.25, 0.8],
    mlp_multipliers=[1.2, 0.65],
)

PRESETS = {
    "mamba": ("mamba", MAMBA),
    "mamba_odd": (
        "mamba",
        MAMBA
        | dict(vocab_size=101, hidden_size=19, state_size=5, conv_kernel=3, time_step_rank=3)
        | dict(use_bias=True, tie_word_embeddings=False),
    ),
    "falcon_mamba": ("falcon_mamba", MAMBA | dict(mixer_rms_eps=1e-3, tie_word_embeddings=False)),
    "mamba2": (
        "mamba2",
        MAMBA | dict(hidden_size=24, head_dim=8, num_heads=6, n_groups=2, chunk_size=8),
    ),
    "mamba2_g1": (
        "mamba2",
        MAMBA
        | dict(hidden_size=16, state_size=12, head_dim=8, num_heads=4, n_groups=1, chunk_size=16)
        | dict(time_step_limit=[0.01, 0.1], use_bias=True, tie_word_embeddings=False),
    ),
    "llama_gqa_untied": ("llama", DENSE | rope()),
    "llama_headdim": (
        "llama",
        DENSE
        | rope()
        | dict(head_dim=10, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    ),
    "llama3_rope": (
        "llama",
        WIDE_HEAD
        | dict(tie_word_embeddings=True)
        | rope(
            500000.0,
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_linear_rope": ("llama", DENSE | rope(10000.0, "linear", factor=4.0)),
    "llama_yarn": (
        "llama",
        WIDE_HEAD
        | dict(max_position_embeddings=128)
        | rope(10000.0, "yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "mistral": ("mistral", DENSE | rope() | dict(sliding_window=8)),
    "qwen2": (
        "qwen2",
        DENSE | rope(1000000.0) | dict(tie_word_embeddings=True, rms_norm_eps=1e-6),
    ),
    "qwen2_window": (
        "qwen2",
        DENSE
        | rope(1000000.0)
        | dict(tie_word_embeddings=True, rms_norm_eps=1e-6)
        | dict(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    ),
    "qwen3": (
        "qwen3",
        DENSE | rope(1000000.0) | dict(head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-6),
    ),
    "mixtral": (
        "mixtral",
        SPARSE
        | rope(1000000.0)
        | dict(intermediate_size=20, num_local_experts=4, sliding_window=None),
    ),
    "qwen2_moe": (
        "qwen2_moe",
        SPARSE
        | rope(1000000.0)
        | dict(intermediate_size=28, moe_intermediate_size=16, num_experts=4)
        | dict(shared_expert_intermediate_size=20, decoder_sparse_step=1, mlp_only_layers=[1])
        | dict(norm_topk_prob=True),
    ),
    "olmoe": (
        "olmoe",
        SPARSE
        | rope()
        | dict(intermediate_size=12, num_experts=6, num_experts_per_tok=3)
        | dict(norm_topk_prob=False, clip_qkv=1.5),
    ),
    "dots1": (
        "dots1",
        SPARSE
        | rope()
        | dict(moe_intermediate_size=8, n_routed_experts=8, n_shared_experts=2)
        | dict(n_group=2, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True)
        | dict(routed_scaling_factor=1.8, sliding_window=None),
    ),
    "jamba": (
        "jamba",
        HYBRID
        | dict(attn_layer_period=4, attn_layer_offset=1, mamba_dt_rank=2)
        | dict(expert_layer_period=2, expert_layer_offset=1, num_experts=4)
        | dict(num_experts_per_tok=2, rms_norm_eps=1e-6),
    ),
    "bamba": ("bamba", HYBRID | MIXER2 | rope() | dict(attn_layer_indices=[2])),
    "granitemoehybrid": ("granitemoehybrid", GRANITE),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        GRANITE | rope() | dict(num_local_experts=0, position_embedding_type="rope"),
    ),
    "falcon_h1": (
        "falcon_h1",
        FALCON_H1
        | dict(mamba_d_ssm=24, mamba_n_heads=6, mamba_d_head=4, mamba_n_groups=2)
        | dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "falcon_h1_norm_first": (
        "falcon_h1",
        FALCON_H1
        | dict(mamba_d_ssm=24, mamba_n_heads=6, mamba_d_head=4, mamba_n_groups=2)
        | dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
    ),
    "falcon_h1_plain": (
        "falcon_h1",
        FALCON_H1
        | dict(mamba_d_ssm=None, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1)
        | dict(mamba_rms_norm=False, mamba_norm_before_gate=False, mamba_proj_bias=True)
        | dict(projectors_bias=True, attention_bias=True, mlp_bias=True),
    ),
}
LONG = {"llama3_rope": 48, "llama_yarn": 48}
# dots1, granite: every expert is chosen, never by a hair. mamba_odd: with seed 0 one gradient is
# 1e-5 of the others, and AdamW turns its noise into a full step.
SEEDS = {"dots1": 15, "granitemoehybrid": 3, "mamba_odd": 1}

LLAMA_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {
    "lora_llama_qv": (
        "llama_gqa_untied",
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    ),
    "lora_llama_all_rs": (
        "llama_gqa_untied",
        dict(r=4, lora_alpha=4, target_modules=LLAMA_LINEARS, use_rslora=True)
        | dict(rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 3}),
    ),
    "lora_mamba": ("mamba", dict(r=4, lora_alpha=8, target_modules=["in_proj", "x_proj"])),
}


# ------------------------------------------------------------------------------- models and batch


def initial(name, shape, tied, gen):
    """Seeded values under which every term of the architecture shows in the logits."""
    normal = torch.randn(shape, generator=gen)
    if name.endswith("A_log"):
        return torch.log(torch.arange(1.0, shape[-1] + 1)).expand(shape) + 0.1 * normal
    if name.endswith(".D"):
        return 1 + 0.2 * normal
    if name.endswith(("dt_bias", "dt_proj.bias")):
        low, high = math.log(0.001), math.log(0.1)
        step = torch.exp(low + (high - low) * torch.rand(shape, generator=gen))
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("conv1d.weight"):
        return 0.4 * normal
    if "norm" in name and name.endswith("weight") and len(shape) == 1:
        return 1 + 0.1 * normal
    if "embed" in name:
        return (0.25 if tied else 0.7) * normal
    if len(shape) >= 2:
        return normal * (1.4 / math.sqrt(shape[-1]))
    return 0.1 * normal


def build(name, seed=0, override={}):
    family, config = PRESETS[name]
    config = AutoConfig.for_model(family, **copy.deepcopy(config | override))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    eager_experts(model)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, param in sorted(model.named_parameters()):
            param.copy_(initial(key, param.shape, config.tie_word_embeddings, gen))
        for key, buffer in sorted(model.named_buffers()):
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=gen))
    model.tie_weights()
    return model.eval()


def eager_experts(model):
    getattr(model, "set_experts_implementation", lambda kind: None)("eager")


def make_batch(seed, batch, seq, vocab):
    """Random ids with a repeated stretch, so that convolution, scan and attention state matter."""
    gen = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(3, vocab, (batch, seq), generator=gen)
    ids[:, 0] = 1
    ids[0, seq // 2 : seq // 2 + seq // 4] = ids[0, 1 : 1 + seq // 4]
    labels = ids.clone()
    labels[1:, : seq // 4] = -100
    return ids, labels


def layers_and_norm(model):
    body = getattr(model, model.base_model_prefix)
    for name in ("norm", "norm_f", "final_layernorm"):
        if hasattr(body, name):
            return body.layers, getattr(body, name)
    raise ValueError("no final norm found")


@contextlib.contextmanager
def hidden_states(model, into):
    """Collects hidden.N. By hooks, because transformers leaves the embeddings out for Mamba."""

    def first(value):
        return (value[0] if isinstance(value, tuple) else value).detach()

    layers, norm = layers_and_norm(model)
    hooks = [layers[0].register_forward_pre_hook(lambda m, args: into.append(first(args)))]
    for module in [*layers[:-1], norm]:
        hooks.append(module.register_forward_hook(lambda m, args, out: into.append(first(out))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forward_backward(model, ids, labels):
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)
    loss.backward()
    return logits.detach(), loss.detach()


def gradients(model):
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.requires_grad}


def trained(model):
    return {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}


def adamw(model, ids, labels, steps):
    """Trains in place; gives the loss before each step and after the last, and gradient norms."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, foreach=False, **OPTIMIZER)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(forward_backward(model, ids, labels)[1]))
        norms.append(float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in params))))
        optimizer.step()
    losses.append(float(forward_backward(model, ids, labels)[1]))
    return losses, norms


def greedy(model, prompt, count=8):
    """The continuation by a full forward pass per token, and the smallest lead over the next."""
    ids, margin = torch.tensor([prompt]), math.inf
    with torch.no_grad():
        for _ in range(count):
            last = model(input_ids=ids, use_cache=False).logits[0, -1]
            best = last.topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            ids = torch.cat([ids, last.argmax()[None, None]], 1)
    return dict(prompt=prompt, ids=ids[0].tolist(), min_margin=margin)


# --------------------------------------------------------------------------------- what is checked


@contextlib.contextmanager
def float64():
    """Makes code that casts to float32 in norms, scans and softmax compute in float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def noise_floor(model, ids, labels, steps, logits, loss, grads, after):
    """How far torch's float32 results are from its float64 ones."""
    precise = copy.deepcopy(model).double()
    with float64():
        logits64, loss64 = forward_backward(precise, ids, labels)
        assert logits64.dtype == torch.float64
        grads64 = gradients(precise)
        adamw(precise, ids, labels, steps)
    error = {k: float((g - grads[k]).norm() / g.norm()) for k, g in grads64.items()}
    drift = [(p - after[k]).abs().flatten() for k, p in trained(precise).items()]
    drift = torch.cat(drift)
    worst = max(error, key=error.get)
    return dict(
        logits_max_abs=float((logits64 - logits).abs().max()),
        loss_abs=abs(float(loss64) - float(loss)),
        grad_max_rel_l2=error[worst],
        grad_worst=worst,
        after_adamw_mean_abs=float(drift.mean()),
        after_adamw_share_below_1e_5=float((drift < 1e-5).double().mean()),
    )


def routing_margin(model, ids):
    """The smallest lead, over all tokens, of the last chosen expert (or group) over the next."""
    leads = []

    def lead(scores, k):
        top = scores.topk(min(k + 1, scores.shape[-1])).values
        if top.shape[-1] > k:
            leads.append(float((top[:, k - 1] - top[:, k]).min()))

    def hook(router, args, out):
        scores = out[0].detach()
        if hasattr(router, "e_score_correction_bias"):
            scores = scores.sigmoid() + router.e_score_correction_bias
            groups = scores.view(len(scores), router.num_group, -1)
            totals = groups.topk(2).values.sum(-1)
            lead(totals, router.topk_group)
            keep = torch.zeros_like(totals).scatter(1, totals.topk(router.topk_group).indices, 1)
            scores = groups.masked_fill(keep[..., None] == 0, -math.inf).flatten(1)
        lead(scores, router.top_k)

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("router")]
    hooks = [m.register_forward_hook(hook) for m in routers]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for each in hooks:
        each.remove()
    return min(leads) if leads else None


# ----------------------------------------------------------------------------------------- writing


def hub_named(model, tensors):
    """The tensors, keyed by parameter, under their hub names; and the hub names of mere buffers."""
    with tempfile.TemporaryDirectory() as folder:
        dummy = copy.deepcopy(model)
        with torch.no_grad():
            for param in dummy.parameters():
                param.fill_(math.nan)
        dummy.save_pretrained(folder)
        saved = load_file(folder + "/model.safetensors")
        buffers = sorted(k for k, v in saved.items() if not v.isnan().any())
        with torch.no_grad():
            for key, param in dummy.named_parameters():
                param.copy_(tensors[key])
        dummy.save_pretrained(folder)
        named = load_file(folder + "/model.safetensors")
    return {k: v.clone() for k, v in named.items() if k not in buffers}, buffers


def save(tensors, path):
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path)


def save_json(value, path):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def hub_config(config):
    """A transformers 5 config as transformers 4 spells it. An infinity becomes a bare Infinity."""

    def plain(value):
        if isinstance(value, dict) and set(value) == {"__float__"}:
            return float(value["__float__"])
        return [plain(v) for v in value] if isinstance(value, list) else value

    out = {k: plain(v) for k, v in config.items() if k != "transformers_version"}
    out["torch_dtype"] = out.pop("dtype")
    scaling = out.pop("rope_parameters", None)
    if scaling:
        out["rope_theta"] = scaling.pop("rope_theta")
        if "partial_rotary_factor" in scaling:
            out["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
        out["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    if out["model_type"] == "granitemoehybrid":
        old = dict(linear_attention="mamba", full_attention="attention")
        out["layer_types"] = [old[kind] for kind in out["layer_types"]]
    return dict(sorted(out.items()))


def save_model(model, out):
    model.save_pretrained(out)
    os.remove(out + "/generation_config.json")
    os.replace(out + "/config.json", out + "/config.v5.json")
    with open(out + "/config.v5.json") as file:
        config = json.load(file)
    save_json(hub_config(config), out + "/config.json")


def check_reload(out, ids, logits):
    """What was written, read back in its transformers 4 spelling, must give the same logits."""
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    eager_experts(model)
    with torch.no_grad():
        again = model(input_ids=ids, use_cache=False).logits
    assert float((again - logits).abs().max()) < 1e-5, "the saved model differs"


def run_and_save(model, ids, labels, steps, out, suffix=""):
    """Writes golden and after_adamw; gives what goes into golden.json."""
    states = []
    with hidden_states(model, states):
        logits, loss = forward_backward(model, ids, labels)
    assert len(states) == model.config.num_hidden_layers + 1
    grads = gradients(model)
    student = copy.deepcopy(model)
    losses, norms = adamw(student, ids, labels, steps)
    after = trained(student)

    named, buffers = hub_named(model, grads)
    golden = dict(input_ids=ids, labels=labels, logits=logits, loss=loss[None])
    golden |= {f"hidden.{i}": h for i, h in enumerate(states)}
    golden |= {f"grad.{k}": v for k, v in named.items()}
    save(golden, f"{out}/golden{suffix}.safetensors")
    save(hub_named(model, after)[0], f"{out}/after_adamw{suffix}.safetensors")
    noise = noise_floor(model, ids, labels, steps, logits, loss, grads, after)
    about = dict(loss=float(loss), loss_trace=losses, grad_norm_trace=norms)
    if idle := [k for k, v in named.items() if not v.any()]:
        about["all_zero_gradient"] = idle
    return logits, buffers, about | dict(noise_floor_f32_vs_f64=noise)


@contextlib.contextmanager
def norm_per_group(groups):
    """The gated norm of mamba_ssm: over each group, where transformers takes all of d_inner."""

    def forward(self, hidden, gate=None):
        hidden = hidden.to(torch.float32)
        if gate is not None:
            hidden = hidden * torch.nn.functional.silu(gate.to(torch.float32))
        split = hidden.unflatten(-1, (groups, -1))
        split = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * split.flatten(-2)

    norm = modeling_mamba2.MambaRMSNormGated
    saved, norm.forward = norm.forward, forward
    try:
        yield
    finally:
        norm.forward = saved


def optimizer_note(steps):
    kind = "AdamW, decoupled decay on every parameter, no clipping, no schedule"
    return dict(kind=kind, steps=steps) | {
        k: list(v) if isinstance(v, tuple) else v for k, v in OPTIMIZER.items()
    }


def size_of(folder):
    return sum(os.path.getsize(os.path.join(r, f)) for r, _, fs in os.walk(folder) for f in fs)


def report(name, meta, out):
    noise = meta["noise_floor_f32_vs_f64"]
    print(
        f"{name:22s} {size_of(out) / 1e3:6.0f} kB  loss {meta['loss']:.5f} -> "
        f"{meta['loss_trace'][-1]:.5f}  noise: logits {noise['logits_max_abs']:.1e} "
        f"loss {noise['loss_abs']:.1e} grad {noise['grad_max_rel_l2']:.1e} "
        f"adamw {noise['after_adamw_mean_abs']:.1e} "
        f"{noise['after_adamw_share_below_1e_5']:.5f}  routing {meta.get('routing_min_margin')}",
        flush=True,
    )


def make_model_set(name, out, seed, override, steps, batch, seq):
    model = build(name, seed, override)
    config = model.config
    ids, labels = make_batch(seed, batch, seq, config.vocab_size)
    os.makedirs(out, exist_ok=True)
    save_model(model, out)
    logits, buffers, about = run_and_save(model, ids, labels, steps, out)
    check_reload(out, ids, logits)
    params = sum(p.numel() for p in model.parameters())
    meta = dict(preset=name, seed=seed, model_type=config.model_type, params=params) | about
    if buffers:
        meta["not_trained"] = buffers
    if (margin := routing_margin(model, ids)) is not None:
        meta["routing_min_margin"] = margin
    meta["greedy"] = greedy(model, ids[0, :6].tolist())
    if config.model_type == "mamba2" and config.n_groups > 1:
        with norm_per_group(config.n_groups):
            meta["grouped"] = run_and_save(model, ids, labels, steps, out, "_grouped")[2]
    meta |= dict(optimizer=optimizer_note(steps), versions=VERSIONS)
    save_json(meta, out + "/golden.json")
    report(name, meta, out)


def with_adapter(model, base, settings, seed):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=f"../{base}",
        lora_dropout=0.0,
        bias="none",
        **copy.deepcopy(settings),
    )
    model.name_or_path = model.config._name_or_path = f"../{base}"
    model = peft.get_peft_model(model, config)
    gen = torch.Generator().manual_seed(seed + 7)
    with torch.no_grad():
        for key, param in sorted(model.named_parameters()):
            if "lora_A" in key:
                param.copy_(torch.randn(param.shape, generator=gen) / math.sqrt(param.shape[1]))
            elif "lora_B" in key:
                param.copy_(0.2 * torch.randn(param.shape, generator=gen))
    return model.eval()


def save_adapter(model, out):
    model.save_pretrained(out)
    os.remove(out + "/README.md")
    with open(out + "/adapter_config.json") as file:
        config = json.load(file)
    config["target_modules"].sort()  # a set, in no fixed order
    save_json(config, out + "/adapter_config.json")


def make_lora_set(name, out, seed, override, steps, batch, seq):
    base, settings = LORA[name]
    plain = build(base, seed, override)
    ids, labels = make_batch(seed, batch, seq, plain.config.vocab_size)
    model = with_adapter(copy.deepcopy(plain), base, settings, seed)
    save_adapter(model, out + "/adapter")

    def short(tensors):
        return {k.replace(".default", ""): v for k, v in tensors.items()}

    logits, loss = forward_backward(model, ids, labels)
    grads = gradients(model)
    with torch.no_grad():
        logits_base = plain(input_ids=ids, use_cache=False).logits
    golden = dict(input_ids=ids, labels=labels, logits=logits, loss=loss[None])
    golden |= dict(logits_base=logits_base)
    save(golden | {f"grad.{k}": v for k, v in short(grads).items()}, out + "/golden.safetensors")

    student = copy.deepcopy(model)
    losses, norms = adamw(student, ids, labels, steps)
    after = trained(student)
    save(short(after), out + "/after_adamw.safetensors")

    merged = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        gap = float((merged(input_ids=ids, use_cache=False).logits - logits).abs().max())
    before = dict(plain.named_parameters())
    changed = {k: p for k, p in merged.named_parameters() if not torch.equal(p, before[k])}
    save(changed, out + "/merged_changed.safetensors")

    meta = dict(preset=name, base=base, base_seed=seed, lora=settings)
    meta |= dict(trained=sum(p.numel() for p in after.values()), loss=float(loss))
    meta |= dict(loss_trace=losses, grad_norm_trace=norms, merged_logits_max_abs=gap)
    meta["scaling"] = "delta = B A * alpha / r; with use_rslora alpha / sqrt(r); patterns override"
    noise = noise_floor(model, ids, labels, steps, logits, loss, grads, after)
    meta |= dict(noise_floor_f32_vs_f64=noise, optimizer=optimizer_note(steps), versions=VERSIONS)
    save_json(meta, out + "/golden.json")
    report(name, meta, out)


def parse_override(pairs):
    out = {}
    for pair in pairs:
        key, value = pair.split("=", 1)
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = value
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--all", metavar="OUTROOT")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=None)
    args = parser.parse_args()
    names = list(PRESETS) + list(LORA)
    if args.list:
        print("\n".join(names))
        return
    if not args.all and not (args.name in names and args.out):
        parser.error("want NAME OUT, --all OUTROOT or --list")
    torch.set_num_threads(2)
    todo = [(n, f"{args.all}/{n}") for n in names] if args.all else [(args.name, args.out)]
    for name, out in todo:
        make = make_lora_set if name in LORA else make_model_set
        seq = args.seq or LONG.get(name, 24)
        seed = SEEDS.get(name, 0) if args.seed is None else args.seed
        make(name, out, seed, parse_override(args.set), args.steps, args.batch, seq)


if __name__ == "__main__":
    main()
