"""Mamba-3 in plain PyTorch: one token after another, any float type, autograd gives the gradients.

Written from the published architecture (state-spaces/mamba, commit e9594ce; arXiv 2603.15569).
Nothing here is fast; everything is meant to be read and compared with. Runs on the CPU or a GPU, in float32 or float64.

  Mixer   one Mamba-3 block: forward(u) for a sequence, step(u, state) for one token
  LM      a language model: official layout (config as in mamba_ssm) or Elapid's own layout
"""

import math
import torch
import torch.nn as nn
import torch.nn.functional as F


# ------------------------------------------------------------------ small pieces


def wide(x):
    """At least float32, as the official code keeps norms, decay, step sizes, angles and states."""
    return x if x.dtype == torch.float64 else x.float()


def decay_rate(raw, floor, kind="heavy_tail"):
    """A < 0 from its projection. heavy_tail: main since June 2026; softplus: releases up to 2.3.2."""
    raw = wide(raw)
    if kind == "softplus":
        f = F.softplus(raw)
    else:  # 1 + x above zero, 1 / (1 - x) below: meets itself with slope 1
        f = torch.where(raw >= 0, 1 + raw, 1 / (1 - raw.clamp(max=0)))
    return (-f).clamp(max=-floor)


def rms_norm(x, w, eps, group=None):
    """RMSNorm over the last axis, or over runs of `group` numbers of it."""
    xw = wide(x)
    y = xw if group is None else xw.unflatten(-1, (-1, group))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return ((y if group is None else y.flatten(-2)) * wide(w)).to(x.dtype)


