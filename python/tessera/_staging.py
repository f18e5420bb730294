"""Copies of elements between a device, such as a GPU, and the memory of the host, through a bounded amount of pinned memory.

Like all modules of the package, it names the device of each new tensor: the default may be another than the CPU.
"""

import ctypes
import threading

import torch

from ._torch_state import Row

# The most pinned memory of a save or a load of one rank, in bytes. Saves copy through blocks, loads fill one half of it while the
# other is copied.
LIMIT_BYTES = 256 << 20
BLOCK_BYTES = 8 << 20
# Where tensors begin in memory that several share: a view of any dtype may begin there.
_ALIGNMENT = 64


def is_on_host(tensor):
    return tensor.device.type == "cpu"


class Lane:
    """A stream of a device for copies, which come after what the current stream has so far."""

    def __init__(self, device):
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))

    def pinned(self, size_bytes):
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target, source):
        """Begins target.copy_(source). `source` may be a function that makes the tensor on the stream."""
        with self._module.stream(self._stream):
            target.copy_(source() if callable(source) else source, non_blocking=True)

    def wait(self):
        """Returns when all copies are done."""
        self._stream.synchronize()

    def mark(self):
        """Returns a function that waits for the copies so far."""
        event = self._module.Event()
        event.record(self._stream)
        return event.synchronize


