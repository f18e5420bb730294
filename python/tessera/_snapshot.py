"""Copies of states in the memory of the host, for saves in another thread."""

import contextlib
import copy
import gc
from collections.abc import Mapping

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from . import _staging
from ._torch_state import Chunks, CopiedTensor, Row

# Smaller tensors are copied together: a copy of its own costs more than their bytes.
_SMALL_BYTES = 256 << 10
# Elements are copied as integers of their size, which every dtype can be viewed as.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_of(state_dict):
    """Copies a state. In place of each tensor, the copy has a CopiedTensor with the chunks of this rank."""
    copied = _Copied()
    with _collector_waits(), torch.no_grad():  # in which DTensors give their local tensors as they are
        state = {key: copied.value(value) for key, value in state_dict.items()}
        _copy_rows(copied.rows)
    return state


@contextlib.contextmanager
def _collector_waits():
    """The garbage collector would go through all objects several times while many are made, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Copied:
    def __init__(self):
        self.rows = []
        self._chunks = Chunks()

    def value(self, value):
        if isinstance(value, torch.Tensor):
            rows = self._rows(value)
            self.rows += rows
            return CopiedTensor.of(rows, value.requires_grad)
        # Dicts and lists are those that PyTorch's planner looks into. Whatever else there is becomes an object.
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if type(value) is list:
            return [self.value(item) for item in value]
        return _copied_object(value)

    def _rows(self, value):
        if not isinstance(value, ShardedTensor):
            return self._chunks.rows("", value)
        rows = []
        for row in self._chunks.rows("", value):
            if not isinstance(row.tensor, ShardedTensor):
                rows.append(row)
                continue
            for inner in self._chunks.rows("", row.tensor):
                offsets = tuple(a + b for a, b in zip(row.offsets, inner.offsets, strict=True))
                rows.append(Row("", row.shape, offsets, inner.sizes, inner.tensor))
        return rows


def _copied_object(value):
    """A copy of an object. The tensors in tuples, which PyTorch saves with the object, are on the host afterwards."""
    if type(value) in (tuple, list):
        return type(value)(map(_copied_object, value))
    if type(value) is dict:
        return {key: _copied_object(item) for key, item in value.items()}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _copy_rows(rows):
    """Replaces the tensors of rows by copies. Those that cannot be saved stay, and the save refuses them by name."""
    on_devices, together = [], {}
    for row in rows:
        tensor = row.tensor
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        if not _staging.is_on_host(tensor):
            on_devices.append(row)
            continue
        tensor = tensor.resolve_conj().resolve_neg()
        integer = _INTEGERS.get(tensor.element_size())
        if integer is None or tensor.numel() * tensor.element_size() > _SMALL_BYTES:
            row.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        else:
            together.setdefault(integer, []).append((row, tensor))
    for integer, found in together.items():
        copied = torch.cat([tensor.view(integer).reshape(-1) for _, tensor in found])
        parts = copied.split([tensor.numel() for _, tensor in found])
        for (row, tensor), part in zip(found, parts, strict=True):
            row.tensor = part.view(tensor.dtype).view(tensor.shape)
    _staging.copy_to_host(on_devices)
