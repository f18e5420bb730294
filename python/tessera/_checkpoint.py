"""Open checkpoints."""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import os
import threading
import weakref

from . import _library, _memory, _objects
from ._errors import InvalidArgumentError, NotFoundError
from ._library import functions, handle
from ._objects import Opaque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .typing import Any, Box, Out, Progress

# Reads of more bytes can be interrupted. Less is read in the calling thread, in a few milliseconds.
_LARGE_READ_BYTES = 32 << 20


Chunk = collections.namedtuple("Chunk", ["offsets", "sizes", "file", "offset_bytes", "length_bytes"])
Chunk.__doc__ = """A stored chunk of a tensor: the box of elements, and the bytes of a file that hold it. The name of the file is
relative to the checkpoint, and None if the location is not recorded."""


class Tensor:
    """A tensor of a checkpoint. Its elements are read by `read`, `numpy` and `torch`, each time they are called.

    name             as the checkpoint has it
    dtype            PyTorch's name of its dtype, without "torch."
    shape            the sizes of its dimensions
    size_bytes       of all elements
    requires_grad    whether it is saved as one that requires a gradient
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    requires_grad: bool

    def __init__(self, checkpoint, number, info):
        self._checkpoint, self._number = checkpoint, number
        self.name = _library.text_of(_library.bytes_at(info.name, info.name_bytes))
        self.dtype = info.dtype.decode()
        self.shape = tuple(info.shape[: info.dims])
        self.size_bytes = info.size_bytes
        self.requires_grad = bool(info.requires_grad)
        self._element_bytes = info.element_bytes
        self._chunks = info.chunks

    def __repr__(self):
        return f"<tessera.Tensor {self.name!r}: {self.dtype} {list(self.shape)}>"

    @property
    def chunks(self) -> list[Chunk]:
        """The stored chunks, as a list of Chunk."""
        info = _library.ChunkInfo()
        files = self._checkpoint.files
        found = []
        with self._checkpoint._use() as opened:
            for number in range(self._chunks):
                _library.check(functions.chunk(opened, self._number, number, ctypes.byref(info)))
                dims = len(self.shape)
                file = files[info.file] if info.file < len(files) else None
                found.append(
                    Chunk(tuple(info.offsets[:dims]), tuple(info.sizes[:dims]), file, info.offset_bytes, info.length_bytes)
                )
        return found

    def read(
        self, box: Box = None, out: Out | None = None, *, cast: bool = False, progress: Progress | None = None
    ) -> Any:
        """Reads the elements of `box`; see Checkpoint.read."""
        return self._checkpoint.read(self.name, box, out, cast=cast, progress=progress)

    def numpy(self, box: Box = None) -> Any:
        """Reads the elements of `box` into a new array of NumPy."""
        return self._checkpoint.read(self.name, box, _memory.new_array(_shape(self, box)[0], self.dtype))

    def torch(self, box: Box = None) -> Any:
        """Reads the elements of `box` into a new tensor of PyTorch, on the CPU."""
        return self._checkpoint.read(self.name, box, _memory.new_tensor(_shape(self, box)[0], self.dtype))


def _range_of(item, size, name, dimension):
    """The offset, the size and whether the dimension remains, of an index or a slice in one dimension."""
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(size)
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"read '{name}': the box has {item!r} in dimension {dimension}, expected integers and step 1"
            ) from None
        if step != 1:
            raise InvalidArgumentError(f"read '{name}': the box has step {step} in dimension {dimension}, expected 1")
        return start, max(stop - start, 0), True
    index = _library.index_of(item)
    if index is None:
        raise InvalidArgumentError(
            f"read '{name}': the box has {item!r} in dimension {dimension}, expected a slice or an index"
        )
    if not -size <= index < size:
        expected = f"{-size} to {size - 1}" if size > 0 else "a slice, since it has no elements"
        raise InvalidArgumentError(
            f"read '{name}': the box has index {index} in dimension {dimension}, expected {expected}"
        )
    return index % size, 1, False


def _shape(tensor, box):
    """The shape of what is read, the offsets and sizes of the box in the tensor, and which dimensions remain."""
    box = () if box is None else box if isinstance(box, tuple) else (box,)
    if len(box) > len(tensor.shape):
        raise InvalidArgumentError(
            f"read '{tensor.name}': the box has {len(box)} dimensions, expected at most {len(tensor.shape)}"
        )
    box += (slice(None),) * (len(tensor.shape) - len(box))
    ranges = [_range_of(item, size, tensor.name, d) for d, (item, size) in enumerate(zip(box, tensor.shape))]
    shape = tuple(size for _, size, remains in ranges if remains)
    return shape, *([item[i] for item in ranges] for i in range(3))


class _Objects(collections.abc.Mapping):
    """The objects of a checkpoint by name. A value is read when it is asked for."""

    def __init__(self, checkpoint, numbers):
        self._checkpoint, self._numbers = checkpoint, numbers

    def __getitem__(self, name):
        return self._value(self._numbers[name], None)

    def __contains__(self, name):
        return name in self._numbers

    def value(self, name: str, torch=None) -> object:
        """The value of an object. With the module `torch`, sizes, dtypes and devices in it are PyTorch's. Raises
        NotFoundError."""
        return self._value(self._number(name), torch)

    def archive(self, name: str) -> bytes:
        """The bytes of an object as torch.save wrote them, if the checkpoint has them. Raises NotFoundError."""
        return self._bytes(functions.read_object_archive, self._number(name))

    def _number(self, name):
        number = self._numbers.get(name)
        if number is None:
            raise NotFoundError(
                f"{self._checkpoint.path} has no object {name!r}, expected one of its {len(self)} names"
            )
        return number

    def _value(self, number, torch):
        return _objects.value_of(self._bytes(functions.read_object, number), torch)

    def _bytes(self, read, number):
        with self._checkpoint._use() as opened:
            made = handle()
            _library.check(read(opened, number, ctypes.byref(made)))
            return _library.take(made)

    def __iter__(self):
        return iter(self._numbers)

    def __len__(self):
        return len(self._numbers)

    def __repr__(self):
        return f"<objects of {self._checkpoint!r}: {len(self)}>"


class Checkpoint(collections.abc.Mapping):
    """An open checkpoint: a mapping of the names of its tensors to `Tensor`, in the checkpoint's order.

    path        as it was given
    kind        "dcp", "safetensors", "torch" or "torch_checkpointing"
    version     of the format, as text for users
    warnings    what was noticed while it was opened, such as ignored files
    files       the names of the files that hold data
    objects     maps the names of all values that are no tensors to these values; see `Opaque` for those that only Python
                could make

    The files must not change while the checkpoint is open. Several threads may use it, and a forked process, unless another
    thread was in a call of it during the fork. `close()`, or the end of `with`, closes the files.
    """

    path: str | os.PathLike
    kind: str
    version: str
    warnings: list[str]
    files: list[str]
    objects: collections.abc.Mapping[str, object]

    def __init__(self, path: str | os.PathLike, *, checksums: bool = True, _lists_tensors: bool = True):
        self._handle = None
        self._users = []  # the threads that are in calls
        self._free = threading.Condition()
        self.path = os.fspath(path)
        opened = handle()
        options = _library.options(_library.OpenOptions, no_checksums=not checksums)
        _library.check(functions.open(_library.path_bytes(path), ctypes.byref(options), ctypes.byref(opened)))
        self._handle = opened
        _opened[id(self)] = self
        self.kind = functions.kind(opened).decode()
        self.version = _library.text_of(functions.format_version(opened))
        self.warnings = [
            _library.text_of(functions.warning(opened, i)) for i in range(functions.warning_count(opened))
        ]
        self.files = [_library.text_of(functions.file_name(opened, i)) for i in range(functions.file_count(opened))]
        self._tensors = {}
        if _lists_tensors:
            self._list_tensors()
        self.objects = _Objects(self, {self._name_of_object(i): i for i in range(functions.object_count(opened))})

    def _name_of_object(self, number):
        info = _library.ObjectInfo()
        _library.check(functions.object(self._handle, number, ctypes.byref(info)))
        return _library.text_of(_library.bytes_at(info.name, info.name_bytes))

    def _list_tensors(self):
        info = _library.TensorInfo()
        for number in range(functions.tensor_count(self._handle)):
            _library.check(functions.tensor(self._handle, number, ctypes.byref(info)))
            tensor = Tensor(self, number, info)
            self._tensors[tensor.name] = tensor

    def _use(self):
        return _Use(self)

    def close(self) -> None:
        """Closes the checkpoint, after the calls that other threads are in. May be called twice, but not by `progress` of a
        call of this checkpoint."""
        with self._free:
            if threading.get_ident() in self._users:
                raise InvalidArgumentError(f"close {self.path}: this thread is in a call of it, expected close() after the call")
            closed, self._handle = self._handle, None
            self._free.wait_for(lambda: not self._users)
        if closed is not None:
            functions.close(closed)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None) is not None and functions is not None:
            functions.close(self._handle)

    def __reduce__(self):
        raise TypeError("a tessera.Checkpoint cannot be pickled: pass its path, and open it there")

    def __repr__(self):
        state = "closed " if self._handle is None else ""
        return f"<{state}tessera.Checkpoint {str(self.path)!r}: {self.kind}, {len(self)} tensors, {len(self.objects)} objects>"

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)

    def read(
        self,
        name: str,
        box: Box = None,
        out: Out | None = None,
        *,
        cast: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """Reads elements of a tensor, and no other bytes than they need. If the checkpoint has a `.tessera.json`, these are the
        blocks of 128 KiB that hold them, which are compared with it: for a column, up to one for each row. One of version 1
        has a checksum for each file alone, so the first read of a file reads all of it.

        box       slices and indices as of NumPy, without steps: `(slice(0, 4), 7)`; None for the full tensor
        out       memory for the elements: a writable buffer, such as a NumPy array, or a tensor of PyTorch on the CPU,
                  of the box's shape, with strides that keep elements apart. A buffer's format is that of the dtype in
                  native byte order, or void of its size. Or contiguous bytes. None for a new memoryview.
        cast      whether floating-point elements are cast to the dtype of `out`, which must otherwise be the tensor's
        progress  shows the bytes that are done: an object like tqdm's, or a function of the bytes that are done and their total

        Returns `out`. Raises NotFoundError, InvalidArgumentError, CorruptError (naming file, offset and tensor),
        StorageError.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise NotFoundError(f"{self.path} has no tensor {name!r}, expected one of its {len(self)} names")
        shape, offsets, sizes, remain = _shape(tensor, box)
        if out is None:
            out = _memory.new_buffer(shape, tensor.dtype, tensor._element_bytes)
        target = _memory.target_of(out, shape, tensor.dtype, tensor._element_bytes)
        strides = None
        if target.strides is not None:
            # A dimension that an index takes away has one element.
            remaining = iter(target.strides)
            strides = [next(remaining) if remains else 0 for remains in remain]
        self._read(tensor, offsets, sizes, strides, target, cast, progress)
        return out

    def _read(self, tensor, offsets, sizes, strides, target, cast, progress):
        dims = len(sizes)
        numbers = ctypes.c_int64 * max(dims, 1)
        boxes = _library.options(
            _library.Boxes,
            count=1,
            names=(ctypes.c_char_p * 1)(_library.bytes_of("the name of the tensor", tensor.name)),
            dtypes=(ctypes.c_char_p * 1)(target.dtype.encode() if target.dtype else None),
            dims=(ctypes.c_size_t * 1)(dims),
            offsets=numbers(*offsets),
            sizes=numbers(*sizes),
            data=(ctypes.c_void_p * 1)(target.address),
            data_bytes=(ctypes.c_size_t * 1)(target.size_bytes),
            strides=None if strides is None else numbers(*strides),
        )

        def call(task):
            options = _library.options(_library.ReadOptions, cast=bool(cast), task=task, compare_rest=True)
            _library.check(functions.read(opened, ctypes.byref(boxes), ctypes.byref(options), None))

        with self._use() as opened:
            # To compare a row of the box, or a chunk, the blocks at its ends are read.
            ends_bytes = 2 * functions.largest_block(opened)
            rows_bytes = _memory.product(sizes) * tensor._element_bytes + _memory.product(sizes[:-1]) * ends_bytes
            chunks_bytes = tensor._chunks * ends_bytes
            most_bytes = min(max(rows_bytes, chunks_bytes), tensor.size_bytes + chunks_bytes)
            if progress is None and most_bytes < _LARGE_READ_BYTES:
                call(None)
            else:
                _library.run(call, progress)


