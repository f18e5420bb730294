"""Types of arguments, for annotations of programs. `import tessera` does not import this module."""

from __future__ import annotations

from typing import Any, Callable, Protocol, SupportsIndex, Tuple, Union


class ProgressBar(Protocol):
    """Shows progress, such as `tqdm.tqdm(unit="B", unit_scale=True)`. Its attribute `total` is set to the bytes of the operation, if
    they are known."""

    def update(self, done_bytes: int, /) -> Any:
        """Adds bytes that are done."""


class Buffer(Protocol):
    """An object with the buffer protocol: bytearray, memoryview, array.array, an array of NumPy. As `out` it must be writable."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """As collections.abc.Buffer, which is new in Python 3.12."""


class Tensor(Protocol):
    """A tensor of PyTorch, as far as tessera uses it; on the CPU and strided."""

    def data_ptr(self) -> int:
        """Returns the address of the first element."""

    def element_size(self) -> int:
        """Returns the bytes of an element."""

    def stride(self) -> Tuple[int, ...]:
        """Returns the strides, in elements."""


Progress = Union[ProgressBar, Callable[[int, int], Any]]
"""What `progress` may be: a bar, or a function of the bytes that are done and their total, which is 0 if it is unknown."""

Out = Union[Buffer, Tensor]
"""What `out` may be."""

Box = Union[None, SupportsIndex, slice, Tuple[Union[SupportsIndex, slice], ...]]
"""What `box` may be: slices and indices, as of NumPy; None for all elements."""

__all__ = ["Box", "Buffer", "Out", "Progress", "ProgressBar", "Tensor"]
