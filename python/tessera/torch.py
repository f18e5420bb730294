"""PyTorch's distributed checkpoints at tessera's speed.

    import torch.distributed.checkpoint as dcp
    from tessera.torch import LoadPlanner, Reader, SavePlanner, Writer

    dcp.save(state, checkpoint_id=path, storage_writer=Writer(), planner=SavePlanner())
    dcp.load(state, checkpoint_id=path, storage_reader=Reader(), planner=LoadPlanner())

or, in one line, `tessera.torch.save(state, path)`, `load(state, path)` and `async_save(state, path)`.

States are those that PyTorch accepts: nested dicts and lists of DTensors, ShardedTensors, tensors and other values, as
`get_state_dict` and FSDP return them. What is written, `dcp.load` reads without tessera, and the other way round. A save
replaces the checkpoint at the path by one rename: killed at any instant, the old one or the new one is there.

A planner and a writer, or a planner and a reader, work together: the plans of all tensors travel as bytes, in place of
objects of Python for each tensor. Those of others are refused.
"""

from __future__ import annotations

import copyreg
import ctypes
import dataclasses
import io
import json
import os
import pickle
import traceback
import uuid
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _checkpoint, _library, _objects, _snapshot, _staging
from ._errors import Error, InvalidArgumentError, NotFoundError, OutcomeUnknownError, StorageError, UnsupportedError
from ._library import functions, handle
from ._torch_state import Chunks, Rows, StateObject, in_plain_memory, loadable, savable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .typing import Progress


def _make_frames_picklable():
    """Lets ranks send the frames of an exception to each other, as PyTorch's saves and loads do where a rank fails. From Python
    3.13 on, a frame has its code, which cannot be pickled: with PyTorch 2.6 the other ranks would wait until they time out."""
    try:
        pickle.dumps(traceback.extract_stack(limit=1))
    except TypeError:
        copyreg.pickle(
            traceback.FrameSummary, lambda frame: (traceback.FrameSummary, (frame.filename, frame.lineno, frame.name))
        )


_make_frames_picklable()


class _LocalState:
    """What SavePlanner passes to Writer within a rank. It does not travel: a plan that a Writer did not take loses it."""

    def __init__(self, rows=None, paths=None, requires_grad=None):
        self.rows, self.paths, self.requires_grad = rows, paths, requires_grad

    def __reduce__(self):
        return _LocalState, ()


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans a save for `Writer`. Flattens the state as PyTorch's default planner does."""

    def __init__(self, *, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True):
        super().__init__(flatten_state_dict=flatten_state_dict, flatten_sharded_tensors=flatten_sharded_tensors)
        self._chunks = Chunks()

    def create_local_plan(self):
        rows, paths, requires_grad = [], [], []
        mappings = getattr(self, "mappings", None) or {}
        with torch.no_grad():  # in which DTensors give their local tensors as they are
            all_rows = [self._chunks.rows(name, value) for name, value in self.state_dict.items()]
        for (name, value), found in zip(self.state_dict.items(), all_rows, strict=True):
            path = mappings.get(name)
            text = None if path is None or path == (name,) else json.dumps(list(path)).encode()
            for row in [StateObject(name, value)] if found is None else map(savable, found):
                rows.append(row)
                paths.append(text)
                requires_grad.append(found is not None and bool(value.requires_grad))
        return SavePlan(items=[], planner_data=_LocalState(rows, paths, requires_grad))

    def create_global_plan(self, all_plans):
        for plan in all_plans:
            if not isinstance(plan.planner_data, bytes):
                raise InvalidArgumentError(
                    "tessera.torch.SavePlanner got a plan that another writer prepared, expected one of"
                    " tessera.torch.Writer; pass storage_writer=tessera.torch.Writer() to save"
                )
        return all_plans, Metadata(state_dict_metadata={})

    def finish_plan(self, new_plan):
        return new_plan

    def resolve_data(self, write_item):
        raise InvalidArgumentError(
            "tessera.torch.SavePlanner: another writer asks for an item, expected tessera.torch.Writer; pass"
            " storage_writer=tessera.torch.Writer() to save"
        )


