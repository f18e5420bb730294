"""Operations on checkpoints at paths."""

from __future__ import annotations

import contextlib
import ctypes
import os
import types

from . import _library
from ._checkpoint import Checkpoint
from ._errors import InvalidArgumentError
from ._library import functions, handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .typing import Progress


class VerifyReport(types.SimpleNamespace):
    """What `verify` found. It is true if there is no problem.

    good                      whether there is no problem
    problems                  the first ones, each with `file`, `offset_bytes`, `name` and `what`, None where there is none
    problem_count             the number of all
    tensors, chunks, objects, files
                              the numbers of what was verified
    bytes_checked             compared with a checksum
    bytes_without_checksum    read, and compared with none
    has_sidecar               whether the checkpoint has a `.tessera.json`
    sidecar_agrees            whether its checksums are those of the files
    left_over                 files of saves and conversions that did not end
    other_files               files that are not of the checkpoint
    warnings                  from opening, such as a file that some ranks lack
    """

    good: bool
    problems: list
    problem_count: int
    tensors: int
    chunks: int
    objects: int
    files: int
    bytes_checked: int
    bytes_without_checksum: int
    has_sidecar: bool
    sidecar_agrees: bool
    left_over: list
    other_files: list
    warnings: list

    def __bool__(self):
        return self.good


class DiffReport(types.SimpleNamespace):
    """What `diff` found. It is true if the states are the same.

    same              whether there is no difference
    differences       each with `kind`, `name`, `a` and `b`; of elements also `index`, of the first, `differing_elements`, `elements`,
                      and `worst_absolute` and `worst_relative`, which are dicts or None
    tensors, objects  the numbers of what was compared
    bytes             of elements that were compared
    """

    same: bool
    differences: list
    tensors: int
    objects: int
    bytes: int

    def __bool__(self):
        return self.same


class ConvertReport(types.SimpleNamespace):
    """What `convert` and `reshard` wrote.

    tensors, objects  their numbers
    tensor_bytes      of the elements of all tensors
    files             each with `name`, `bytes` and `tensors`
    warnings          what was lost or may surprise, each a text
    """

    tensors: int
    objects: int
    tensor_bytes: int
    files: list
    warnings: list


def _report(structure, text):
    """The report in `text`; members that a later library adds are left out."""
    import json  # imported when needed: `import tessera` takes half as long without

    return structure(**{name: value for name, value in json.loads(text).items() if name in structure.__annotations__})


class _Opened:
    """The checkpoint that a caller passed, or one that is open as long as the operation takes."""

    def __init__(self, given):
        self._given, self._use = given, None

    def __enter__(self):
        self._own = not isinstance(self._given, Checkpoint)
        self._checkpoint = Checkpoint(self._given) if self._own else self._given
        self._use = self._checkpoint._use()
        return self._use.__enter__()

    def __exit__(self, *_):
        self._use.__exit__()
        if self._own:
            self._checkpoint.close()


def verify(path: str | os.PathLike | Checkpoint, *, jobs: int = 0, progress: Progress | None = None) -> VerifyReport:
    """Verifies every byte of the checkpoint at `path`. Damage is in the report, and no exception.

    jobs        threads; 0: one per processor, at least 4, at most 16
    progress    shows the bytes that are done: an object like tqdm's, or a function of the bytes that are done and their total
    """
    path = _library.path_bytes(path.path if isinstance(path, Checkpoint) else path)

    def call(task):
        options = _library.options(_library.VerifyOptions, jobs=_library.count("jobs", jobs), task=task)
        problems, text = ctypes.c_uint64(), handle()
        _library.check(functions.verify(path, ctypes.byref(options), ctypes.byref(problems), ctypes.byref(text)))
        return _report(VerifyReport, _library.take(text))

    return _library.run(call, progress)


def diff(
    a: str | os.PathLike | Checkpoint,
    b: str | os.PathLike | Checkpoint,
    *,
    select: list[str] | str | None = None,
    exclude: list[str] | str | None = None,
    expand: bool = False,
    jobs: int = 0,
    progress: Progress | None = None,
) -> DiffReport:
    """Compares the states of two checkpoints, paths or open ones, whatever their formats and layouts.

    select, exclude    globs of names, one or a list; None for all names, and for no name
    expand             as of `convert`
    jobs, progress     as of `verify`
    """
    with _Opened(a) as opened_a, _Opened(b) as opened_b:

        def call(task):
            options = _library.options(
                _library.DiffOptions,
                selection=_selection(select, exclude),
                expand=bool(expand),
                jobs=_library.count("jobs", jobs),
                task=task,
            )
            differences, text = ctypes.c_uint64(), handle()
            _library.check(
                functions.diff(opened_a, opened_b, ctypes.byref(options), ctypes.byref(differences), ctypes.byref(text))
            )
            return _report(DiffReport, _library.take(text))

        return _library.run(call, progress)


