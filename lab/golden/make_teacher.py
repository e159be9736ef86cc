#!/usr/bin/env python3
"""Reference values of learning from a teacher, by torch: float64, rounded once.

  make_teacher.py OUT.safetensors

For each case K, with hyper (float64 [4]: factor, the teacher's factor, temperature, share):

  K.x (n_tok, d), K.w (n_vocab, d)                the student's hidden rows and head
  K.hidden (n_tok, d'), K.head (n_vocab, d')      the teacher's
  K.ids, K.weights (n_tok)                        targets; the norm is the sum of the weights
  K.nll, K.kl, K.loss (1)                         both means, and what is minimised
  K.dx, K.dw                                      gradients of the loss

torch 2.15.0, CPU, seeded."""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

CASES = [  # n_tok, n_vocab, d, the teacher's d, hyper
    (5, 33, 4, 6, (1.0, 1.0, 2.0, 0.5)),
    (7, 48, 8, 3, (1.3, 0.7, 4.0, 0.9)),
    (3, 17, 5, 5, (0.5, 2.0, 0.7, 1.0)),
]


def case(n_tok, n_vocab, d, d_teacher, hyper, gen):
    factor, factor_teacher, temperature, share = hyper

    def normal(*shape):
        return torch.randn(shape, generator=gen).double()

    x, w = normal(n_tok, d).requires_grad_(), normal(n_vocab, d).requires_grad_()
    hidden, head = normal(n_tok, d_teacher), normal(n_vocab, d_teacher)
    ids = torch.randint(0, n_vocab, (n_tok,), generator=gen)
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 0.25])[:n_tok].double()
    z, t = factor * x @ w.T, factor_teacher * hidden @ head.T
    norm = weights.sum()
    nll = (weights * F.cross_entropy(z, ids, reduction="none")).sum() / norm
    p, q = (F.log_softmax(logits / temperature, -1) for logits in (z, t))
    kl = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    kl = (weights * kl).sum() / norm
    loss = (1 - share) * nll + share * temperature**2 * kl
    loss.backward()
    named = dict(x=x, w=w, hidden=hidden, head=head, weights=weights, dx=x.grad, dw=w.grad)
    named |= {name: value.reshape(1) for name, value in dict(nll=nll, kl=kl, loss=loss).items()}
    out = {name: value.detach().float().contiguous() for name, value in named.items()}
    return out | dict(ids=ids, hyper=torch.tensor(hyper, dtype=torch.float64))


def main():
    gen = torch.Generator().manual_seed(0)
    out = {}
    for k, args in enumerate(CASES):
        out |= {f"{k}.{name}": value for name, value in case(*args, gen).items()}
    save_file(out, sys.argv[1])


if __name__ == "__main__":
    main()
