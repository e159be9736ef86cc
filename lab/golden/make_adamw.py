#!/usr/bin/env python3
"""Reference values of torch.optim.AdamW on its own: float32, neither fused nor foreach.

  make_adamw.py OUT.safetensors

single.*, one row per case: from p, g, m, v (float32 [cases, n]), t (int64 [cases], the number of
  this step, counted from 1) and hyper (float64 [cases, 5]: lr, beta1, beta2, eps, weight_decay)
  to p_out, m_out, v_out. Gradients span 1e-12 to 1e6, t spans 1 to 100000.
path.K.*, one optimizer run from m = v = 0: hyper (float64 [5]), p_start (float32 [n]), the
  gradients g (float32 [steps, n]) and p, m, v (float32 [steps, n]) after each step."""

import math
import sys

import torch
from safetensors.torch import save_file

WIDTH = 48
HYPER = [  # lr, beta1, beta2, eps, weight_decay
    (1e-3, 0.9, 0.999, 1e-8, 0.01),
    (3e-3, 0.9, 0.95, 1e-8, 0.1),
    (1e-4, 0.9, 0.99, 1e-6, 0.0),
    (2e-2, 0.8, 0.9999, 1e-10, 0.3),
    (6e-5, 0.0, 0.5, 1e-3, 1.0),
]
TIMES = [1, 2, 3, 10, 100, 1000, 10000, 100000]


def optimizer(param, hyper):
    lr, beta1, beta2, eps, decay = hyper
    return torch.optim.AdamW(
        [param], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, foreach=False
    )


def spread(shape, gen):
    """Either sign, magnitude log-uniform from 1e-12 to 1e6, both ends included."""
    power = torch.rand(shape, generator=gen, dtype=torch.float64) * 18 - 12
    power.view(-1)[0], power.view(-1)[1] = -12, 6
    sign = torch.randint(0, 2, shape, generator=gen, dtype=torch.float64) * 2 - 1
    return (sign * 10**power).float()


def moments(g, t, gen):
    """Zero before the first step; else of the gradients' size, with a tenth of them elsewhere."""
    if t == 1:
        return torch.zeros_like(g), torch.zeros_like(g)
    size = torch.where(torch.rand(g.shape, generator=gen) < 0.1, spread(g.shape, gen), g)
    m = size * (2 * torch.rand(g.shape, generator=gen) - 1)
    v = size**2 * (0.1 + 2 * torch.rand(g.shape, generator=gen))
    return m, v


def single(hyper, t, gen):
    p, g = torch.randn(WIDTH, generator=gen), spread((WIDTH,), gen)
    p[::2] = 0  # so that p_out is the bare update
    g[2] = 0
    m, v = moments(g, t, gen)
    param = torch.nn.Parameter(p.clone())
    opt = optimizer(param, hyper)
    opt.state[param] = dict(step=torch.tensor(t - 1.0), exp_avg=m.clone(), exp_avg_sq=v.clone())
    param.grad = g.clone()
    opt.step()
    state = opt.state[param]
    assert int(state["step"]) == t
    return dict(p=p, g=g, m=m, v=v) | dict(
        p_out=param.detach(), m_out=state["exp_avg"], v_out=state["exp_avg_sq"]
    )


def path(hyper, steps, width, gen):
    start = torch.randn(width, generator=gen)
    scale = spread((width,), gen).abs()
    grads = scale * torch.randn(steps, width, generator=gen)
    param = torch.nn.Parameter(start.clone())
    opt = optimizer(param, hyper)
    out = dict(p=[], m=[], v=[])
    for g in grads:
        param.grad = g.clone()
        opt.step()
        state = opt.state[param]
        for key, value in zip("pmv", (param, state["exp_avg"], state["exp_avg_sq"])):
            out[key].append(value.detach().clone())
    return dict(p_start=start, g=grads) | {k: torch.stack(v) for k, v in out.items()}


def main():
    gen = torch.Generator().manual_seed(0)
    cases = [(hyper, t) for hyper in HYPER for t in TIMES]
    rows = [single(hyper, t, gen) for hyper, t in cases]
    out = {f"single.{k}": torch.stack([row[k] for row in rows]) for k in rows[0]}
    out["single.t"] = torch.tensor([t for _, t in cases])
    out["single.hyper"] = torch.tensor([hyper for hyper, _ in cases], dtype=torch.float64)
    for i, hyper in enumerate(HYPER):
        run = path(hyper, 40, 20, gen) | dict(hyper=torch.tensor(hyper, dtype=torch.float64))
        out |= {f"path.{i}.{k}": v for k, v in run.items()}
    assert all(math.isfinite(float(v.double().abs().max())) for v in out.values())
    save_file({k: v.contiguous() for k, v in out.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