_FORMAT_OF_ENDING = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def _selection(select, exclude):
    selected = _library.texts("select", select)
    if selected is None and select is not None:
        raise InvalidArgumentError("select is an empty list, expected globs, or None for all names")
    return _library.Selection(selected, _library.texts("exclude", exclude))


def _convert_options(select, exclude, dtype, max_shard_bytes, dry_run, expand, jobs, task):
    return _library.options(
        _library.ConvertOptions,
        selection=_selection(select, exclude),
        dtype=None if dtype is None else _library.bytes_of("dtype", str(dtype).removeprefix("torch.")),
        max_shard_bytes=_library.count("max_shard_bytes", max_shard_bytes),
        dry_run=bool(dry_run),
        expand=bool(expand),
        jobs=_library.count("jobs", jobs),
        task=task,
    )


def convert(
    source: str | os.PathLike | Checkpoint,
    destination: str | os.PathLike,
    *,
    to: str | None = None,
    select: list[str] | str | None = None,
    exclude: list[str] | str | None = None,
    dtype: object = None,
    max_shard_bytes: int = 0,
    dry_run: bool = False,
    expand: bool = False,
    jobs: int = 0,
    progress: Progress | None = None,
) -> ConvertReport:
    """Writes a checkpoint, a path or an open one, at `destination`, which must not exist. It appears complete or not at all.

    to                 "dcp", "safetensors", "torch" or "torch_checkpointing"; None: by the ending of `destination`
    select, exclude    globs of names, one or a list; None for all names, and for no name
    dtype              floating-point tensors are cast to it: "bfloat16", torch.bfloat16
    max_shard_bytes    largest file, not counting headers; 0 for the format's default
    dry_run            only reports
    expand             whether tensors that repeat few stored elements may take many times their size
    jobs, progress     as of `verify`
    """
    if to is None:
        ending = os.path.splitext(os.fsdecode(destination))[1]
        to = _FORMAT_OF_ENDING.get(ending)
        if to is None:
            raise InvalidArgumentError(
                f"convert: to is None and {destination!r} does not end in {', '.join(_FORMAT_OF_ENDING)}, expected a format"
            )
    with _Opened(source) as opened:

        def call(task):
            options = _convert_options(select, exclude, dtype, max_shard_bytes, dry_run, expand, jobs, task)
            text = handle()
            _library.check(
                functions.convert(
                    opened,
                    _library.path_bytes(destination),
                    _library.bytes_of("to", to),
                    ctypes.byref(options),
                    ctypes.byref(text),
                )
            )
            return _report(ConvertReport, _library.take(text))

        return _library.run(call, progress)


def reshard(
    source: str | os.PathLike | Checkpoint,
    destination: str | os.PathLike,
    ranks: int | None = None,
    *,
    dim: int = 0,
    like: str | os.PathLike | Checkpoint | None = None,
    select: list[str] | str | None = None,
    exclude: list[str] | str | None = None,
    dtype: object = None,
    max_shard_bytes: int = 0,
    dry_run: bool = False,
    expand: bool = False,
    jobs: int = 0,
    progress: Progress | None = None,
) -> ConvertReport:
    """Writes a checkpoint as a distributed checkpoint of `ranks` ranks, each tensor sharded in dimension `dim`.

    like    a checkpoint whose ranks and boxes are taken, in place of `ranks` and `dim`

    The other arguments are those of `convert`.
    """
    if (ranks is None) == (like is None):
        raise InvalidArgumentError(f"reshard: ranks is {ranks!r} and like is {like!r}, expected exactly one of them")
    with _Opened(source) as opened, _Opened(like) if like is not None else contextlib.nullcontext() as opened_like:

        def call(task):
            options = _convert_options(select, exclude, dtype, max_shard_bytes, dry_run, expand, jobs, task)
            text = handle()
            _library.check(
                functions.reshard(
                    opened,
                    _library.path_bytes(destination),
                    0 if ranks is None else _library.count("ranks", ranks),
                    _library.integer("dim", dim, -(1 << 63), "a dimension"),
                    opened_like,
                    ctypes.byref(options),
                    ctypes.byref(text),
                )
            )
            return _report(ConvertReport, _library.take(text))

        return _library.run(call, progress)


def inspect(path: str | os.PathLike) -> dict:
    """Describes the checkpoint at `path` with plain values: its kind and version, the dtype, shape and chunks of each tensor,
    the value of each object, its files and its size."""
    with Checkpoint(path) as checkpoint:
        return {
            "kind": checkpoint.kind,
            "version": checkpoint.version,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": tensor.size_bytes,
                    "chunks": [chunk._asdict() for chunk in tensor.chunks],
                }
                for name, tensor in checkpoint.items()
            },
            "objects": dict(checkpoint.objects),
            "files": checkpoint.files,
            "total_bytes": sum(tensor.size_bytes for tensor in checkpoint.values()),
        }
