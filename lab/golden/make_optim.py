#!/usr/bin/env python3
"""Reference values of Muon, of DoRA and of NF4.

  make_optim.py muon OUT.safetensors
  make_optim.py dora OUT.safetensors
  make_optim.py nf4 OUT.safetensors      (needs bitsandbytes)

muon: torch.optim.Muon with adjust_lr_fn="match_rms_adamw", for each shape K

  K.p_start            (rows, cols)
  K.g                  (n_steps, rows, cols)     gradients; the first is zero in shape 3
  K.p                  (n_steps, rows, cols)     after each step, the iteration in float32
  K.p_bf16             (rows, cols)              after the last, in bfloat16 as torch has it
  hyper                (lr, weight_decay)        float64, the same for all

dora: peft's DoRA on one linear map, for each case K (0: with a bias; 1: with dropout, whose mask
is that of the engine for DROPOUT; 2: an adapter where training starts, with b at zero)

  K.x, K.w, K.bias, K.a, K.b, K.m, K.dy          operands
  K.mask                                         what dropout multiplies x by
  K.y, K.dx, K.da, K.db, K.dm                    result and gradients of sum(y * dy)
  K.a_after, K.b_after, K.m_after                after 3 AdamW steps on that loss
  K.merged                                       the weight peft merges
  K.scale                                        (1)
  hyper                                          (lr, beta1, beta2, eps, weight_decay), float64

nf4: bitsandbytes' NormalFloat of 4 bits, blocks of 64 without double quantisation

  source               (n)                       normal, tiny, huge, zero, and at the thresholds
  packed               (n / 2)                   uint8, the first of two numbers in the high half
  absmax               (n / 64)
  values               (n)                       decoded
  table                (16)

torch 2.15.0, peft 0.21.2, bitsandbytes 0.50.2; CPU, seeded."""

import sys

import torch
from safetensors.torch import save_file
from torch.optim import _muon

