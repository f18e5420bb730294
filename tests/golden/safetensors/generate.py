"""Writes the files of this folder with the safetensors and PyTorch that run this, and what is in them as JSON.

    python3 generate.py FOLDER

writes FOLDER/<version of safetensors>-<name>.safetensors and .json: {"safetensors", "torch", "metadata", "tensors":
{name: {"dtype", "shape", "bytes"}}}, dtypes and shapes PyTorch's, "bytes" in hex.
"""

import json
import pathlib
import sys

import safetensors
import safetensors.torch
import torch

VERSION = safetensors.__version__

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
]


def of_dtype(name):
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor([[True, False, False, True]])
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.arange(3, 3 + 4 * size, dtype=torch.uint8).view(dtype).reshape(1, 4)


def is_accepted(tensor):
    try:
        safetensors.torch.save({"x": tensor})
    except Exception:
        return False
    return True


def main():
    folder = pathlib.Path(sys.argv[1])
    dtypes = {name: of_dtype(name) for name in DTYPES if hasattr(torch, name)}
    cases = {
        "dtypes": ({name: tensor for name, tensor in dtypes.items() if is_accepted(tensor)}, {"format": "pt"}),
        "shapes": (
            {
                "scalar": torch.tensor(1.5),
                "empty": torch.zeros(0, 3),
                "empty_too": torch.zeros(2, 0),
                "vector": torch.arange(5, dtype=torch.int16),
                "cube": torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2),
                'quoted "grün"\n/\u0001': torch.ones(1),
            },
            None,
        ),
        "nothing": ({}, None),
    }
    for name, (tensors, metadata) in cases.items():
        path = folder / f"{VERSION}-{name}.safetensors"
        safetensors.torch.save_file(tensors, path, metadata)
        expected = {
            "safetensors": VERSION,
            "torch": torch.__version__,
            "metadata": metadata or {},
            "tensors": {
                key: {
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "bytes": bytes(tensor.untyped_storage()).hex(),
                }
                for key, tensor in tensors.items()
            },
        }
        path.with_suffix(".json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
