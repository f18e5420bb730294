#!/usr/bin/env python3
"""Writes a checkpoint in Hugging Face's layout with tensors that are quantized in blocks of 4x4, and what PyTorch's
QuantizedHuggingFaceStorageReader loads from it, beside this script. Deterministic. Run by 2.14.

model/                  weights in float8 and their scales, which are in another file for one of them, and a plain tensor
expected.safetensors    "<name> <dtype>" for each weight and each dtype that it was loaded into
"""

import json
import pathlib
import warnings

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE / "model"
BLOCK = 4
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def blocks(size):
    return [-(-n // BLOCK) for n in size]


def main():
    torch.manual_seed(214)
    shapes = {"uneven.weight": (10, 13), "even.weight": (8, 4), "small.weight": (3, 1)}
    files = [{}, {}]
    for i, (name, shape) in enumerate(shapes.items()):
        files[0][name] = (torch.randn(shape) * 40).to(torch.float8_e5m2 if name == "even.weight" else torch.float8_e4m3fn)
        scale = torch.rand(blocks(shape)) * 3 + 0.01
        files[i % 2][name + "_scale_inv"] = scale.to(torch.bfloat16) if name == "small.weight" else scale
    files[1]["plain.weight"] = torch.randn(5, 6).to(torch.bfloat16)
    MODEL.mkdir(exist_ok=True)
    weight_map = {}
    for file, tensors in zip(FILES, files):
        save_file(tensors, MODEL / file, metadata={"format": "pt"})
        weight_map.update({name: file for name in tensors})
    index = {"metadata": {"total_size": sum(t.nbytes for f in files for t in f.values())}, "weight_map": weight_map}
    (MODEL / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    expected = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        state = {name: torch.zeros(shape, dtype=dtype) for name, shape in {**shapes, "plain.weight": (5, 6)}.items()}
        reader = QuantizedHuggingFaceStorageReader(str(MODEL), block_size=BLOCK)
        dcp.load(state, storage_reader=reader)
        expected.update({f"{name} {str(dtype).removeprefix('torch.')}": tensor for name, tensor in state.items()})
    save_file(expected, HERE / "expected.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