class Source:
    """Reads elements of rows that are on devices, in parts, for tessera_save_write, whose threads call `read`."""

    def __init__(self, rows):
        self._rows = rows
        tensors = [row.tensor for row in rows if hasattr(row, "tensor")]
        self.devices = {tensor.device for tensor in tensors if not is_on_host(tensor)}
        self._lock = threading.Lock()
        self._lanes = {}
        self._blocks = []  # that are free, for any device
        self._room = threading.BoundedSemaphore(LIMIT_BYTES // BLOCK_BYTES)
        self.error = None

    def begin(self):
        """Orders the reads after what the caller's current streams have so far."""
        self._lanes = {device: Lane(device) for device in self.devices}

    def read(self, _, row, begin_bytes, size_bytes, out):
        """A tessera_read_elements. An exception is kept for the thread that waits for the save."""
        try:
            with self._room:
                self._read(row, begin_bytes, size_bytes, out)
            return 0
        except BaseException as error:
            self.error = self.error or error
            return 1

    def _read(self, row, begin_bytes, size_bytes, out):
        tensor = self._rows[row].tensor
        lane = self._lanes[tensor.device]
        with self._lock:
            block = self._blocks.pop() if self._blocks else lane.pinned(BLOCK_BYTES)
        try:
            for done in range(0, size_bytes, BLOCK_BYTES):
                begin, size = begin_bytes + done, min(BLOCK_BYTES, size_bytes - done)
                lane.copy(block[:size], lambda: _bytes_of(tensor, begin, size))
                lane.wait()
                ctypes.memmove(out + done, block.data_ptr(), size)
        finally:
            with self._lock:
                self._blocks.append(block)


def _bytes_of(tensor, begin_bytes, size_bytes):
    """Bytes of the elements of a tensor in row-major order. Where they are elsewhere in memory, copies little more than them."""
    begin = begin_bytes // tensor.element_size()
    end = begin + size_bytes // tensor.element_size()
    while tensor.dim() > 1:
        inner = tensor.numel() // tensor.size(0)
        first, last = begin // inner, -(-end // inner)
        begin, end = begin - first * inner, end - first * inner
        if last - first > 1:
            tensor = tensor[first:last]
            break
        tensor = tensor[first]
    return tensor.reshape(-1)[begin:end].resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def _pieces(row, limit_bytes):
    """Splits a row into pieces of at most `limit_bytes`, or of single elements."""
    size_bytes = row.tensor.numel() * row.tensor.element_size()
    dim = next((d for d, size in enumerate(row.sizes) if size > 1), None)
    if size_bytes <= limit_bytes or dim is None:
        yield row
        return
    count = max(1, limit_bytes * row.sizes[dim] // size_bytes)
    for begin in range(0, row.sizes[dim], count):
        piece = row.tensor.narrow(dim, begin, min(count, row.sizes[dim] - begin))
        offsets = (*row.offsets[:dim], row.offsets[dim] + begin, *row.offsets[dim + 1 :])
        yield from _pieces(Row(row.name, row.shape, offsets, tuple(piece.shape), piece), limit_bytes)


def _aligned_bytes(tensor):
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


class _Block:
    """Pinned memory that elements are copied to from a device, and from there to the host's memory. Their places there and here
    differ by a multiple of the alignment."""

    def __init__(self, lane, size_bytes):
        self._lane, self._memory = lane, lane.pinned(size_bytes)
        self._begin = self._end = 0  # in the host's memory
        self._wait = lambda: None

    def begin(self, position):
        self._begin = self._end = position

    def has_room(self, end):
        return end - self._first() <= self._memory.numel()

    def _first(self):
        """The place in the host's memory of the first byte here."""
        return self._begin // _ALIGNMENT * _ALIGNMENT

    def add(self, tensor, position):
        size_bytes = tensor.numel() * tensor.element_size()
        at = position - self._first()
        self._end = position + size_bytes
        self._lane.copy(self._memory[at : at + size_bytes].view(tensor.dtype).view(tensor.shape), tensor)

    def send(self):
        self._wait = self._lane.mark()

    def receive(self, host):
        """Waits for the device, and copies what was sent to its place."""
        self._wait()
        at = self._begin - self._first()
        host[self._begin : self._end].copy_(self._memory[at : at + self._end - self._begin])


def copy_to_host(rows):
    """Replaces the tensors of rows that are on devices by copies in the memory of the host, which is not pinned."""
    for device, mine in _by_device(rows).items():
        lane = Lane(device)
        host = torch.empty(sum(_aligned_bytes(row.tensor) for row in mine), dtype=torch.uint8, device="cpu")
        piece_bytes = min(LIMIT_BYTES // 2 - _ALIGNMENT, host.numel())
        block, other = _Block(lane, piece_bytes + _ALIGNMENT), None
        begin = 0
        for row in mine:
            position = begin
            for piece in _pieces(row, piece_bytes):
                end = position + piece.tensor.numel() * piece.tensor.element_size()
                if not block.has_room(end):
                    block.send()
                    block, other = other or _Block(lane, piece_bytes + _ALIGNMENT), block
                    block.receive(host)
                    block.begin(position)
                block.add(piece.tensor, position)
                position = end
            size = row.tensor.numel() * row.tensor.element_size()
            row.tensor = host[begin : begin + size].view(row.tensor.dtype).view(row.tensor.shape)
            begin += _aligned_bytes(row.tensor)
        block.send()
        if other:
            other.receive(host)
        block.receive(host)


class _Half:
    """One half of the pinned memory of a load."""

    def __init__(self, lane, size_bytes):
        self._memory = lane.pinned(size_bytes)
        self.wait = lambda: None  # until it can be filled again
        self.clear()

    def clear(self):
        self.rows, self._targets, self._used = [], [], 0

    def add(self, row):
        """Whether there was room for the row."""
        size_bytes = row.tensor.numel() * row.tensor.element_size()
        if self._used + size_bytes > self._memory.numel():
            return False
        memory = self._memory[self._used : self._used + size_bytes].view(row.tensor.dtype).view(row.tensor.shape)
        self._used += _aligned_bytes(row.tensor)
        self.rows.append(Row(row.name, row.shape, row.offsets, row.sizes, memory))
        self._targets.append(row.tensor)
        return True

    def copy(self, lane):
        for row, target in zip(self.rows, self._targets, strict=True):
            lane.copy(target, row.tensor)
        self.wait = lane.mark()
        self.clear()


def _by_device(rows):
    by_device = {}
    for row in rows:
        by_device.setdefault(row.tensor.device, []).append(row)
    return by_device


def load(rows, fill):
    """Loads rows that are on devices: fill(rows) reads such in the memory of the host."""
    for device, mine in _by_device(rows).items():
        lane = Lane(device)
        size_bytes = min(LIMIT_BYTES // 2, sum(_aligned_bytes(row.tensor) for row in mine))
        half, other = _Half(lane, size_bytes), None
        for row in mine:
            for piece in _pieces(row, size_bytes):
                if not half.add(piece):
                    fill(half.rows)
                    half.copy(lane)
                    half, other = other or _Half(lane, size_bytes), half
                    half.wait()
                    half.add(piece)
        fill(half.rows)
        half.copy(lane)
        lane.wait()