class _Use:
    """A call that needs the checkpoint to stay open."""

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint

    def __enter__(self):
        checkpoint = self._checkpoint
        with checkpoint._free:
            if checkpoint._handle is None:
                raise InvalidArgumentError(f"the checkpoint {checkpoint.path} is closed, expected an open one")
            checkpoint._users.append(threading.get_ident())
            return checkpoint._handle

    def __exit__(self, *_):
        checkpoint = self._checkpoint
        with checkpoint._free:
            checkpoint._users.remove(threading.get_ident())
            checkpoint._free.notify_all()


_opened = weakref.WeakValueDictionary()  # a mapping has no hash


def _after_fork():
    """In the process that was forked, which has no thread but the one that did it."""
    for checkpoint in _opened.values():
        checkpoint._free = threading.Condition()
        checkpoint._users = [thread for thread in checkpoint._users if thread == threading.get_ident()]


os.register_at_fork(after_in_child=_after_fork)


def open(path: str | os.PathLike, *, checksums: bool = True) -> Checkpoint:
    """Opens the checkpoint at `path`: a directory of PyTorch's distributed checkpoint, of torch_checkpointing or of
    safetensors, a file of safetensors, or one of torch.save. Reads no tensors.

    With `checksums`, all that is read is compared with the checkpoint's `.tessera.json`, if it has one. Raises
    NotFoundError, UnsupportedError, CorruptError, StorageError.
    """
    return Checkpoint(path, checksums=checksums)


__all__ = ["Checkpoint", "Chunk", "Opaque", "Tensor", "open"]
