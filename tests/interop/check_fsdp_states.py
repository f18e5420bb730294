#!/usr/bin/env python3
"""Compares checkpoints of trainings: for each line of JSON {"id", "found", "expected", "allowed"} prints {"id", "why"}.

Both have tensors of the same names, dtypes and shapes, and those of each part of the state that `allowed` names are the
same up to its number times their largest element: {"model": 1e-5}.
"""

import json
import math
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(path):
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader)
    return state


def worst_of(apart):
    """The name and the number of the largest difference. A NaN is larger than any other."""
    return max(apart.items(), key=lambda one: (math.isnan(one[1]), one[1]), default=("", 0.0))


def check_difference():
    """A NaN is a difference, whichever tensor has it."""
    good, small = torch.ones(2), torch.tensor([1.0, 1 + 1e-6])
    for name in ("model.a", "model.b", "model.c"):
        found = {"model.a": good, "model.b": small, "model.c": good, name: torch.tensor([1.0, math.nan])}
        why = difference(found, dict.fromkeys(found, good), {"model": 1e-5})
        if name not in why:
            raise AssertionError(f"difference: found '{why}', expected that {name} differs")


def difference(found, expected, allowed):
    if found.keys() != expected.keys():
        return f"only one has {sorted(found.keys() ^ expected.keys())[:5]}"
    why = []
    for part, tolerance in allowed.items():
        apart = {}
        for name, wanted in expected.items():
            if not name.startswith(f"{part}.") or wanted.numel() == 0:
                continue
            one = found[name]
            if (one.dtype, one.shape) != (wanted.dtype, wanted.shape):
                return f"{name}: found {one.dtype} {list(one.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            largest = wanted.double().abs().max().clamp(min=1e-12)
            apart[name] = ((one.double() - wanted.double()).abs().max() / largest).item()
        if not apart and part == "model":
            return "neither has tensors of a model"
        where, worst = worst_of(apart)
        if not worst <= tolerance:
            why.append(f"{where} differs by {worst:.2g} of its largest element, allowed is {tolerance}")
    return "; ".join(why)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    check_difference()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            why = difference(tensors_of(job["found"]), tensors_of(job["expected"]), job["allowed"])
        except Exception as error:
            why = repr(error)
        print(json.dumps({"id": job["id"], "why": why}), flush=True)


if __name__ == "__main__":
    main()