class Writer(dcp.StorageWriter):
    """Writes what `SavePlanner` plans: files for each rank, a checksum of every block, and one rename that commits.

    path               of the checkpoint; or pass `checkpoint_id` to `save`
    files_per_rank     files of each rank, about equal in size
    threads            threads of each rank that read tensors and write files; 0 for one for each processor
    overwrite          whether a checkpoint that is there is replaced; otherwise the save fails
    progress           as of tessera.convert, of this rank
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        files_per_rank: int = 1,
        threads: int = 0,
        overwrite: bool = True,
        progress: Progress | None = None,
    ):
        super().__init__()
        self.checkpoint_id = path
        self._files_per_rank, self._threads, self._overwrite = files_per_rank, threads, overwrite
        self._progress = progress
        self._save = None
        self._save_id = str(uuid.uuid4())
        self._is_coordinator = False

    def reset(self, checkpoint_id=None):
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._save = None
        self._save_id = str(uuid.uuid4())

    # What is wrong on one rank is refused here, where PyTorch has the others raise too.
    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        self._is_coordinator = is_coordinator
        self._files_per_rank = _library.count("files_per_rank", self._files_per_rank)
        self._threads = _library.count("threads", self._threads)
        if kwargs.get("use_collectives") is False:
            raise UnsupportedError("tessera.torch.Writer: use_collectives is False, expected True: the ranks commit together")
        if self.checkpoint_id is None:
            raise InvalidArgumentError(
                "tessera.torch.Writer has no path, expected one; pass it, or checkpoint_id to save"
            )

    # What makes this an AsyncStager, which dcp.async_save asks for the copy of the state that it saves.
    _synchronize_after_execute = should_synchronize_after_execute = False

    def stage(self, state_dict):
        """Copies the chunks of this rank to the memory of the host, from devices through a bounded amount of pinned memory."""
        return _snapshot.copy_of(state_dict)

    def synchronize_staging(self):
        """Does nothing: when `stage` returns, the state may be changed."""

    def close(self):
        """Does nothing: the copy is gone with the save."""

    def storage_meta(self):
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return isinstance(checkpoint_id, (str, os.PathLike))

    def prepare_local_plan(self, plan):
        state = plan.planner_data
        if not isinstance(state, _LocalState):
            raise InvalidArgumentError(
                "tessera.torch.Writer got a plan of another planner, expected one of tessera.torch.SavePlanner; pass"
                " planner=tessera.torch.SavePlanner() to save"
            )
        self._save = _Save(self.checkpoint_id, state, self._files_per_rank, self._threads, self._overwrite, self._save_id)
        return dataclasses.replace(plan, planner_data=self._save.plan())

    def prepare_global_plan(self, plans):
        answers = self._save.answer([plan.planner_data for plan in plans])
        return [dataclasses.replace(plan, planner_data=answer) for plan, answer in zip(plans, answers, strict=True)]

    def write_data(self, plan, planner):
        report = self._save.write(plan.planner_data, self._progress)
        future = Future()
        future.set_result([WriteResult(MetadataIndex("tessera"), self._save.written_bytes(), report)])
        return future

    def finish(self, metadata, results):
        self._save.commit([rank[0].storage_data for rank in results])

    def abandon(self):
        """Removes the files of a save of which it is known that it was not committed. Without it, the next save to the path
        removes them."""
        if self._save is not None:
            self._save.abandon()

    def _is_uncommitted(self, failures):
        """Whether the failures of the ranks prove that there was no commit. The coordinator, rank 0, commits after every rank has
        written its files. What it raises then proves that only if it is an error of the library: a handler of signals may raise
        anything, after the commit too."""
        if self._is_coordinator:
            return self._save is None or not self._save.may_be_committed
        return any(
            rank != 0 or (isinstance(failure, Error) and not isinstance(failure, OutcomeUnknownError))
            for rank, (failure, _) in failures.items()
        )


class _Save:
    """A tessera_save, and the memory that it refers to."""

    may_be_committed = False  # on the coordinator

    def __init__(self, path, state, files_per_rank, threads, overwrite, save_id):
        self._rows, self._state = Rows(state.rows, _staging.is_on_host), state
        self._source = _staging.Source(state.rows)
        self._read = _library.ReadElements(*[self._source.read] if self._source.devices else [])
        count = len(state.rows)
        paths = (ctypes.c_char_p * (count + 1))(*state.paths)
        columns = self._rows.columns()
        # A task is passed here, since that is where options are: progress and ^C of `write`.
        self._task = _library.Task()
        given = _library.options(
            _library.State,
            count=count,
            paths=paths,
            shapes=self._rows.shapes,
            requires_grad=(ctypes.c_int * (count + 1))(*state.requires_grad),
            read=self._read,
            **columns,
        )
        options = _library.options(
            _library.SaveOptions,
            files_per_rank=files_per_rank,
            threads=threads,
            keep=not overwrite,
            save_id=save_id.encode(),
            task=self._task.handle,
        )
        self._handle = handle()
        _library.check(
            functions.save_new(
                _library.path_bytes(path), ctypes.byref(given), ctypes.byref(options), ctypes.byref(self._handle)
            )
        )

    def __del__(self):
        if functions is not None and getattr(self, "_handle", None) is not None:
            functions.save_free(self._handle)

    def plan(self):
        made = handle()
        _library.check(functions.save_plan(self._handle, ctypes.byref(made)))
        return _library.take(made)

    def answer(self, plans):
        answers = (handle * len(plans))()
        _library.check(functions.save_answer(self._handle, *_messages(plans), answers))
        return [_library.take(answer) for answer in answers]

    def write(self, answer, progress):
        rows, count = (ctypes.c_size_t * (self._rows.count + 1))(), ctypes.c_size_t()
        _library.check(functions.save_objects(self._handle, answer, len(answer), rows, ctypes.byref(count)))
        for row in rows[: count.value]:
            archive = self._state.rows[row].archive()
            _library.check(functions.save_set_object(self._handle, row, archive, len(archive)))
        report = handle()

        def call(_):
            _library.check(functions.save_write(self._handle, answer, len(answer), ctypes.byref(report)))

        self._source.begin()
        try:
            _library.run(call, progress, self._task)
        except StorageError as error:
            if self._source.error is not None:
                raise self._source.error from error
            raise
        self._rows = self._state = self._source = None  # written: the tensors are no longer needed
        return _library.take(report)

    def written_bytes(self):
        return functions.save_written_bytes(self._handle)

    def commit(self, reports):
        arguments, unknown = _messages(reports), ctypes.c_int(0)
        self.may_be_committed = True
        status = functions.save_commit(self._handle, *arguments, ctypes.byref(unknown))
        self.may_be_committed = status == 0 or bool(unknown.value)
        if status != 0 and unknown.value:
            raise OutcomeUnknownError(_library.text_of(functions.last_error()))
        _library.check(status)

    def abandon(self):
        functions.save_abandon(self._handle)


def _messages(messages):
    count = len(messages)
    pointers = (ctypes.c_char_p * max(count, 1))(*messages)
    return count, ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)), (ctypes.c_size_t * max(count, 1))(*map(len, messages))


class _LocalTargets:
    """What LoadPlanner passes to Reader within a rank."""

    def __init__(self, state=None):
        self.state = state

    def __reduce__(self):
        return _LocalTargets, ()


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans a load by `Reader`. Flattens the state as PyTorch's default planner does.

    allow_partial_load    whether values that the checkpoint does not have keep theirs; otherwise they are an error
    """

    def __init__(
        self, *, flatten_state_dict: bool = True, flatten_sharded_tensors: bool = True, allow_partial_load: bool = False
    ):
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            allow_partial_load=allow_partial_load,
        )
        self._chunks = Chunks()

    def create_local_plan(self):
        return LoadPlan(items=[], planner_data=_LocalTargets(self.state_dict))

    def create_global_plan(self, global_plan):
        return global_plan

    def finish_plan(self, new_plan):
        return new_plan

    def _set(self, name, value):
        """Puts an object to its place in the state."""
        if not self.flatten_state_dict:
            self.state_dict[name] = value
            return
        *path, last = self.mappings[name]
        container = self.original_state_dict
        for key in path:
            container = container[_key_in(container, key)]
        container[_key_in(container, last)] = value


