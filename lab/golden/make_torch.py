#!/usr/bin/env python3
"""State dicts as torch.save writes them, and some that must be refused.

  make_torch.py OUT.safetensors CORPUS

CORPUS/kinds.bin is a dict with one tensor of every kind: all dtypes, no axes, an empty axis,
  tensors that share a storage, a parameter; OUT.safetensors has the same tensors.
CORPUS/module.bin is the state dict of a module, which has attributes; its two weights are one.
CORPUS/model.bin holds the weights of a small model of ours.
CORPUS/wide.bin is kinds.bin with 64-bit sizes and places in its list.
CORPUS/bad-NAME.bin: strides, a dict in a dict, the format before 1.6, big-endian numbers,
  compressed, a pickle that calls os.system. Names with `bad-` are refused, the others accepted."""

import io
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

OUT, CORPUS = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(7)

table = torch.randn(4, 3)
kinds = {
    "float": torch.randn(2, 3),
    "half": torch.randn(5).half(),
    "bfloat": torch.randn(3, 1, 2).bfloat16(),
    "double": torch.randn(3, dtype=torch.float64),
    "long": torch.tensor([1, -2, 1 << 40]),
    "int": torch.tensor([[3], [-4]], dtype=torch.int32),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(0.5),
    "empty": torch.zeros(0, 4),
    "rows.all": table,
    "rows.last": table[2:],
    "one.row": table[1:2].t().reshape(3, 1),
    "param": torch.nn.Parameter(torch.randn(2, 2)),
}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def saved(value, **more):
    file = io.BytesIO()
    torch.save(value, file, **more)
    return file.getvalue()


def repacked(data, change=None, method=zipfile.ZIP_STORED):
    """The same archive, written by Python, with one file changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", method) as new:
        for info in old.infolist():
            name = info.filename.split("/", 1)[1]
            body = change[1] if change and change[0] == name else old.read(info)
            new.writestr(zipfile.ZipInfo(info.filename), body, compress_type=method)
    return file.getvalue()


def widened(data):
    """All sizes and places of the list moved into zip64 fields."""
    end = data.rindex(b"PK\x05\x06")
    count, size, at = struct.unpack("<HII", data[end + 10 : end + 20])
    entries, out = data[at : at + size], b""
    while entries:
        packed, full, n_name, n_extra, n_comment = struct.unpack("<IIHHH", entries[20:34])
        (place,) = struct.unpack("<I", entries[42:46])
        extra = struct.pack("<HHQQQ", 1, 24, full, packed, place)
        other = struct.pack("<HHI", 0x4246, 4, 0)
        out += entries[:20] + b"\xff" * 8
        out += struct.pack("<HHH", n_name, len(other + extra), 0) + entries[34:42] + b"\xff" * 4
        out += entries[46 : 46 + n_name] + other + extra
        entries = entries[46 + n_name + n_extra + n_comment :]
    wide = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(out), at)
    place = b"PK\x06\x07" + struct.pack("<IQI", 0, at + len(out), 1)
    last = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 3)
    return data[:at] + out + wide + place + last + b"end"


class Call:
    def __reduce__(self):
        import os

        return (os.system, ("true",))


model = {
    "embed.weight": torch.randn(6, 4),
    "layers.0.mixer_norm.weight": torch.ones(4),
    "layers.0.mixer.conv1d.weight": torch.randn(4, 1, 3),
    "layers.0.mixer.conv1d.bias": torch.randn(4),
    "norm.weight": torch.ones(4),
}
small = saved({"x": torch.ones(2)})
files = {
    "kinds.bin": saved(kinds),
    "module.bin": saved(Tied().state_dict()),
    "model.bin": saved(model),
    "wide.bin": widened(saved(kinds)),
    "bad-strides.bin": repacked(saved({"x": torch.randn(2, 3).t()})),
    "bad-nested.bin": repacked(saved({"model": {"x": torch.ones(2)}})),
    "bad-legacy.bin": saved({"x": torch.ones(2)}, _use_new_zipfile_serialization=False),
    "bad-order.bin": repacked(small, ("byteorder", b"big")),
    "bad-packed.bin": repacked(small, method=zipfile.ZIP_DEFLATED),
    "bad-system.bin": repacked(small, ("data.pkl", pickle.dumps(Call(), protocol=2))),
}
CORPUS.mkdir(parents=True, exist_ok=True)
for name, data in files.items():
    (CORPUS / name).write_bytes(data)
save_file({name: tensor.detach().clone() for name, tensor in kinds.items()}, OUT)
print(sum(map(len, files.values())), "bytes")
