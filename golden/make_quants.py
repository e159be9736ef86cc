#!/usr/bin/env python3
"""Reference values of the block formats of ggml, decoded by gguf-py.

  make_quants.py OUT.safetensors

NAME.raw (uint8 [blocks, bytes of one]) and NAME.values (float32 [blocks, numbers of one]), for each
  format NAME: all bits clear; all set; an own f16 scale of either sign, of the smallest normal and
  of subnormal size on random bits; and, where gguf-py can encode the format, encoded numbers.
q8_0.source (float32 [blocks, 32]) and q8_0.encoded: encoding, with ties and a block of zeros."""

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


def main(path):
    rng = np.random.default_rng(7)
    source = numbers(rng)
    out = {}
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name.upper()]
        raw = patterns(kind, halves, rng)
        if source.shape[1] == GGML_QUANT_SIZES[kind][0]:  # gguf-py does not encode larger blocks
            raw = np.concatenate([raw, quants.quantize(source, kind)])
        values = quants.dequantize(raw, kind).astype(np.float32)
        assert np.isfinite(values).all() and len(np.unique(values)) > 20, name
        out[f"{name}.raw"], out[f"{name}.values"] = raw, values
    out["q8_0.source"] = source
    out["q8_0.encoded"] = quants.quantize(source, GGMLQuantizationType.Q8_0)
    save_file({name: np.ascontiguousarray(x) for name, x in out.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
