"""Tensors whose bytes depend only on a seed and a name, and the manifest of a state.

The bytes come from Python's generator and not from PyTorch's, so every version of PyTorch makes the same ones.
"""

import collections
import ctypes
import io
import pickle
import random
import zlib

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

SAVABLE = [
    "float32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128",
    "uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
]
SAVABLE_NEW = ["float8_e8m0fnu", "float4_e2m1fn_x2", "bcomplex32"]
# torch.save takes these; the planner of the distributed checkpoint doesn't know their size.
SAVABLE_IN_FILES = [*SAVABLE, "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"]


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def fill(tensor, data):
    """Overwrites the storage of a contiguous tensor."""
    assert tensor.is_contiguous() and len(data) == tensor.numel() * tensor.element_size()
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def row_major_bytes(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def describe(tensor):
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "crc32": zlib.crc32(row_major_bytes(tensor)),
    }


class Maker:
    """Makes tensors by name. Two makers of one seed make the same ones, on every rank and with every PyTorch."""

    def __init__(self, seed):
        self.seed = seed

    def bits(self, name, shape, dtype="float32"):
        """Any bit pattern: nan payloads, infinities and subnormal numbers included."""
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        data = random.Random(f"{self.seed}/{name}").randbytes(tensor.numel() * tensor.element_size())
        if dtype == "bool":
            data = bytes(byte & 1 for byte in data)
        return fill(tensor, data)

    def numbers(self, name, shape, dtype="float32"):
        """Finite numbers, from subnormal to large ones."""
        rng = random.Random(f"{self.seed}/{name}")
        count = 1
        for extent in shape:
            count *= extent
        values = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-9, 4) for _ in range(count)]
        return torch.tensor(values, dtype=torch.float64).reshape(shape).to(getattr(torch, dtype))


def is_plain(value):
    """Whether a value is of the kinds that the documentation calls understood."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, bytearray):
        return True
    if type(value) in (torch.Size, torch.dtype, torch.device):
        return True
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(item) for item in value)
    if type(value).__name__ in ("dict", "OrderedDict"):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return False


def loads_restricted(value):
    """Whether PyTorch's restricted unpickler takes what PyTorch saves of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
        return True
    except pickle.UnpicklingError:
        return False


def is_strided(value):
    """Whether a value is a tensor whose elements are its bytes: no sparse, quantized or conjugated one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    return not value.is_conj() and not value.is_neg()


def whole_mappings(value, path=()):
    """Those that PyTorch's flattening drops (empty ones) or takes for a dict (subclasses)."""
    if isinstance(value, dict):
        if path and (not value or type(value) not in (dict, collections.OrderedDict)):
            yield ".".join(path), value
        else:
            for key, item in value.items():
                yield from whole_mappings(item, (*path, str(key)))


def resaved(value):
    """A plain value as our library holds it, and so saves it: a Size is a tuple there and an OrderedDict a dict."""
    if isinstance(value, dict):
        return {key: resaved(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        kind = tuple if isinstance(value, torch.Size) else type(value)
        return kind(resaved(item) for item in value)
    return value


def is_below(name, others):
    return any(name == other or name.startswith(other + ".") for other in others)


def manifest_of(state, flatten=True, file=False):
    """Describes an unsharded state, with the leaf names of a distributed checkpoint. "resaved" has the plain values that
    change when our library loads and saves them.

    file: whether it is the state of a torch.save file, whose empty mappings and dict subclasses tessera does not flatten.
    """
    flat = flatten_state_dict(state)[0] if flatten else dict(state)
    if file:
        kept = dict(whole_mappings(state))
        flat = {name: value for name, value in flat.items() if not is_below(name, kept)} | kept
    manifest = {"tensors": {}, "plain": {}, "opaque": {}, "full_unpickler": [], "resaved": {}}
    for name, value in flat.items():
        if is_strided(value):
            manifest["tensors"][name] = describe(value)
        elif is_plain(value):
            manifest["plain"][name] = repr(value)
            if repr(resaved(value)) != repr(value):
                manifest["resaved"][name] = repr(resaved(value))
        else:
            manifest["opaque"][name] = repr(value)
        if name not in manifest["tensors"] and not loads_restricted(value):
            manifest["full_unpickler"].append(name)
    return manifest
