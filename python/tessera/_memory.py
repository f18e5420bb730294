"""Where elements are read to: buffers and tensors of the caller, and new ones."""

import ctypes
import sys

from ._errors import InvalidArgumentError, UnsupportedError

# The formats of the buffer protocol, by PyTorch's dtype.
FORMATS = {
    "float32": "f",
    "float64": "d",
    "float16": "e",
    "complex64": "Zf",
    "complex128": "Zd",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "bool": "?",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
}
# What such a format is, without the bits of an element.
_KINDS = {
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQN", "uint"),
    **dict.fromkeys("efd", "float"),
    **dict.fromkeys(("Zf", "Zd", "F", "D"), "complex"),
    "?": "bool",
}
_NATIVE_ORDER = "@=<" if sys.byteorder == "little" else "@=>!"


class Target:
    """The address, the size, the strides in elements and the dtype of the memory for a box. Keeps the memory."""

    def __init__(self, address, size_bytes, strides, dtype, owner):
        self.address, self.size_bytes, self.strides, self.dtype, self.owner = address, size_bytes, strides, dtype, owner


def product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


def _expect_shape(found, expected):
    if tuple(found) != tuple(expected):
        raise InvalidArgumentError(f"out has shape {list(found)}, expected {list(expected)}")


def overlaps(shape, strides):
    """Whether elements share memory. True also for the rare strides that interleave dimensions but not elements."""
    end = 0  # of the elements of the dimensions with smaller strides
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size > 1):
        if stride <= end:
            return 0 not in shape
        end += (size - 1) * stride
    return False


def _expect_separate_elements(shape, strides):
    if overlaps(shape, strides):
        raise InvalidArgumentError(
            f"out has shape {list(shape)} and strides {list(strides)} in elements, expected separate memory for each element"
        )


def _dtype_of(text, itemsize):
    """The dtype of elements with this format of the buffer protocol, in native byte order; None if there is none."""
    kind = _KINDS.get(text.lstrip(_NATIVE_ORDER))
    return kind if kind in (None, "bool") else f"{kind}{8 * itemsize}"


def _view_of(out, expected):
    """A view of a buffer, and its dtype where the buffer protocol has none for it, such as bfloat16 of ml_dtypes."""
    numpy = sys.modules.get("numpy")
    try:
        return memoryview(out), None
    except (TypeError, ValueError, BufferError) as error:
        if numpy is not None and isinstance(out, numpy.ndarray):
            if out.dtype.hasobject or not out.dtype.isnative:
                raise InvalidArgumentError(f"out has dtype {str(out.dtype)!r}, expected {expected}") from None
            return memoryview(out.view(f"V{out.itemsize}")), out.dtype.name
        raise InvalidArgumentError(
            f"out is of type {type(out).__name__}, expected a writable buffer (bytearray, memoryview, NumPy array, ...)"
            f" or a tensor of PyTorch: {error}"
        ) from None


def target_of(out, shape, dtype, element_bytes):
    """The target for elements of `shape` in `out`: a writable buffer, or a tensor of PyTorch on the CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        return _tensor_target(torch, out, shape)
    expected = f"that of {dtype} in native byte order, or void of {element_bytes} bytes"
    view, named = _view_of(out, expected)
    if view.readonly:
        raise InvalidArgumentError("out is read-only, expected a writable buffer")
    if view.format.lstrip("@=<>!") in ("B", "b", "c") and view.ndim == 1 and view.contiguous:  # any dtype, as bytes
        if view.nbytes != product(shape) * element_bytes:
            raise InvalidArgumentError(
                f"out has {view.nbytes} bytes, expected {product(shape) * element_bytes}, or an array of shape {list(shape)}"
            )
        return Target(_address(view), view.nbytes, None, None, view)
    _expect_shape(view.shape, shape)
    memory_dtype = named or _dtype_of(view.format, view.itemsize)
    is_void = view.format.endswith("x") and (view.format[:-1] or "1") == str(element_bytes)
    if memory_dtype is None and not (is_void and view.itemsize == element_bytes):
        raise InvalidArgumentError(f"out has format {view.format!r}, expected {expected}")
    if any(stride < 0 or stride % view.itemsize for stride in view.strides):
        raise InvalidArgumentError(f"out has strides {list(view.strides)}, expected multiples of {view.itemsize}, not negative")
    strides = [stride // view.itemsize for stride in view.strides]
    _expect_separate_elements(shape, strides)
    size_bytes = extent(shape, strides) * view.itemsize
    return Target(_address(view), size_bytes, strides, memory_dtype, view)


def extent(shape, strides):
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


class _Buffer(ctypes.Structure):
    """Py_buffer of the stable ABI."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_FULL = 0x0001 | 0x0008 | 0x0010 | 0x0004  # PyBUF_WRITABLE, ND, STRIDES, FORMAT


def _address(view):
    """The address of the first element. `view` holds the memory."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), _FULL)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def _tensor_target(torch, out, shape):
    if out.device.type != "cpu" or out.layout != torch.strided:
        raise InvalidArgumentError(
            f"out is a {out.layout} tensor on {out.device}, expected a strided one on cpu; read to the cpu and copy it"
        )
    if out.is_conj() or out.is_neg():
        raise InvalidArgumentError(
            f"out is a {'conjugate' if out.is_conj() else 'negative'} view, expected a tensor whose memory has its"
            " values; read to a new tensor and copy it"
        )
    _expect_shape(out.shape, shape)
    strides = list(out.stride())
    _expect_separate_elements(shape, strides)
    return Target(
        out.data_ptr(), extent(shape, strides) * out.element_size(), strides, str(out.dtype).removeprefix("torch."), out
    )


def new_buffer(shape, dtype, element_bytes):
    """A memoryview of new memory: with shape and format where it can have them, otherwise of bytes."""
    view = memoryview(bytearray(product(shape) * element_bytes))
    if dtype not in FORMATS or 0 in shape:
        return view
    try:
        return view.cast(FORMATS[dtype], shape=list(shape))
    except (ValueError, TypeError):  # a format that memoryview cannot have
        return view


def new_array(shape, dtype):
    try:
        import numpy
    except ImportError as error:
        raise UnsupportedError("numpy() needs NumPy, which is not installed; read() returns a memoryview") from error
    try:
        return numpy.empty(shape, dtype=dtype)
    except TypeError:
        pass
    try:
        import ml_dtypes  # bfloat16, float8, ...

        return numpy.empty(shape, dtype=getattr(ml_dtypes, dtype))
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"numpy(): NumPy has no dtype {dtype}, expected a dtype that it or ml_dtypes has; install ml_dtypes, or use"
            " torch()"
        ) from error


def new_tensor(shape, dtype):
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("torch() needs PyTorch, which is not installed; read() returns a memoryview") from error
    if not hasattr(torch, dtype):
        raise UnsupportedError(
            f"torch(): PyTorch {torch.__version__} has no dtype {dtype}, expected a dtype that it has; read() returns"
            " the bytes"
        )
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
