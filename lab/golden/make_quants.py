#!/usr/bin/env python3
"""Reference values of the block formats of ggml: decoded by gguf-py, encoded by ggml itself.

  GGML_BASE=libggml-base.so make_quants.py OUT.safetensors

The library is one that a build of llama.cpp makes; Python packages of it carry one too.

NAME.raw (uint8 [blocks, bytes of one]) and NAME.values (float32 [blocks, numbers of one]), for each
  format NAME: all bits clear; all set; an own f16 scale of either sign, of the smallest normal and
  of subnormal size on random bits; and, where gguf-py can encode the format, encoded numbers.
source (float32 [rows, 256]) and NAME.encoded (uint8 [rows, bytes of one]): encoding without an
  importance matrix, for each format; the rows are what `hard_rows` makes."""

import ctypes
import os
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import save_file

# Where each format keeps its f16 numbers within a block.
HALVES = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q2_k": [80, 82],
    "q3_k": [108],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
}
SCALES = [0.0123, -0.0371, 2.0**-14, 3 * 2.0**-24]


def patterns(kind, halves, rng):
    n_bytes = GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (2 + len(SCALES), n_bytes), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    for row, scale in zip(raw, [0.5, 0.25, *SCALES]):
        for i, at in enumerate(halves):
            value = np.array([scale * (1 + 0.37 * i)], np.float16)
            row[at : at + 2] = value.view(np.uint8)
    return raw


def numbers(rng):
    source = rng.standard_normal((3, 32)).astype(np.float32)
    source[1] = 0
    source[2] = np.arange(32) - 15.5  # ties, once the largest makes the scale one
    source[2, 0] = 127
    return source


def hard_rows(rng):
    """Rows of 256: ordinary weights at many sizes, then what could break a search for scales."""
    normal = lambda n: rng.standard_normal((n, 256)).astype(np.float32)
    groups = lambda values, size: np.repeat(values, size, axis=1)
    is_rare = lambda n: rng.random((n, 256)) < 0.03
    sizes = [1, 0.02, 1e-3, 1e-8, 1e4, 1e-15, 1e-20, 1e-38, 1e-41, 1e15]
    # From 1e-38 down the inverse of a scale is infinite.
    rows = [normal(2) * np.float32(size) for size in sizes]
    rows.append(normal(4) * np.where(is_rare(4), 40, 1))  # outliers
    rows.append(normal(4) * is_rare(4))  # nearly all zeros, of either sign
    rows.append(normal(2) * groups(rng.random((2, 16)) < 0.5, 16))  # groups of zeros
    rows.append(normal(4) * groups(10.0 ** rng.integers(-12, 6, (4, 16)), 16))  # unequal groups
    rows.append(groups(normal(2)[:, :8], 32))  # constant groups
    rows.append(np.full((1, 256), -0.3))
    rows.append(np.zeros((1, 256)))
    rows.append(np.where(rng.random((2, 256)) < 0.5, 0.0, -0.0))
    rows.append(rng.random((2, 256)))  # no minimum below zero
    rows.append(rng.random((2, 256)) + 5)
    rows.append(-rng.random((2, 256)))
    rows.append(np.maximum(normal(2), 0) * np.where(is_rare(2), -0.0, 1))
    rows.append(np.sign(normal(2)) * 0.37)
    rows.append(rng.integers(-8, 9, (2, 256)))  # ties
    rows.append(rng.integers(-40, 41, (2, 256)) / 2)
    ties = np.tile(np.arange(32) - 15.5, (1, 8))
    ties[:, ::32] = 127  # makes the scale of q8_0 one
    rows.append(ties)
    opposite = normal(1)[:, :16]  # two scales as far from zero, of either sign
    rows.append(np.tile(np.concatenate([opposite, -opposite], axis=1), (1, 8)))
    # One in some hundreds of rows still changes in the last round of the search of q3_k.
    rows.append(np.random.default_rng(416).standard_normal((1, 256)))
    return np.concatenate(rows).astype(np.float32)


def encoded(library, source, kind):
    n_elem, n_bytes = GGML_QUANT_SIZES[kind]
    out = np.zeros((len(source), source.shape[1] // n_elem * n_bytes), np.uint8)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (source, out)]
    counts = [ctypes.c_int64(n) for n in (0, *source.shape)]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    n_written = library.ggml_quantize_chunk(int(kind), *pointers, *counts, None)
    assert n_written == out.nbytes, (kind, n_written)
    return out


def main(path):
    library = ctypes.CDLL(os.environ["GGML_BASE"])
    rng = np.random.default_rng(7)
    source = numbers(rng)
    out = {"source": hard_rows(np.random.default_rng(8))}
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name.upper()]
        raw = patterns(kind, halves, rng)
        if source.shape[1] == GGML_QUANT_SIZES[kind][0]:  # gguf-py does not encode larger blocks
            raw = np.concatenate([raw, quants.quantize(source, kind)])
        values = quants.dequantize(raw, kind).astype(np.float32)
        assert np.isfinite(values).all() and len(np.unique(values)) > 20, name
        out[f"{name}.raw"], out[f"{name}.values"] = raw, values
        out[f"{name}.encoded"] = encoded(library, out["source"], kind)
    save_file({name: np.ascontiguousarray(x) for name, x in out.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
