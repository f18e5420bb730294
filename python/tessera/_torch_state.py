"""States of PyTorch as rows: a chunk of a tensor that this rank has, or an object."""

import ctypes
import io

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from . import _library, _memory
from ._errors import InvalidArgumentError, UnsupportedError


class Row:
    """A chunk of a tensor of the state that this rank has."""

    __slots__ = ("name", "offsets", "shape", "sizes", "tensor")

    def __init__(self, name, shape, offsets, sizes, tensor):
        self.name, self.shape, self.offsets, self.sizes, self.tensor = name, shape, offsets, sizes, tensor


_NO_ELEMENTS = torch.empty(0, device="cpu")


class CopiedTensor(torch.Tensor):
    """Stands for a tensor in a copied state: `rows` are copies of the chunks that this rank has."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # no op is called on it

    @classmethod
    def of(cls, rows, requires_grad):
        made = _NO_ELEMENTS.as_subclass(cls)
        made.rows = rows
        return made.requires_grad_() if requires_grad else made

    def __reduce_ex__(self, protocol):
        return CopiedTensor.of, (self.rows, self.requires_grad)

    def as_plain(self, name):
        """The tensor, which must not be distributed, for an object that it is a part of."""
        if len(self.rows) != 1 or tuple(self.rows[0].sizes) != tuple(self.rows[0].shape):
            raise UnsupportedError(
                f"save '{name}': the object has a distributed tensor, expected none; pass flatten_state_dict=True to"
                " SavePlanner"
            )
        return self.rows[0].tensor.clone()


class Chunks:
    """The chunks of tensors. Where a DTensor's are depends on its mesh, placements and shape alone, so they are kept."""

    def __init__(self):
        self._known = {}

    def rows(self, name, value):
        """The rows of a value of the state, or None if it is no tensor."""
        if not isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
            return None
        if isinstance(value, CopiedTensor):
            return [Row(name, row.shape, row.offsets, row.sizes, row.tensor) for row in value.rows]
        if isinstance(value, ShardedTensor):
            return [
                Row(name, value.size(), shard.metadata.shard_offsets, shard.metadata.shard_sizes, shard.tensor.detach())
                for shard in value.local_shards()
            ]
        if not hasattr(value, "__create_chunk_list__"):
            value = value.detach()
            return [Row(name, value.shape, (0,) * value.dim(), value.shape, value)]
        shape = value.size()
        key = None
        if hasattr(value, "device_mesh") and hasattr(value, "placements"):
            if value.device_mesh.get_coordinate() is None:  # this rank has no part of it
                return []
            key = (value.device_mesh, value.placements, shape)
        boxes = self._known.get(key) if key is not None else None
        if boxes is None:
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]
            if key is not None:
                self._known[key] = boxes
        if len(boxes) == 1 and hasattr(value, "to_local"):
            local = value.to_local()
            if isinstance(local, torch.Tensor) and tuple(local.shape) == boxes[0][1]:
                return [Row(name, shape, *boxes[0], local.detach())]
        return [
            Row(name, shape, offsets, sizes, value.__get_tensor_shard__(MetadataIndex(name, offsets)).detach())
            for offsets, sizes in boxes
        ]


class Rows:
    """The columns of rows, as the C interface takes them, and what must live as long as they do. `is_on_host` is whether the
    library can read the elements of a tensor by itself."""

    def __init__(self, rows, is_on_host=lambda tensor: True):
        self.count = len(rows)
        self.kept = []
        pointers, data_bytes, names, dtypes, dims = [], [], [], [], []
        shapes, offsets, sizes, strides = [], [], [], []
        known_dtypes = {}
        for row in rows:
            names.append(_library.bytes_of("a name of the state", row.name))
            tensor = getattr(row, "tensor", None)
            if tensor is None:  # an object
                dtypes.append(None)
                dims.append(0)
                pointers.append(None)
                data_bytes.append(0)
                continue
            self.kept.append(tensor)
            dtype = known_dtypes.get(tensor.dtype)
            if dtype is None:
                dtype = known_dtypes[tensor.dtype] = str(tensor.dtype).removeprefix("torch.").encode()
            dtypes.append(dtype)
            dims.append(len(row.sizes))
            shapes += row.shape
            offsets += row.offsets
            sizes += row.sizes
            tensor_strides = tensor.stride()
            strides += tensor_strides
            if is_on_host(tensor):
                elements = tensor.numel() if tensor.is_contiguous() else _memory.extent(row.sizes, tensor_strides)
                pointers.append(tensor.data_ptr() or None)
                data_bytes.append(elements * tensor.element_size())
            else:
                pointers.append(None)
                data_bytes.append(0)
        numbers = ctypes.c_int64 * max(len(shapes), 1)
        sized = ctypes.c_size_t * (self.count + 1)
        self.names = (ctypes.c_char_p * (self.count + 1))(*names)
        self.dtypes = (ctypes.c_char_p * (self.count + 1))(*dtypes)
        self.dims = sized(*dims)
        self.shapes, self.offsets, self.sizes, self.strides = numbers(*shapes), numbers(*offsets), numbers(*sizes), numbers(*strides)
        self.data = (ctypes.c_void_p * (self.count + 1))(*pointers)
        self.data_bytes = sized(*data_bytes)

    def columns(self):
        return {name: getattr(self, name) for name in ("names", "dtypes", "dims", "offsets", "sizes", "data", "data_bytes", "strides")}


def _expect_elements(operation, row):
    if row.tensor.is_meta:
        raise UnsupportedError(
            f"{operation} '{row.name}': the tensor is on the meta device, expected one that has elements"
        )
    if row.tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{operation} '{row.name}': the tensor's layout is {row.tensor.layout}, expected torch.strided"
        )


def savable(row):
    """A row whose elements can be saved where they are."""
    _expect_elements("save", row)
    if row.tensor.device.type == "cpu" and (row.tensor.is_conj() or row.tensor.is_neg()):
        row.tensor = row.tensor.resolve_conj().resolve_neg()
    return row


def loadable(row):
    """A row whose elements can be loaded."""
    _expect_elements("load", row)
    if not row.tensor.is_contiguous() and _memory.overlaps(row.tensor.shape, row.tensor.stride()):
        raise InvalidArgumentError(
            f"load '{row.name}': the tensor has shape {list(row.tensor.shape)} and strides {list(row.tensor.stride())},"
            " expected separate memory for each element"
        )
    return row


def in_plain_memory(row):
    """The row, or one with new memory in place of a conjugate or negative view, whose memory has other values."""
    if not (row.tensor.is_conj() or row.tensor.is_neg()):
        return row
    memory = torch.empty(row.tensor.shape, dtype=row.tensor.dtype, device="cpu")
    return Row(row.name, row.shape, row.offsets, row.sizes, memory)


class StateObject:
    """An object of the state."""

    __slots__ = ("name", "value")

    def __init__(self, name, value):
        self.name, self.value = name, value

    def archive(self):
        stream = io.BytesIO()
        torch.save(self._plain(self.value), stream)
        return stream.getvalue()

    def _plain(self, value):
        """The value with tensors in place of the copied ones: an object of a copied state whose dicts are not flattened."""
        if type(value) is dict:
            return {key: self._plain(item) for key, item in value.items()}
        if type(value) is list:
            return list(map(self._plain, value))
        return value.as_plain(self.name) if isinstance(value, CopiedTensor) else value
