#!/usr/bin/env python3
"""Golden values for Mamba-3, and for models of our own, from mamba3_reference.py.

  make_mamba3.py SET OUT [--seed N]     one of SETS below
  make_mamba3.py --all OUTROOT          every one
  make_mamba3.py --list

OUT/ holds
  config.json              mamba_ssm's MambaConfig (what official checkpoints carry), Elapid's own for `zamba` and `evermind`,
                           that of flash-linear-attention for `mamba3_fla`
  model.safetensors        float32 weights under the official names (`zamba`, `evermind`: Elapid's own names)
  golden.safetensors       input_ids, labels, logits, loss, hidden.0..L (0: embeddings, L: after the final norm), grad.<param>
  after_adamw.safetensors  every parameter after N torch.optim.AdamW steps on the same batch
  states.safetensors       what decoding carries after input_ids, per Mamba-3 layer: state.<i>.angle (B,H,S; in [0, 2 pi)),
                           .ssm (B,H,P,N), .k (B,R,H,N), .v (B,H,P); next_ids (B), and next_logits from one step with them
  golden.json              loss, traces, optimizer, greedy continuations with margins, noise floor (float32 against float64)
Values are computed in float64 from the stored float32 weights and rounded once, so they are not one implementation's noise.
`noise_floor` says what mamba3_reference.py in plain float32 differs from them by. CPU, seeded; a rerun gives the same bytes."""

import argparse, copy, json, math, os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
from safetensors.torch import save_file
import mamba3_reference as R

torch.set_num_threads(1)
OPT = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def official(d_model, n_layer, vocab, d_int=0, tie=True, pad=16, attn=None, **ssm):
    base = dict(
        layer="Mamba3",
        d_state=16,
        expand=2,
        headdim=16,
        ngroups=1,
        rope_fraction=0.5,
        chunk_size=64,
        is_mimo=False,
        is_outproj_norm=False,
    )
    return dict(
        d_model=d_model,
        d_intermediate=d_int,
        n_layer=n_layer,
        vocab_size=vocab,
        ssm_cfg=base | ssm,
        attn_layer_idx=sorted(attn[0]) if attn else [],
        attn_cfg=attn[1] if attn else {},
        rms_norm=True,
        residual_in_fp32=True,
        fused_add_norm=True,
        pad_vocab_size_multiple=pad,
        tie_embeddings=tie,
    )


def zamba(
    d_model,
    vocab,
    n_layer=6,
    tied=True,
    rank=1,
    d_state=16,
    d_head=8,
    n_group=1,
    rope_fraction=0.5,
    out_norm=False,
    heads=(4, 2),
    experts=(4, 2, 24, 16),
):
    return dict(
        model_type="elapid",
        vocab_size=vocab,
        d_model=d_model,
        layers="zamba",
        n_layer=n_layer,
        tied=tied,
        eps=1e-5,
        feed_forward="experts",
        balance_scale=0.0,
        mamba3=dict(
            d_state=d_state,
            expand=2,
            d_head=d_head,
            n_group=n_group,
            rank=rank,
            rope_fraction=rope_fraction,
            out_norm=out_norm,
        ),
        attention=dict(n_head=heads[0], n_kv_head=heads[1]),
        experts=dict(zip(("n_expert", "n_used", "d_ff", "d_shared"), experts)),
    )


def evermind(d_model, vocab, n_layer=4, experts=(4, 2, 12, 24)):
    return dict(
        model_type="elapid",
        vocab_size=vocab,
        d_model=d_model,
        layers=["short_conv"] * n_layer,
        tied=True,
        eps=1e-5,
        feed_forward="experts",
        balance_scale=0.0,
        short_conv=dict(d_conv=3),
        experts=dict(zip(("n_expert", "n_used", "d_ff", "d_shared"), experts)),
    )


