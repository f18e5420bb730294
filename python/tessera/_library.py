"""libtessera.so: its structures and functions, by ctypes, and calls of them.

ctypes needs no compiler, no header of Python and one wheel for all versions of it; a call takes about a microsecond, and
releases the interpreter lock.
"""

import _thread
import ctypes
import operator
import os
import threading

from . import _errors

c_size_p = ctypes.POINTER(ctypes.c_size_t)
c_int64_p = ctypes.POINTER(ctypes.c_int64)
c_text_p = ctypes.POINTER(ctypes.c_char_p)
handle = ctypes.c_void_p
POLL_SECONDS = 0.05
START_SECONDS = 1


class OpenOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("no_checksums", ctypes.c_int)]


class TensorInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_size_t),
        ("dtype", ctypes.c_char_p),
        ("element_bytes", ctypes.c_size_t),
        ("dims", ctypes.c_size_t),
        ("shape", c_int64_p),
        ("size_bytes", ctypes.c_uint64),
        ("chunks", ctypes.c_size_t),
        ("requires_grad", ctypes.c_int),
    ]


class ChunkInfo(ctypes.Structure):
    _fields_ = [
        ("offsets", c_int64_p),
        ("sizes", c_int64_p),
        ("file", ctypes.c_size_t),
        ("offset_bytes", ctypes.c_uint64),
        ("length_bytes", ctypes.c_uint64),
    ]


class Boxes(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("names", c_text_p),
        ("dtypes", c_text_p),
        ("dims", c_size_p),
        ("offsets", c_int64_p),
        ("sizes", c_int64_p),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("data_bytes", c_size_p),
        ("strides", c_int64_p),
        ("shapes", c_int64_p),
    ]


class ReadOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("cast", ctypes.c_int),
        ("no_checksums", ctypes.c_int),
        ("threads", ctypes.c_size_t),
        ("task", handle),
        ("compare_rest", ctypes.c_int),
    ]


class ObjectInfo(ctypes.Structure):
    _fields_ = [("name", ctypes.c_void_p), ("name_bytes", ctypes.c_size_t)]


# tessera_read_elements
ReadElements = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)


class State(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("count", ctypes.c_size_t),
        ("names", c_text_p),
        ("paths", c_text_p),
        ("dtypes", c_text_p),
        ("dims", c_size_p),
        ("shapes", c_int64_p),
        ("offsets", c_int64_p),
        ("sizes", c_int64_p),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("data_bytes", c_size_p),
        ("strides", c_int64_p),
        ("requires_grad", ctypes.POINTER(ctypes.c_int)),
        ("read", ReadElements),
        ("context", ctypes.c_void_p),
    ]


class SaveOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("files_per_rank", ctypes.c_size_t),
        ("threads", ctypes.c_size_t),
        ("keep", ctypes.c_int),
        ("save_id", ctypes.c_char_p),
        ("task", handle),
    ]


class VerifyOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("jobs", ctypes.c_size_t), ("task", handle)]


class Selection(ctypes.Structure):
    _fields_ = [("select", c_text_p), ("exclude", c_text_p)]


class DiffOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("selection", Selection),
        ("expand", ctypes.c_int),
        ("jobs", ctypes.c_size_t),
        ("task", handle),
    ]


class ConvertOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("selection", Selection),
        ("dtype", ctypes.c_char_p),
        ("max_shard_bytes", ctypes.c_uint64),
        ("dry_run", ctypes.c_int),
        ("expand", ctypes.c_int),
        ("jobs", ctypes.c_size_t),
        ("task", handle),
    ]


def _load():
    """The library of the package; TESSERA_LIBRARY names another one."""
    given = os.environ.get("TESSERA_LIBRARY")
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libtessera.so")
    if given:
        try:
            return ctypes.CDLL(given)
        except OSError as error:
            raise ImportError(
                f"tessera: TESSERA_LIBRARY is {given!r}, expected the path of libtessera.so: {error}"
            ) from error
    if os.path.exists(beside):
        return ctypes.CDLL(beside)
    try:
        return ctypes.CDLL("libtessera.so.0.1")
    except OSError as error:
        raise ImportError(
            f"tessera: libtessera.so is neither at {beside} nor installed, expected one of them, or its path in"
            f" TESSERA_LIBRARY: {error}"
        ) from error


library = _load()