def _key_in(container, key):
    """The key of a container that a path names: PyTorch's paths have the keys of dicts as text."""
    if isinstance(container, dict) and key not in container:
        return next((found for found in container if str(found) == key), key)
    return key


_NEEDS_PLANNER = (
    "tessera.torch.Reader got another planner, expected tessera.torch.LoadPlanner, since the descriptions of tensors"
    " are no objects of Python here; pass planner=tessera.torch.LoadPlanner() to load"
)


class _NoDescriptions(dict):
    """In place of the descriptions of tensors, for which planners of others would look."""

    def _refuse(self, *_):
        raise InvalidArgumentError(_NEEDS_PLANNER)

    __contains__ = __getitem__ = __iter__ = get = items = keys = values = _refuse


class Reader(dcp.StorageReader):
    """Reads what `LoadPlanner` plans. Each rank reads the bytes of its own chunks, whatever ranks wrote them.

    path           of the checkpoint; or pass `checkpoint_id` to `load`
    checksums      whether all that is read is compared with the checkpoint's checksums
    unpickle       whether objects that tessera does not understand are made by executing their pickles, as PyTorch does for
                   every object. Only for checkpoints that you trust.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        checksums: bool = True,
        unpickle: bool = False,
        progress: Progress | None = None,
    ):
        super().__init__()
        self.checkpoint_id = path
        self._checksums, self._unpickle, self._progress = checksums, unpickle, progress

    def reset(self, checkpoint_id=None):
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def read_metadata(self, *args):
        if self.checkpoint_id is None:
            raise InvalidArgumentError(
                "tessera.torch.Reader has no path, expected one; pass it, or checkpoint_id to load"
            )
        return Metadata(state_dict_metadata=_NoDescriptions())

    def set_up_storage_reader(self, metadata, is_coordinator, *args):
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return isinstance(checkpoint_id, (str, os.PathLike))

    def prepare_local_plan(self, plan):
        if not isinstance(plan.planner_data, _LocalTargets):
            raise InvalidArgumentError(_NEEDS_PLANNER)
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def read_data(self, plan, planner):
        # To list all tensors takes longer than to read small ones.
        with _checkpoint.Checkpoint(self.checkpoint_id, checksums=self._checksums, _lists_tensors=False) as checkpoint:
            self._read(checkpoint, planner)
        future = Future()
        future.set_result(None)
        return future

    def _read(self, checkpoint, planner):
        with torch.no_grad():  # in which DTensors give their local tensors as they are
            wanted = {name: planner._chunks.rows(name, value) for name, value in planner.state_dict.items()}
        # What is read in one call, the library checks by itself before it reads anything.
        in_one_call = all(
            name in checkpoint.objects if rows is None else rows and all(_staging.is_on_host(row.tensor) for row in rows)
            for name, rows in wanted.items()
        )
        if planner.allow_partial_load or not in_one_call:
            wanted = self._present(checkpoint, wanted, planner.allow_partial_load)
        rows_to_read = [loadable(row) for rows in wanted.values() for row in rows or ()]
        try:
            self._read_rows(checkpoint, rows_to_read)
        except (NotFoundError, InvalidArgumentError):
            self._present(checkpoint, wanted, planner.allow_partial_load)  # which names all that is missing
            raise
        for name in (name for name, rows in wanted.items() if rows is None):
            planner._set(name, self._object(checkpoint, name))

    def _present(self, checkpoint, wanted, allow_partial_load):
        """The part of `wanted` that the checkpoint has. What does not fit is an error, and what is missing, unless that is
        allowed."""
        checkpoint._list_tensors()
        present, missing = {}, []
        for name, rows in wanted.items():
            if name not in (checkpoint if rows is not None else checkpoint.objects):
                if name in checkpoint or name in checkpoint.objects:
                    kinds = ("an object", "a tensor") if rows is not None else ("a tensor", "an object")
                    raise InvalidArgumentError(f"load {checkpoint.path}: '{name}' is {kinds[0]}, expected {kinds[1]}")
                missing.append(name)
                continue
            present[name] = rows
            for row in rows or ():
                stored = checkpoint[name].shape
                if tuple(row.shape) != stored:
                    raise InvalidArgumentError(
                        f"load {checkpoint.path}: tensor '{name}' has shape {list(stored)}, expected {list(row.shape)}"
                    )
        if missing and not allow_partial_load:
            shown = ", ".join(map(repr, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
            raise NotFoundError(
                f"load {checkpoint.path}: the checkpoint has no {shown}, expected every name of the state; with"
                " allow_partial_load=True, these keep their values"
            )
        return present

    def _read_rows(self, checkpoint, rows):
        on_host, elsewhere = [], []
        for row in rows:
            (on_host if _staging.is_on_host(row.tensor) else elsewhere).append(row)
        plain = list(map(in_plain_memory, on_host))
        self._fill(checkpoint, plain)
        for row, filled in zip(on_host, plain, strict=True):
            if filled is not row:
                row.tensor.copy_(filled.tensor)
        _staging.load(elsewhere, lambda staged: self._fill(checkpoint, staged))

    def _fill(self, checkpoint, rows):
        if not rows:
            return
        memory = Rows(rows)
        boxes = _library.options(_library.Boxes, count=memory.count, shapes=memory.shapes, **memory.columns())

        def call(task):
            options = _library.options(_library.ReadOptions, cast=1, task=task)
            _library.check(functions.read(opened, ctypes.byref(boxes), ctypes.byref(options), None))

        with checkpoint._use() as opened:
            _library.run(call, self._progress)

    def _object(self, checkpoint, name):
        value = checkpoint.objects.value(name, torch)
        if not isinstance(value, _objects.Opaque):
            return value
        if not self._unpickle:
            raise UnsupportedError(
                f"load {checkpoint.path}: object '{name}' {value.reason}, expected one that can be made without"
                " executing its pickle; pass unpickle=True to Reader or load if you trust the checkpoint"
            )
        return torch.load(io.BytesIO(checkpoint.objects.archive(name)), map_location="cpu", weights_only=False)


def save(
    state_dict: dict,
    path: str | os.PathLike,
    *,
    process_group=None,
    on_error: str = "raise",
    retries: int = 0,
    **options,
) -> Metadata | None:
    """Saves a state at `path`. All ranks of `process_group` call it. `options` are those of `Writer`.

    on_error    "raise", or "warn": a failed save is a warning, and the training continues
    retries     how often a save that failed is tried again

    If a rank fails, every rank raises torch.distributed.checkpoint.CheckpointException (a BaseException), which names it, and
    the checkpoint that was there is as it was. If rank 0 is interrupted while it commits, the old checkpoint or the new one is
    there, complete. An interruption, such as KeyboardInterrupt or SystemExit on any rank, is never a warning, and the save is not
    tried again: every rank raises the CheckpointException.
    """
    if on_error not in ("raise", "warn"):
        raise InvalidArgumentError(f"on_error is {on_error!r}, expected 'raise' or 'warn'")
    retries = _library.count("retries", retries)
    for attempt in range(retries + 1):
        writer = Writer(path, **options)
        try:
            return dcp.save(state_dict, storage_writer=writer, planner=SavePlanner(), process_group=process_group)
        # All ranks get this one. After any other, such as that of a lost connection, a rank does not know whether the
        # coordinator has committed, so its files must stay: if they belong to no checkpoint, the next save removes them.
        except dcp.api.CheckpointException as error:
            if writer._is_uncommitted(error.failures):
                writer.abandon()
            if not all(isinstance(failure, Exception) for failure, _ in error.failures.values()):
                raise  # an interruption
            if attempt < retries:
                continue
            if on_error == "raise":
                raise
            warnings.warn(f"the save to {path} failed: {error}", RuntimeWarning, stacklevel=2)
    return None


def async_save(state_dict: dict, path: str | os.PathLike, *, process_group=None, **options):
    """Copies a state and saves the copy in another thread. Returns a future. `options` are those of `Writer`."""
    return dcp.async_save(
        state_dict, storage_writer=Writer(path, **options), planner=SavePlanner(), process_group=process_group
    )


def load(
    state_dict: dict, path: str | os.PathLike, *, process_group=None, allow_partial_load: bool = False, **options
) -> None:
    """Loads a state into the tensors of `state_dict`. All ranks of `process_group` call it. `options` are those of
    `Reader`."""
    dcp.load(
        state_dict,
        storage_reader=Reader(path, **options),
        planner=LoadPlanner(allow_partial_load=allow_partial_load),
        process_group=process_group,
    )


__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Writer", "async_save", "load", "save"]