ATT = lambda idx, **k: (idx, dict(causal=True, qkv_proj_bias=False, out_proj_bias=False) | k)
# name: (config, seed, batch, tokens, range of step sizes)
SETS = {
    "mamba3_siso": (official(64, 2, 512, 128), 0, 2, 24, (0.02, 1.5)),
    "mamba3_mimo": (
        official(64, 2, 500, 100, is_mimo=True, mimo_rank=4, chunk_size=16),
        1,
        2,
        24,
        (0.02, 1.5),
    ),
    "mamba3_siso_odd": (
        official(
            36, 3, 101, 0, tie=False, pad=1, headdim=6, ngroups=3, d_state=18, is_outproj_norm=True
        ),
        2,
        2,
        23,
        (0.02, 1.5),
    ),
    "mamba3_siso_long": (
        official(32, 2, 128, 128, headdim=8, ngroups=2, d_state=12, rope_fraction=1.0),
        3,
        2,
        150,
        (1e-9, 5.0),
    ),
    "mamba3_mimo_attn": (
        official(
            32,
            3,
            128,
            128,
            tie=False,
            headdim=8,
            ngroups=2,
            is_mimo=True,
            mimo_rank=2,
            is_outproj_norm=True,
            chunk_size=32,
            rope_fraction=1.0,
            attn=ATT([1], num_heads=4, num_heads_kv=2, rotary_emb_dim=4),
        ),
        4,
        2,
        70,
        (0.01, 2.0),
    ),
    "mamba3_fla": (
        official(
            32,
            2,
            64,
            0,
            tie=False,
            pad=1,
            headdim=8,
            A_activation="softplus",
            A_floor=0.4,
            is_mimo=True,
            mimo_rank=2,
        ),
        6,
        2,
        24,
        (0.02, 1.5),
    ),
    "zamba": (zamba(32, 128), 5, 2, 24, (0.02, 1.5)),
    "evermind": (evermind(24, 96), 7, 2, 24, (0.02, 1.5)),
}


def fla(cfg):
    """The config of flash-linear-attention, which has softplus for the decay."""
    ssm = cfg["ssm_cfg"]
    names = dict(d_state="state_size", expand="expand", headdim="head_dim", ngroups="n_groups")
    names |= {k: k for k in ("rope_fraction", "is_mimo", "mimo_rank", "is_outproj_norm")}
    return dict(
        model_type="mamba3",
        vocab_size=cfg["vocab_size"],
        hidden_size=cfg["d_model"],
        num_hidden_layers=cfg["n_layer"],
        norm_eps=1e-5,
        A_floor=ssm["A_floor"],
        use_bias=False,
        tie_word_embeddings=cfg["tie_embeddings"],
        **{new: ssm[old] for old, new in names.items()},
    )


