"""Writes the archives of this folder with the PyTorch that runs this, and what is in them as JSON.

    python3 generate.py FOLDER

writes FOLDER/<version>-<name>.pt and .json. Each JSON is {"torch", "python", "tensors": {path: {"dtype", "shape",
"strides", "storage_offset", "requires_grad", "parameter", "bytes"}}, "others": [path of tensors that aren't strided]};
"bytes" are the elements in row-major order, in hex. A path is the keys on the way to the tensor, joined by "/"; "." is
the whole. <version>-legacy.pth and <version>-script.ts only look alike: they are of torch.save before 1.6 and of
TorchScript. A run with the same versions gives the same files, but for the addresses that *-legacy.pth has as keys of its
storages and the hash of a device mesh in 2.6-strange.pt.
"""

import collections
import io
import json
import pathlib
import sys

import torch

VERSION = ".".join(torch.__version__.split("+")[0].split(".")[:2])

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex128",
    "complex64", "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]


def of_dtype(name, count):
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor([i % 3 == 0 for i in range(count)])
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.arange(3, 3 + count * size, dtype=torch.uint8).view(dtype)


def raw_bytes(tensor):
    # Elements in row-major order, without arithmetic that a dtype may lack.
    storage = bytes(tensor.untyped_storage())
    size = tensor.element_size()
    out = io.BytesIO()

    def walk(dimension, at):
        if dimension == tensor.dim():
            out.write(storage[at * size : (at + 1) * size])
            return
        for i in range(tensor.size(dimension)):
            walk(dimension + 1, at + i * tensor.stride(dimension))

    walk(0, tensor.storage_offset())
    return out.getvalue().hex()


class Subclass(torch.Tensor):
    pass


def is_plain(tensor):
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type == "cpu"
    )


def describe(value, path, tensors, others):
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            others.append(path)
            return
        tensors[path] = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "storage_offset": value.storage_offset(),
            "requires_grad": value.requires_grad,
            "parameter": isinstance(value, torch.nn.Parameter),
            "bytes": raw_bytes(value),
        }
    elif isinstance(value, dict):
        for key, item in value.items():
            describe(item, f"{path}/{key}" if path else str(key), tensors, others)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            describe(item, f"{path}/{i}" if path else str(i), tensors, others)


def views():
    base = torch.arange(24, dtype=torch.float32)
    matrix = base.reshape(4, 6)
    with_attribute = torch.arange(3, dtype=torch.int16)
    with_attribute.note = "kept by pickle"
    parameter_with_attribute = torch.nn.Parameter(torch.ones(2))
    parameter_with_attribute.note = 1
    return {
        "base": base,
        "shared": matrix,
        "tail": base[20:],
        "transposed": matrix.t(),
        "strided": matrix[1:, ::2],
        "expanded": base[3:4].expand(2, 3),
        "diagonal": matrix[:, :4].diagonal(),
        "scalar": torch.tensor(2.5),
        "one": base[7],
        "empty": torch.zeros(0),
        "empty_3d": torch.zeros(2, 0, 3),
        "empty_behind": matrix[4:, 6:],
        "with_attribute": with_attribute,
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "frozen": torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
        "parameter_with_attribute": parameter_with_attribute,
        "leaf": torch.zeros(2, requires_grad=True),
        "five_d": torch.arange(32, dtype=torch.uint8).reshape(2, 2, 2, 2, 2),
    }


def parameters():
    # No attributes and no values beside tensors, so that a writer of tensors alone can write the same pickle.
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    return {
        "weight": weight,
        "frozen": torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16)[:4], requires_grad=False),
        "row": weight.detach()[1],
        "leaf": torch.zeros(2, 0, 1, 3, requires_grad=True),
        "scalar": torch.tensor(True),
        "bytes": torch.zeros(2, dtype=torch.float8_e5m2),
        "row_again": weight.detach()[1],
    }


def state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "history": [0.5, 0.25, None, True],
        "name": "grün",
        "nested": collections.OrderedDict(a=[torch.zeros(1), (torch.ones(1), "x")]),
        "blob": bytes(range(16)),
    }


def strange():
    # Without nested and sparse tensors' warnings, and without classes that PyTorch's safe loader refuses.
    return {
        "sparse": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 2, torch.qint8),
        "per_channel": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "conjugated": torch.zeros(2, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.ones(2)),
        "meta": torch.zeros(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "subclass": torch.zeros(2).as_subclass(Subclass),
        "uninitialized": torch.nn.UninitializedParameter(),
        "dtensor": sharded(),
        "plain": torch.ones(1),
    }


def sharded():
    # What the ranks of a DTensor program save each: a shard and its placement.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    result = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    torch.distributed.destroy_process_group()
    return result


def main():
    folder = pathlib.Path(sys.argv[1])
    cases = {
        "dtypes": {name: of_dtype(name, 4) for name in DTYPES if hasattr(torch, name)},
        "views": views(),
        "parameters": parameters(),
        "state": state(),
        "strange": strange(),
        "tensor": torch.arange(5, dtype=torch.int32),
        "no_tensor": [1, "two", {3: None}],
    }
    for name, value in cases.items():
        path = folder / f"{VERSION}-{name}.pt"
        torch.save(value, path)
        tensors, others = {}, []
        describe(value, "" if isinstance(value, (dict, list)) else ".", tensors, others)
        expected = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "tensors": tensors,
            "others": others,
        }
        path.with_suffix(".json").write_text(json.dumps(expected, indent=1) + "\n")
    torch.save(torch.ones(1), folder / f"{VERSION}-legacy.pth", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), folder / f"{VERSION}-script.ts")


if __name__ == "__main__":
    main()