def turn(x, theta, pairs):
    """Turns pairs of x (..., N) by theta (..., S), S <= N/2; what has no angle stays as it is.

    adjacent: (2i, 2i+1), the SISO layout; half: (i, i + N/2), the MIMO layout."""
    n, s = x.shape[-1], theta.shape[-1]
    c, d = torch.cos(theta), torch.sin(theta)
    if s < n // 2:
        c, d = F.pad(c, (0, n // 2 - s), value=1.0), F.pad(d, (0, n // 2 - s))
    if pairs == "adjacent":
        a, b = x[..., 0:n:2], x[..., 1:n:2]
        return torch.stack([a * c - b * d, a * d + b * c], -1).flatten(-2)
    a, b = x[..., : n // 2], x[..., n // 2 :]
    return torch.cat([a * c - b * d, a * d + b * c], -1)


def angles(raw, dt, theta0):
    """Running angle modulo 2 pi: raw (B,T,S), dt (B,T,H), theta0 (B,H,S) -> (B,T,H,S). Inclusive of token t.
    Summed in float64: unreduced float32 sums lose the angle."""
    d = torch.float64
    th = (
        torch.cumsum(math.pi * torch.tanh(raw.to(d))[:, :, None] * dt.to(d)[..., None], 1)
        + theta0.to(d)[:, None]
    )
    return (th - 2 * math.pi * torch.floor(th.detach() / (2 * math.pi))).to(dt.dtype)


def scan(q, k, v, adt, dt, lam, h, k_prev, v_prev):
    """The recurrence. q, k (B,T,H,R,N) turned; v (B,T,H,R,P); adt, dt, lam (B,T,H);
    h (B,H,P,N); k_prev (B,H,R,N); v_prev (B,H,R,P). Returns y (B,T,H,R,P) and the carried three."""
    alpha, gamma = torch.exp(adt), lam * dt
    beta = (1 - lam) * dt * alpha
    outer = lambda v, k: torch.einsum("bhrp,bhrn->bhpn", v, k)
    ys = []
    for t in range(q.shape[1]):
        w = lambda c: c[:, t, :, None, None]
        h = w(alpha) * h + w(beta) * outer(v_prev, k_prev) + w(gamma) * outer(v[:, t], k[:, t])
        ys.append(torch.einsum("bhpn,bhrn->bhrp", h, q[:, t]))
        k_prev, v_prev = k[:, t], v[:, t]
    return torch.stack(ys, 1), (h, k_prev, v_prev)


# ------------------------------------------------------------------ the mixer


class Mixer(nn.Module):
    """One Mamba-3 block. Parameter names and shapes are those of official checkpoints."""

    def __init__(
        self,
        d_model,
        d_state=128,
        expand=2,
        headdim=64,
        ngroups=1,
        rope_fraction=0.5,
        A_floor=1e-4,
        is_outproj_norm=False,
        is_mimo=False,
        mimo_rank=4,
        eps=1e-5,
        A_activation="heavy_tail",
        **_,
    ):
        super().__init__()
        self.N, self.P, self.G = d_state, headdim, ngroups
        self.R = mimo_rank if is_mimo else 1
        self.d_inner = int(expand * d_model)
        self.H = self.d_inner // headdim
        assert self.H * headdim == self.d_inner and self.H % ngroups == 0 and d_state % 2 == 0
        self.S = int(d_state * rope_fraction) // 2
        self.pairs = "half" if is_mimo else "adjacent"
        self.A_floor, self.A_activation, self.eps = A_floor, A_activation, eps
        self.sizes = [
            self.d_inner,
            self.d_inner,
            self.R * self.G * self.N,
            self.R * self.G * self.N,
            self.H,
            self.H,
            self.H,
            self.S,
        ]  # z x B C dt A trap angle
        self.in_proj = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(self.H))
        self.B_bias = nn.Parameter(torch.ones(self.H, self.R, self.N))
        self.C_bias = nn.Parameter(torch.ones(self.H, self.R, self.N))
        self.B_norm, self.C_norm = Norm(self.N, eps), Norm(self.N, eps)
        if is_mimo:
            self.mimo_x = nn.Parameter(torch.ones(self.H, self.R, headdim) / self.R)
            self.mimo_z = nn.Parameter(torch.ones(self.H, self.R, headdim))
            self.mimo_o = nn.Parameter(torch.ones(self.H, self.R, headdim) / self.R)
        self.D = nn.Parameter(torch.ones(self.H))
        if is_outproj_norm:
            self.norm = Norm(self.d_inner, eps)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def zero_state(self, batch, like):
        """angle (B,H,S), ssm (B,H,P,N), k of the last token, turned (B,R,H,N), its x (B,H,P)."""
        z = lambda *s: torch.zeros(batch, *s, device=like.device, dtype=wide(like).dtype)
        return (
            z(self.H, self.S),
            z(self.H, self.P, self.N),
            z(self.R, self.H, self.N),
            z(self.H, self.P),
        )

    def forward(self, u, state=None, return_state=False):
        B, T, _ = u.shape
        H, P, N, R, G = self.H, self.P, self.N, self.R, self.G
        z, x, b, c, dt, a, trap, ang = self.in_proj(u).split(self.sizes, -1)
        z, x = (wide(e).view(B, T, H, P) for e in (z, x))
        theta0, h, k_prev, x_prev = state if state is not None else self.zero_state(B, u)

        dt = F.softplus(wide(dt) + wide(self.dt_bias))
        adt = decay_rate(a, self.A_floor, self.A_activation) * dt
        lam = torch.sigmoid(wide(trap))
        theta = angles(wide(ang), dt, theta0)  # B T H S

        def head(e, norm, bias):  # -> B T H R N
            e = norm(e.view(B, T, R, G, N)).repeat_interleave(
                H // G, 3
            )  # head h reads group h // (H/G)
            return turn(wide(e.transpose(2, 3)) + wide(bias), theta[:, :, :, None], self.pairs)

        k, q = head(b, self.B_norm, self.B_bias), head(c, self.C_norm, self.C_bias)

        up = wide(self.mimo_x) if hasattr(self, "mimo_x") else x.new_ones(H, 1, P)
        v = x[:, :, :, None] * up
        y, (h, k_last, _) = scan(
            q, k, v, adt, dt, lam, h, k_prev.transpose(1, 2), x_prev[:, :, None] * up
        )
        y = y + wide(self.D)[:, None, None] * v  # B T H R P
        gate = z[:, :, :, None] * (wide(self.mimo_z) if hasattr(self, "mimo_z") else 1.0)
        if hasattr(self, "norm"):  # over P, each head and rank alone
            y = (
                y
                * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
                * wide(self.norm.weight).view(H, 1, P)
            )
        y = y * F.silu(gate)
        y = (y * wide(self.mimo_o)).sum(3) if hasattr(self, "mimo_o") else y[:, :, :, 0]
        out = self.out_proj(y.reshape(B, T, self.d_inner).to(u.dtype))
        if return_state:
            return out, (theta[:, -1], h, k_last.transpose(1, 2), x[:, -1])
        return out

    def step(self, u, state):
        """One token: u (B, d_model) -> out (B, d_model), state."""
        out, state = self.forward(u[:, None], state, True)
        return out[:, 0], state


# ------------------------------------------------------------------ around it


class Norm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def attend(q, k, v, rotary_dim, base, scale=None, start=0):
    """Causal attention, grouped heads. q (B,T,Hq,d), k and v (B,T,Hk,d); pairs (i, i + rotary_dim/2)."""
    T, d = q.shape[1], q.shape[-1]
    if rotary_dim:
        f = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        th = torch.outer(torch.arange(start, start + T, dtype=torch.float64), f).to(q)[
            None, :, None
        ]
        rot = lambda x: torch.cat([turn(x[..., :rotary_dim], th, "half"), x[..., rotary_dim:]], -1)
        q, k = rot(q), rot(k)
    k, v = (e.repeat_interleave(q.shape[2] // k.shape[2], 2) for e in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, k) * (scale or d**-0.5)
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).flatten(2)


class OfficialAttention(nn.Module):
    """mamba_ssm's MHA (attn_layer_idx, attn_cfg): one projection [q, k, v], no convolution."""

    def __init__(
        self,
        d_model,
        num_heads,
        num_heads_kv=None,
        head_dim=None,
        qkv_proj_bias=True,
        out_proj_bias=True,
        softmax_scale=None,
        causal=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        **_,
    ):
        super().__init__()
        assert causal
        self.h, self.hk = num_heads, num_heads_kv or num_heads
        self.d = head_dim or d_model // num_heads
        self.rotary, self.base, self.scale = rotary_emb_dim, rotary_emb_base, softmax_scale
        self.in_proj = nn.Linear(d_model, (self.h + 2 * self.hk) * self.d, bias=qkv_proj_bias)
        self.out_proj = nn.Linear(self.h * self.d, d_model, bias=out_proj_bias)

    def forward(self, u):
        x = self.in_proj(u).unflatten(-1, (-1, self.d))
        q, k, v = x.split([self.h, self.hk, self.hk], 2)
        return self.out_proj(attend(q, k, v, self.rotary, self.base, self.scale))


class Attention(nn.Module):
    """Elapid's own names."""

    def __init__(self, d_model, n_head, n_kv_head=None, d_head=None, rope_base=10000.0):
        super().__init__()
        self.d = d_head or d_model // n_head
        n_kv, self.base = n_kv_head or n_head, rope_base
        lin = lambda o, i: nn.Linear(i, o, bias=False)
        self.q_proj, self.o_proj = lin(n_head * self.d, d_model), lin(d_model, n_head * self.d)
        self.k_proj, self.v_proj = lin(n_kv * self.d, d_model), lin(n_kv * self.d, d_model)

    def forward(self, u):
        q, k, v = (
            p(u).unflatten(-1, (-1, self.d)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(attend(q, k, v, self.d, self.base))


class GatedMLP(nn.Module):
    """Official: fc1 gives [value, gate] in this order; the width is rounded up to a multiple of 128."""

    def __init__(self, d, hidden):
        super().__init__()
        hidden = -(-hidden // 128) * 128
        self.fc1, self.fc2 = nn.Linear(d, 2 * hidden, bias=False), nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        value, gate = self.fc1(x).chunk(2, -1)
        return self.fc2(value * F.silu(gate))


class SwiGLU(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Shared(x) + sum over the top k of softmax(chosen logits) Expert(x)."""

    def __init__(self, d, n_expert, n_used, d_ff, d_shared):
        super().__init__()
        self.n_used = n_used
        self.router = nn.Linear(d, n_expert, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d, d_ff) for _ in range(n_expert))
        if d_shared:
            self.shared = SwiGLU(d, d_shared)

    def forward(self, x):
        logits = self.router(x)
        top, idx = logits.topk(self.n_used, -1)
        self.margin = (
            logits.topk(self.n_used + 1, -1).values[..., -2:].diff(dim=-1).abs().min().item()
            if self.n_used < logits.shape[-1]
            else math.inf
        )
        self.load = torch.bincount(idx.flatten(), minlength=logits.shape[-1])
        w = torch.zeros_like(logits).scatter(-1, idx, top.softmax(-1))
        y = sum(w[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        return y + self.shared(x) if hasattr(self, "shared") else y


class Layer(nn.Module):
    def __init__(self, mixer, ff, d, eps, names):
        super().__init__()
        self.names = names  # norm before the mixer, mixer, norm before ff, ff
        setattr(self, names[0], Norm(d, eps)), setattr(self, names[1], mixer)
        if ff is not None:
            setattr(self, names[2], Norm(d, eps)), setattr(self, names[3], ff)

    def forward(self, x, state=None, keep=False):
        n1, m, n2, f = (getattr(self, n, None) for n in self.names)
        if keep and isinstance(m, Mixer):
            y, state = m(n1(x), state, True)
        else:
            y = m(n1(x))
        x = x + y
        if f is not None:
            x = x + f(n2(x))
        return x, state


class ShortConv(nn.Module):
    """A causal convolution of each channel over its last d_conv tokens."""

    def __init__(self, d, d_conv):
        super().__init__()
        self.conv1d = nn.Conv1d(d, d, d_conv, groups=d, padding=d_conv - 1)

    def forward(self, x):
        return self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class LM(nn.Module):
    """config with `ssm_cfg`: mamba_ssm's MambaConfig. config with `model_type: elapid`: Elapid's own."""

    def __init__(self, config):
        super().__init__()
        c, eps = config, 1e-5
        self.config, self.own = c, c.get("model_type") == "elapid"
        d = c["d_model"]
        if self.own:
            V, tied, ex = c["vocab_size"], c.get("tied", True), c["experts"]
            if c["layers"] == "zamba":
                m, at = dict(c["mamba3"]), c["attention"]
                args = dict(
                    d_state=m["d_state"],
                    expand=m["expand"],
                    headdim=m["d_head"],
                    ngroups=m["n_group"],
                    rope_fraction=m["rope_fraction"],
                    is_mimo=m["rank"] > 1,
                    mimo_rank=m["rank"],
                    is_outproj_norm=m["out_norm"],
                )
                mixers = [
                    Attention(d, **at) if i % 6 == 5 else Mixer(d, **args)
                    for i in range(c["n_layer"])
                ]
            else:
                assert all(name == "short_conv" for name in c["layers"])
                mixers = [ShortConv(d, **c["short_conv"]) for _ in c["layers"]]
            names = ("mixer_norm", "mixer", "feed_forward_norm", "feed_forward")
            layers = [Layer(mixer, Experts(d, **ex), d, eps, names) for mixer in mixers]
            self.embed, self.norm = Embed(V, d), Norm(d, eps)
            self.layers = nn.ModuleList(layers)
        else:
            mult = c.get("pad_vocab_size_multiple", 8)
            V, tied = -(-c["vocab_size"] // mult) * mult, c.get("tie_embeddings", True)
            ssm = {k: v for k, v in c["ssm_cfg"].items() if k != "layer"}
            assert c["ssm_cfg"]["layer"] == "Mamba3" and c.get("rms_norm", True)
            names, hid = ("norm", "mixer", "norm2", "mlp"), c.get("d_intermediate", 0)
            layers = [
                Layer(
                    OfficialAttention(d, **c["attn_cfg"])
                    if i in c.get("attn_layer_idx", [])
                    else Mixer(d, **ssm),
                    GatedMLP(d, hid) if hid else None,
                    d,
                    eps,
                    names,
                )
                for i in range(c["n_layer"])
            ]
            self.backbone = nn.Module()
            self.backbone.embedding = Embed(V, d)
            self.backbone.layers = nn.ModuleList(layers)
            self.backbone.norm_f = Norm(d, eps)
        self.V, self.tied = V, tied
        if not tied:
            self.lm_head = nn.Linear(d, V, bias=False)

    def parts(self):
        b = self if self.own else self.backbone
        return (b.embed, b.layers, b.norm) if self.own else (b.embedding, b.layers, b.norm_f)

    def forward(self, ids, states=None, keep=False):
        """Logits (B,T,V) and hidden.0 .. hidden.L (last: after the final norm); with keep, the states."""
        embed, layers, norm = self.parts()
        x = embed.weight[ids]
        hidden, new = [x], []
        for i, layer in enumerate(layers):
            x, s = layer(x, states[i] if states else None, keep)
            hidden.append(x), new.append(s)
        hidden[-1] = x = norm(x)
        head = embed.weight if self.tied else self.lm_head.weight
        return (x @ head.T, hidden, new) if keep else (x @ head.T, hidden)


class Embed(nn.Module):
    def __init__(self, v, d):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(v, d))