def init(m, seed, span):
    """Every term of the architecture shows in the logits and has a gradient."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in sorted(m.named_parameters()):
            r = torch.randn(p.shape, generator=g)
            leaf = n.split(".")[-1]
            if leaf == "dt_bias":
                dt = torch.exp(
                    torch.rand(p.shape, generator=g, dtype=torch.double)
                    * math.log(span[1] / span[0])
                    + math.log(span[0])
                )
                dt[0], dt[-1] = span
                v = dt + torch.log(-torch.expm1(-dt))
            elif leaf in ("B_bias", "C_bias"):
                v = 1 + 0.4 * r
            elif leaf in ("mimo_x", "mimo_o"):
                v = (1 + 0.7 * r) / math.sqrt(p.shape[1])
            elif leaf == "mimo_z":
                v = 1 + 0.5 * r
            elif leaf == "D":
                v = 1 + 0.3 * r
            elif leaf == "weight" and p.dim() == 1:
                v = 1 + 0.2 * r
            elif "embed" in n:
                v = (0.25 if m.tied else 0.7) * r
            else:
                v = r * (
                    (
                        0.7
                        if leaf == "weight"
                        and n.split(".")[-2] in ("out_proj", "o_proj", "fc2", "down")
                        else 1.4
                    )
                    / math.sqrt(p.shape[-1])
                )
            p.copy_(v.float())


def batch(seed, B, T, V):
    g = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(3, V, (B, T), generator=g)
    ids[:, 0] = 1
    ids[0, T // 2 : T // 2 + T // 4] = ids[
        0, 1 : 1 + T // 4
    ]  # repetitions, so that what is carried matters
    lab = ids.clone()
    lab[1, : T // 4] = -100
    return ids, lab


def loss_of(lg, lab):
    return torch.nn.functional.cross_entropy(
        lg[:, :-1].reshape(-1, lg.shape[-1]), lab[:, 1:].reshape(-1), ignore_index=-100
    )


def grads(m, ids, lab):
    m.zero_grad(set_to_none=True)
    lg, hid = m(ids)
    loss = loss_of(lg, lab)
    loss.backward()
    return lg.detach(), hid, loss.detach(), {n: p.grad.clone() for n, p in m.named_parameters()}


def adamw(m, ids, lab, n):
    opt = torch.optim.AdamW(m.parameters(), **OPT)
    tr, gn, route = [], [], math.inf
    for i in range(n + 1):
        _, _, loss, g = grads(m, ids, lab)
        tr.append(loss.item())
        route = min(route, margin(m) * (3 if i else 1))  # later steps: a third will do
        if i < n:
            gn.append(math.sqrt(sum((e**2).sum().item() for e in g.values())))
            opt.step()
    return tr, gn, route


def margin(m):
    return min([x.margin for x in m.modules() if isinstance(x, R.Experts)], default=math.inf)


def greedy(m, prompts, vocab, n=16):
    res = []
    for p in prompts:
        cur, mar = torch.tensor([p]), []
        with torch.no_grad():
            for _ in range(n):
                lg = m(cur)[0][0, -1]
                t = lg.topk(2).values
                mar.append((t[0] - t[1]).item())
                cur = torch.cat([cur, lg.argmax()[None, None]], 1)
            out = dict(prompt=p, ids=cur[0].tolist(), min_margin=min(mar))
            if all(
                isinstance(getattr(l, l.names[1]), R.Mixer) for l in m.parts()[1]
            ):  # again by single steps
                lg, _, st = m(torch.tensor([p]), None, True)
                c = list(p)
                for _ in range(n):
                    c.append(lg[0, -1].argmax().item())
                    lg, _, st = m(torch.tensor([[c[-1]]]), st, True)
                out["cache_agrees"] = c == out["ids"]
        res.append(out)
    return res


def make(name, out, spec, seed=None, steps=3):
    cfg, s0, B, T, span = spec
    seed = s0 if seed is None else seed
    for tries in range(
        200
    ):  # routes must not hang on rounding, in the first and in every later step
        sd = seed + 10000 * tries
        m32 = R.LM(cfg)
        init(m32, sd, span)
        ids, lab = batch(sd, B, T, cfg["vocab_size"])
        m = copy.deepcopy(m32).double()
        lg, hid, loss, g = grads(m, ids, lab)
        used = all((x.load > 0).all() for x in m.modules() if isinstance(x, R.Experts))
        ma = copy.deepcopy(m)
        tr, gn, route = adamw(ma, ids, lab, steps)
        gr = greedy(m, [[1], [1] + ids[0, 1:6].tolist(), ids[1, :9].tolist()], cfg["vocab_size"])
        # what float32 costs
        l32, _, o32, g32 = grads(m32, ids, lab)
        a32 = copy.deepcopy(m32)
        t32, _, _ = adamw(a32, ids, lab, steps)
        pa, pb = dict(ma.named_parameters()), dict(a32.named_parameters())
        d = torch.cat([(pa[n] - pb[n].double()).abs().flatten() for n in pa])
        gw = {n: ((g32[n].double() - g[n]).norm() / g[n].norm()).item() for n in g}
        noise = dict(
            logits_abs=(l32.double() - lg).abs().max().item(),
            loss_abs=abs(o32.item() - loss.item()),
            grad_rel_worst=max(gw.values()),
            grad_rel_worst_of=max(gw, key=gw.get),
            after_adamw_mean_abs=d.mean().item(),
            after_adamw_share_above_1e_5=(d > 1e-5).double().mean().item(),
            loss_trace_abs=max(abs(a - b) for a, b in zip(tr, t32)),
        )
        quiet = (
            noise["logits_abs"] < 3e-5
            and noise["grad_rel_worst"] < 3e-5
            and noise["after_adamw_mean_abs"] < 2e-7
            and noise["after_adamw_share_above_1e_5"] < 4e-4
        )
        if used and quiet and route > 3e-3 and min(e["min_margin"] for e in gr) > 1e-3:
            break
        if "-v" in sys.argv:
            print(sd, used, quiet, route, noise, file=sys.stderr)
    else:
        raise SystemExit(f"{name}: no seed gives clear routes and margins")
    os.makedirs(out, exist_ok=True)
    f = lambda t: t.detach().to(torch.float32).contiguous().clone()
    is_fla = cfg.get("ssm_cfg", {}).get("A_activation") == "softplus"
    json.dump(fla(cfg) if is_fla else cfg, open(out + "/config.json", "w"), indent=1)
    save = lambda t, *a: save_file(
        {n.replace("embedding.", "embeddings.") if is_fla else n: e for n, e in t.items()}, *a
    )
    save({n: f(p) for n, p in m32.named_parameters()}, out + "/model.safetensors", {"format": "pt"})
    G = dict(input_ids=ids, labels=lab, logits=f(lg), loss=f(loss)[None])
    G |= {f"hidden.{i}": f(h) for i, h in enumerate(hid)} | {
        "grad." + n: f(e) for n, e in g.items()
    }
    save(G, out + "/golden.safetensors")
    save({n: f(p) for n, p in ma.named_parameters()}, out + "/after_adamw.safetensors")
    layers = list(m.parts()[1])
    pure = all(isinstance(getattr(l, l.names[1]), R.Mixer) for l in layers)
    if pure:
        with torch.no_grad():
            full, _, st = m(ids, None, True)
            nxt = full[:, -1].argmax(-1)
            again, _, _ = m(nxt[:, None], st, True)
            whole = m(torch.cat([ids, nxt[:, None]], 1))[0][:, -1]
            assert (whole - again[:, 0]).abs().max() < 1e-10
        S = {
            f"state.{i}.{k}": f(e)
            for i, s in enumerate(st)
            for k, e in zip(("angle", "ssm", "k", "v"), s)
        }
        save(S | dict(next_ids=nxt, next_logits=f(again[:, 0])), out + "/states.safetensors")
    small = min(g, key=lambda n: g[n].norm() / math.sqrt(g[n].numel()))
    mix = [getattr(l, l.names[1]) for l in layers if isinstance(getattr(l, l.names[1]), R.Mixer)]
    meta = dict(
        set=name,
        seed=sd,
        model="mamba3",
        params=sum(p.numel() for p in m.parameters()),
        batch=[B, T],
        loss=loss.item(),
        loss_trace=tr,
        grad_norm_trace=gn,
        optimizer=dict(
            kind="AdamW (decoupled decay on every parameter, no clipping, no schedule)",
            steps=steps,
            **{k: list(v) if isinstance(v, tuple) else v for k, v in OPT.items()},
        ),
        loss_def="mean cross entropy of logits[:, :-1] vs labels[:, 1:], ignore_index -100, natural log",
        greedy=gr,
        noise_floor_f32_vs_f64=noise,
        smallest_gradient=dict(
            of=small, rms=(g[small].norm() / math.sqrt(g[small].numel())).item()
        ),
        versions=dict(
            torch=torch.__version__,
            reference="mamba3_reference.py, equal to state-spaces/mamba e9594ce in float64",
        ),
    )
    if route < math.inf:
        meta["routing_min_margin"] = route
    json.dump(meta, open(out + "/golden.json", "w"), indent=1)
    size = sum(os.path.getsize(os.path.join(out, e)) for e in os.listdir(out))
    print(
        f"{name:20s} seed {sd} params {meta['params']:6d} loss {loss:.4f} -> {tr[-1]:.4f}  |g| {gn[0]:.3f}  noise: logits {noise['logits_abs']:.1e} grad {noise['grad_rel_worst']:.1e} ({noise['grad_rel_worst_of']}) "
        f"adamw {noise['after_adamw_mean_abs']:.1e}/{noise['after_adamw_share_above_1e_5']:.1e}  cache {[e.get('cache_agrees') for e in gr]} margin {min(e['min_margin'] for e in gr):.1e} route {route:.1e} "
        f"smallest grad {meta['smallest_gradient']['rms']:.1e} ({small})  {size / 1e6:.2f} MB",
        flush=True,
    )


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("set", nargs="?")
    a.add_argument("out", nargs="?")
    a.add_argument("--all")
    a.add_argument("--list", action="store_true")
    a.add_argument("--seed", type=int)
    a.add_argument("-v", action="store_true")
    z = a.parse_args()
    if z.list:
        print("\n".join(SETS))
    elif z.all:
        for n, s in SETS.items():
            make(n, os.path.join(z.all, n), s)
    else:
        make(z.set, z.out, SETS[z.set], z.seed)