_out_handle = ctypes.POINTER(handle)
# Name: result, arguments.
_FUNCTIONS = {
    "version": (ctypes.c_char_p, []),
    "last_error": (ctypes.c_char_p, []),
    "bytes_data": (ctypes.c_void_p, [handle]),
    "bytes_size": (ctypes.c_size_t, [handle]),
    "bytes_free": (None, [handle]),
    "task_new": (ctypes.c_int, [_out_handle]),
    "task_cancel": (None, [handle]),
    "task_progress": (None, [handle, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)]),
    "task_free": (None, [handle]),
    "open": (ctypes.c_int, [ctypes.c_char_p, ctypes.POINTER(OpenOptions), _out_handle]),
    "close": (None, [handle]),
    "kind": (ctypes.c_char_p, [handle]),
    "format_version": (ctypes.c_char_p, [handle]),
    "warning_count": (ctypes.c_size_t, [handle]),
    "warning": (ctypes.c_char_p, [handle, ctypes.c_size_t]),
    "file_count": (ctypes.c_size_t, [handle]),
    "file_name": (ctypes.c_char_p, [handle, ctypes.c_size_t]),
    "largest_block": (ctypes.c_uint64, [handle]),
    "tensor_count": (ctypes.c_size_t, [handle]),
    "tensor": (ctypes.c_int, [handle, ctypes.c_size_t, ctypes.POINTER(TensorInfo)]),
    "chunk": (ctypes.c_int, [handle, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ChunkInfo)]),
    "object_count": (ctypes.c_size_t, [handle]),
    "object": (ctypes.c_int, [handle, ctypes.c_size_t, ctypes.POINTER(ObjectInfo)]),
    "read_object": (ctypes.c_int, [handle, ctypes.c_size_t, _out_handle]),
    "read_object_archive": (ctypes.c_int, [handle, ctypes.c_size_t, _out_handle]),
    "read": (ctypes.c_int, [handle, ctypes.POINTER(Boxes), ctypes.POINTER(ReadOptions), ctypes.c_void_p]),
    "save_new": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.POINTER(State), ctypes.POINTER(SaveOptions), _out_handle],
    ),
    "save_plan": (ctypes.c_int, [handle, _out_handle]),
    "save_answer": (ctypes.c_int, [handle, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), c_size_p, _out_handle]),
    "save_objects": (ctypes.c_int, [handle, ctypes.c_char_p, ctypes.c_size_t, c_size_p, c_size_p]),
    "save_set_object": (ctypes.c_int, [handle, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]),
    "save_write": (ctypes.c_int, [handle, ctypes.c_char_p, ctypes.c_size_t, _out_handle]),
    "save_commit": (
        ctypes.c_int,
        [handle, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), c_size_p, ctypes.POINTER(ctypes.c_int)],
    ),
    "save_abandon": (None, [handle]),
    "save_written_bytes": (ctypes.c_uint64, [handle]),
    "save_free": (None, [handle]),
    "verify": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.POINTER(VerifyOptions), ctypes.POINTER(ctypes.c_uint64), _out_handle],
    ),
    "diff": (
        ctypes.c_int,
        [handle, handle, ctypes.POINTER(DiffOptions), ctypes.POINTER(ctypes.c_uint64), _out_handle],
    ),
    "convert": (
        ctypes.c_int,
        [handle, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ConvertOptions), _out_handle],
    ),
    "reshard": (
        ctypes.c_int,
        [
            handle,
            ctypes.c_char_p,
            ctypes.c_int64,
            ctypes.c_int64,
            handle,
            ctypes.POINTER(ConvertOptions),
            _out_handle,
        ],
    ),
}


class _Functions:
    """The functions of the C interface, without their prefix."""

    def __init__(self):
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(library, "tessera_" + name)
            except AttributeError as error:
                raise ImportError(
                    f"tessera: the library {library._name} has no function tessera_{name}, expected libtessera.so of"
                    " the package's version; TESSERA_LIBRARY may name it"
                ) from error
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)


functions = _Functions()


def version():
    return functions.version().decode()


