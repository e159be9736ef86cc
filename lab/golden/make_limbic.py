#!/usr/bin/env python3
"""Reference values of the limbic head.

  make_limbic.py OUT.safetensors

A head of 5 inputs and 7 hidden numbers, and two sequences of samples, one behind the other.

  p.NAME               weights before training: w_in, w_state, decay, w_out, b, w_reward, b_reward
  inputs, states, targets, rewards               (n_row, 5), (n_row, 8), (n_row, 8), (n_row)
  lengths                                        samples of each sequence, int64
  loss, g.NAME         mean loss of all samples and its gradients, through whole sequences
  a.NAME               after 3 epochs of AdamW in windows of 3 samples: the hidden state is carried
                       from window to window, gradients are not
  hyper                (lr, clip_norm, reward_weight, weight_decay of matrices), float64

Computed in float64, rounded once to float32. torch 2.15.0; CPU, seeded."""

import sys

import torch
from safetensors.torch import save_file

D_IN, D_HIDDEN, LENGTHS, WINDOW, N_EPOCHS = 5, 7, [7, 5], 3, 3
LR, CLIP_NORM, REWARD_WEIGHT, WEIGHT_DECAY = 0.05, 0.1, 0.5, 0.01
MATRICES = ["w_in", "w_state", "w_out", "w_reward"]


def start():
    shapes = dict(
        w_in=(D_HIDDEN, D_IN),
        w_state=(D_HIDDEN, 8),
        decay=(D_HIDDEN,),
        w_out=(8, D_HIDDEN),
        b=(8,),
        w_reward=(1, D_HIDDEN),
        b_reward=(1,),
    )
    # Through float32, which is what the file holds.
    return {name: (torch.randn(shape) * 0.4).double() for name, shape in shapes.items()}


def forward(p, inputs, states, hidden):
    """Changes and rewards of one window of one sequence, and the hidden state behind it."""
    deltas, rewards = [], []
    for x, s in zip(inputs, states):
        a = torch.sigmoid(p["decay"])
        hidden = a * hidden + (1 - a) * torch.tanh(p["w_in"] @ x + p["w_state"] @ s)
        deltas.append(torch.tanh(p["w_out"] @ hidden + p["b"]))
        rewards.append(p["w_reward"] @ hidden + p["b_reward"])
    return torch.stack(deltas), torch.cat(rewards), hidden


def loss_of(p, sequences, hiddens):
    """Mean over all samples of one window of each sequence; hidden states are replaced."""
    total, n_rows = 0.0, 0
    for idx, (inputs, states, targets, rewards) in sequences:
        d, r, hiddens[idx] = forward(p, inputs, states, hiddens[idx])
        total = total + 0.5 * ((d - targets) ** 2).sum()
        total = total + 0.5 * REWARD_WEIGHT * ((r - rewards) ** 2).sum()
        n_rows += len(inputs)
    return total / n_rows


def trained(p):
    return {name: value.clone().requires_grad_() for name, value in p.items()}


def zeros():
    return [torch.zeros(D_HIDDEN, dtype=torch.float64) for _ in LENGTHS]


def main(out):
    torch.manual_seed(11)
    p0, n_rows = start(), sum(LENGTHS)
    inputs, states = torch.randn(n_rows, D_IN).double(), torch.rand(n_rows, 8).double()
    targets = (torch.rand(n_rows, 8) * 1.6 - 0.8).double()
    rewards = torch.randn(n_rows).double()
    columns = (inputs, states, targets, rewards)
    sequences = list(enumerate(zip(*[column.split(LENGTHS) for column in columns])))
    tensors = dict(inputs=inputs, states=states, targets=targets, rewards=rewards)
    tensors.update({f"p.{name}": value for name, value in p0.items()})

    p = trained(p0)
    loss = loss_of(p, sequences, zeros())
    loss.backward()
    tensors["loss"] = loss.detach().reshape(1)
    tensors.update({f"g.{name}": value.grad for name, value in p.items()})

    p, n_clipped = trained(p0), 0
    groups = [
        dict(params=[p[name] for name in MATRICES], weight_decay=WEIGHT_DECAY),
        dict(params=[p[name] for name in p if name not in MATRICES], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    for _ in range(N_EPOCHS):
        hiddens = zeros()
        for begin in range(0, max(LENGTHS), WINDOW):
            cut = lambda columns: [column[begin : begin + WINDOW] for column in columns]
            live = [(idx, cut(it)) for idx, it in sequences if LENGTHS[idx] > begin]
            hiddens = [hidden.detach() for hidden in hiddens]
            optimizer.zero_grad()
            loss_of(p, live, hiddens).backward()
            n_clipped += torch.nn.utils.clip_grad_norm_(p.values(), CLIP_NORM).item() > CLIP_NORM
            optimizer.step()
    assert n_clipped == N_EPOCHS * -(-max(LENGTHS) // WINDOW), "every step is clipped"
    tensors.update({f"a.{name}": value.detach() for name, value in p.items()})

    tensors = {name: value.float().contiguous() for name, value in tensors.items()}
    hyper = [LR, CLIP_NORM, REWARD_WEIGHT, WEIGHT_DECAY]
    tensors["hyper"] = torch.tensor(hyper, dtype=torch.float64)
    tensors["lengths"] = torch.tensor(LENGTHS)
    save_file(tensors, out)


main(sys.argv[1])
