#!/usr/bin/env python3
"""Runs a file of PyTorch's own tests of torch.distributed.checkpoint with tessera in place of its files.

    stand_in.py FILE

Wherever a test saves or loads by PyTorch's default planner and files, tessera's planner, writer and reader take their place; other
planners and storages stay, since ours refuse them by name. A test may compare with a save or load of PyTorch: TESSERA_STANDS_IN=no
changes nothing. Prints a line of JSON for each test: its name, how it ended, and how many saves and loads were tessera's, of all ranks.

The ranks of a test are processes that run this file before they import the test's.
"""

import functools
import importlib
import json
import os
import pathlib
import sys
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner, filesystem, state_dict_loader, state_dict_saver
from torch import distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor

import tessera.torch

FILE = pathlib.Path(sys.argv[1]).resolve()
COUNTS = "TESSERA_COUNTS"  # names the file that has a line for each call that tessera carried out


def note(call):
    with open(os.environ[COUNTS], "a", encoding="utf-8") as counts:
        counts.write(call + "\n")


def is_default(value, theirs):
    return value is None or type(value) is theirs


def path_of(storage, checkpoint_id):
    """The path of a checkpoint in the file system, or None."""
    path = checkpoint_id if storage is None else checkpoint_id or getattr(storage, "path", None)
    return None if path is None or "://" in str(path) else path


def options_of(planner):
    names = ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load")
    return {name: getattr(planner, name) for name in names if hasattr(planner, name)}


def standing_in(theirs, storage_name, storage_class, planner_class, ours):
    """`theirs`, a function that saves or loads, with tessera's planner and storage where it would use its defaults."""

    @functools.wraps(theirs)
    def call(state_dict, *positional, **keywords):
        # Of all these functions but the deprecated ones, further arguments have names; of those, the storage comes first.
        if positional:
            keywords[storage_name], positional = positional[0], positional[1:]
        storage, planner = keywords.get(storage_name), keywords.get("planner")
        path = path_of(storage, keywords.get("checkpoint_id"))
        if path and is_default(storage, storage_class) and is_default(planner, planner_class):
            keywords[storage_name], keywords["planner"] = ours(path, storage, options_of(planner))
            note(theirs.__name__)
        return theirs(state_dict, *positional, **keywords)

    return call


def our_writer(path, storage, options):
    overwrite = getattr(storage, "overwrite", True)
    return tessera.torch.Writer(path, overwrite=overwrite), tessera.torch.SavePlanner(**options)


def our_reader(path, _storage, options):
    return tessera.torch.Reader(path), tessera.torch.LoadPlanner(**options)


def stand_in():
    """Replaces PyTorch's functions, wherever tests import them from."""
    writes = ("storage_writer", filesystem.FileSystemWriter, default_planner.DefaultSavePlanner, our_writer)
    reads = ("storage_reader", filesystem.FileSystemReader, default_planner.DefaultLoadPlanner, our_reader)
    for module, names, how in (
        (state_dict_saver, ("save", "async_save", "save_state_dict"), writes),
        (state_dict_loader, ("load", "load_state_dict"), reads),
    ):
        for name in names:
            function = standing_in(getattr(module, name), *how)
            setattr(module, name, function)
            setattr(dcp, name, function)


def need_no_gpu():
    """Lets tests run on CPU that are skipped without GPUs. Those that use one all the same fail with PyTorch's files as well."""

    def init_pg(self, *_, **__):
        store = f"file://{self.file_name}"
        dist.init_process_group("gloo", world_size=self.world_size, rank=self.rank, init_method=store)

    for module in common_distributed, common_dtensor:
        for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: lambda test: test)
    common_dtensor.DTensorTestBase.init_pg = init_pg
    for moved in torch.Tensor, torch.nn.Module:
        moved.cuda = lambda self, *_, **__: self
    torch.cuda.set_device = lambda *_: None


need_no_gpu()
if os.environ.get("TESSERA_STANDS_IN") != "no":
    stand_in()
sys.path.insert(0, str(FILE.parent))


class Result(unittest.TestResult):
    """Prints each test as it ends, in whichever of unittest's ways."""

    def __init__(self, counts):
        super().__init__()
        self.counts, self.read = counts, 0

    def print(self, test, outcome, reason=""):
        calls = pathlib.Path(self.counts).read_text(encoding="utf-8").splitlines()
        new, self.read = calls[self.read :], len(calls)
        loads = sum("load" in call for call in new)
        line = {"test": test.id().split(".", 1)[-1], "outcome": outcome, "saves": len(new) - loads, "loads": loads, "why": reason}
        print(json.dumps(line), flush=True)

    def addSuccess(self, test):
        self.print(test, "passed")

    def addFailure(self, test, err):
        self.print(test, "failed", self._exc_info_to_string(err, test)[-3000:])

    addError = addFailure

    def addSkip(self, test, reason):
        self.print(test, "skipped", reason)

    def addExpectedFailure(self, test, err):
        self.print(test, "passed")

    def addUnexpectedSuccess(self, test):
        self.print(test, "failed", "passed, expected a failure")

    def addSubTest(self, test, subtest, err):
        """Of a test that fails in `subTest` alone, unittest calls nothing else."""
        if err is not None:
            self.addFailure(test, err)


def main():
    with tempfile.NamedTemporaryFile() as counts:
        os.environ[COUNTS] = counts.name
        suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(FILE.stem))
        if suite.countTestCases() == 0:
            sys.exit(f"{FILE}: found no test, expected at least one")
        suite.run(Result(counts.name))


if __name__ == "__main__":
    main()