def text_of(data):
    """Bytes of a name or a message as text. Names may be invalid UTF-8, and come back the same in bytes_of."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(argument, text):
    """The bytes of a text, which `argument` names in errors."""
    if not isinstance(text, str):
        raise _errors.InvalidArgumentError(f"{argument} is {text!r} of type {type(text).__name__}, expected a str")
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _errors.InvalidArgumentError(f"{argument} is {text!r}, expected text without surrogates") from None
    if b"\0" in data:
        raise _errors.InvalidArgumentError(f"{argument} is {text!r}, expected text without a zero byte")
    return data


def path_bytes(path):
    data = os.fsencode(path)
    if b"\0" in data:
        raise _errors.InvalidArgumentError(f"the path {path!r} has a zero byte, expected none")
    return data


def texts(argument, names):
    """An array of texts with a NULL at the end; NULL for None and for no texts. `argument` names it in errors."""
    if names is None:
        return None
    if isinstance(names, str):
        return (ctypes.c_char_p * 2)(bytes_of(argument, names), None)
    try:
        data = [bytes_of(f"{argument}[{i}]", name) for i, name in enumerate(names)]
    except TypeError:
        raise _errors.InvalidArgumentError(f"{argument} is {names!r}, expected a list of globs") from None
    return (ctypes.c_char_p * (len(data) + 1))(*data, None) if data else None


def index_of(value):
    """The value as an integer; None unless it is one. True and False, of Python or NumPy, are none."""
    try:
        return None if type(value).__name__ in ("bool", "bool_") else operator.index(value)
    except TypeError:
        return None


def integer(argument, value, least, expected):
    """An argument as an integer that C has."""
    number = index_of(value)
    if number is None or not least <= number < 1 << 63:
        raise _errors.InvalidArgumentError(f"{argument} is {value!r}, expected {expected}")
    return number


def count(argument, value):
    return integer(argument, value, 0, "an integer from 0 to 2^63 - 1")


def options(structure, **members):
    return structure(struct_size=ctypes.sizeof(structure), **members)


# bytes_at(address, size): a copy of bytes of any size. ctypes.string_at takes the size for a C int.
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def take(text):
    """The bytes of a tessera_bytes, which is freed."""
    try:
        return bytes_at(functions.bytes_data(text), functions.bytes_size(text))
    finally:
        functions.bytes_free(text)


def check(status):
    """Raises the exception of a status. Called by the thread that got it."""
    if status != 0:
        message = text_of(functions.last_error())
        raise _errors.CLASSES.get(status, _errors.InternalError)(message)


class _Progress:
    """Passes the progress of a task on to what the caller gave."""

    def __init__(self, given):
        self._given = given
        self._done = 0

    def show(self, done, total):
        if hasattr(self._given, "update"):
            if total and getattr(self._given, "total", None) != total:
                self._given.total = total
            if done > self._done:
                self._given.update(done - self._done)
        else:
            self._given(done, total)
        self._done = done


class Task:
    """A tessera_task. The thread of the operation and the one that waits for it hold it."""

    def __init__(self):
        self.handle = handle()
        check(functions.task_new(ctypes.byref(self.handle)))
        self._free = functions.task_free

    def __del__(self):
        self._free(self.handle)

    def cancel(self):
        functions.task_cancel(self.handle)

    def progress(self):
        done, total = ctypes.c_uint64(), ctypes.c_uint64()
        functions.task_progress(self.handle, ctypes.byref(done), ctypes.byref(total))
        return done.value, total.value


def run(call, progress=None, task=None):
    """Returns call(task), which another thread runs, so that this one can show progress and be interrupted by ^C. `task` is
    new unless it is given."""
    if progress is not None and not hasattr(progress, "update") and not callable(progress):
        raise _errors.InvalidArgumentError(
            f"progress is {progress!r}, expected an object with update(), such as tqdm's, or a function"
        )
    task = task or Task()
    outcome, begun, finished = [], threading.Event(), threading.Event()

    def work():
        begun.set()
        try:
            outcome.append((call(task.handle), None))
        except BaseException as error:  # passed to the caller
            outcome.append((None, error))
        finally:
            finished.set()

    shown = _Progress(progress) if progress is not None else None
    try:
        # Not threading.Thread: where ^C interrupts its join, CPython 3.11 takes the thread for one that has ended.
        _thread.start_new_thread(work, ())
        while not finished.wait(POLL_SECONDS):
            if shown is not None:
                shown.show(*task.progress())
        if shown is not None:
            shown.show(*task.progress())
    except BaseException:
        task.cancel()
        # A thread that has not begun by then could not be started, or ends at once.
        while begun.wait(START_SECONDS) and not finished.is_set():
            try:
                finished.wait()
            except KeyboardInterrupt:  # it is ending
                pass
        raise
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