HYPER = dict(lr=0.02, weight_decay=0.1)
SHAPES = [(8, 8), (12, 40), (65, 17), (3, 5)]
N_STEPS = 4
DROPOUT = dict(rate=0.25, seed=5, stream=3, counter=7)
ADAMW = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def newton_schulz_f32(grad, coefficients, n_steps, eps):
    """torch's function, with float32 where it has bfloat16."""
    a, b, c = coefficients
    x = grad.clone()
    if grad.size(0) > grad.size(1):
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(n_steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def run_muon(start, grads):
    p = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([p], adjust_lr_fn="match_rms_adamw", **HYPER)
    after = []
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        after.append(p.detach().clone())
    return torch.stack(after)


def muon():
    out = {"hyper": torch.tensor([HYPER["lr"], HYPER["weight_decay"]], dtype=torch.float64)}
    theirs = _muon._zeropower_via_newtonschulz
    for k, shape in enumerate(SHAPES):
        torch.manual_seed(k)
        start, grads = torch.randn(shape) * 0.1, torch.randn(N_STEPS, *shape) * 10.0 ** (k - 2)
        if k == 3:
            grads[0] = 0.0
        _muon._zeropower_via_newtonschulz = newton_schulz_f32
        out[f"{k}.p_start"], out[f"{k}.g"] = start, grads
        out[f"{k}.p"] = run_muon(start, grads)
        _muon._zeropower_via_newtonschulz = theirs
        out[f"{k}.p_bf16"] = run_muon(start, grads)[-1].contiguous()
    return out


def philox(key, stream, n):
    """Philox4x32-10 as the engine's `Rng` calls it: four words."""
    low = 0xFFFFFFFF
    x, key = [n & low, n >> 32, stream & low, stream >> 32], [key & low, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ key[0], b & low, a >> 32 ^ x[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return x


def dropout_mask(n_tok, d, rate, seed, stream, counter):
    """What the engine multiplies x by: groups of 128 numbers, 16 blocks of 8 for each."""
    words = philox(seed, stream, counter)
    key, dropped = words[0] << 32 | words[1], round(rate * 65536)
    mask, n_groups = torch.zeros(n_tok, d), -(-d // 128)
    for row in range(n_tok):
        for col in range(d):
            group, at = divmod(col, 128)
            half, lane = divmod(at, 16)
            words = philox(key, stream, ((row * n_groups + group) * 16 + lane))
            bits = words[half // 2] >> 16 * (half % 2) & 0xFFFF
            mask[row, col] = 0.0 if bits < dropped else 65536 / (65536 - dropped)
    return mask


class Mask(torch.nn.Module):
    """Dropout with a mask that is given."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return x * self.mask


def dora():
    import peft

    hyper = [ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"]]
    out = {"hyper": torch.tensor(hyper, dtype=torch.float64)}
    for k in range(3):
        torch.manual_seed(10 + k)
        n_tok, d_in, d_out, rank = 9, 150 if k == 1 else 20, 14, 3
        base = torch.nn.Sequential()
        base.add_module("map", torch.nn.Linear(d_in, d_out, bias=k == 0))
        config = peft.LoraConfig(r=rank, lora_alpha=6, target_modules=["map"], use_dora=True)
        model = peft.get_peft_model(base, config)
        layer = model.base_model.model.map
        mask = torch.ones(n_tok, d_in)
        if k == 1:
            mask = dropout_mask(n_tok, d_in, **DROPOUT)
            layer.lora_dropout["default"] = Mask(mask)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        m = layer.lora_magnitude_vector["default"].weight
        with torch.no_grad():
            if k != 2:
                b.copy_(torch.randn(d_out, rank) * 0.3)
                m.mul_(1.0 + 0.3 * torch.randn(d_out))
        x = torch.randn(n_tok, d_in, requires_grad=True)
        dy = torch.randn(n_tok, d_out)
        of = {"x": x, "w": layer.base_layer.weight, "a": a, "b": b, "m": m, "dy": dy, "mask": mask}
        if k == 0:
            of["bias"] = layer.base_layer.bias
        of = {name: value.detach().clone() for name, value in of.items()}
        of["scale"] = torch.tensor([layer.scaling["default"]])
        model.train()
        y = model(x)
        (y * dy).sum().backward()
        of |= {"y": y.detach(), "dx": x.grad, "da": a.grad, "db": b.grad, "dm": m.grad}
        of = {name: value.clone() for name, value in of.items()}
        of["merged"] = merged(layer)
        optimizer = torch.optim.AdamW([a, b, m], **ADAMW)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) * dy).sum().backward()
            optimizer.step()
        of |= {f"{name}_after": value.detach() for name, value in dict(a=a, b=b, m=m).items()}
        out |= {f"{k}.{name}": value.contiguous() for name, value in of.items()}
    return out


def merged(layer):
    layer.merge(safe_merge=True)
    weight = layer.base_layer.weight.detach().clone()
    layer.unmerge()
    return weight


def nf4():
    from bitsandbytes import functional

    torch.manual_seed(3)
    table = functional.get_4bit_type("nf4", device="cpu")
    blocks = torch.randn(40, 64) * 10.0 ** torch.randint(-6, 4, (40, 1))
    edges = (table[1:].double() + table[:-1].double()).float() / 2
    for k, size in enumerate([1.0, 0.37, 3e-5]):
        above, below = (edges.nextafter(torch.tensor(end)) for end in (2.0, -2.0))
        around = torch.cat([edges, above, below, table])
        blocks[k, : around.numel()] = around * size
        blocks[k, around.numel() :] = 0.0
    blocks[3] = 0.0
    packed, state = functional.quantize_4bit(blocks, blocksize=64, quant_type="nf4")
    values = functional.dequantize_4bit(packed, state)
    out = dict(source=blocks, packed=packed, absmax=state.absmax, values=values, table=table)
    return {name: value.flatten().contiguous() for name, value in out.items()}


if __name__ == "__main__":
    save_file({"muon": muon, "dora": dora, "nf4": nf4}[sys.argv[1]](), sys.argv[2])
