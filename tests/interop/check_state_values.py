"""Loads what state_values.cpp wrote: check_state_values.py THEIRS OURS

Prints a line of JSON for each file of OURS: {"what", "ok", "why"}. OURS are loaded with weights_only=True. Objects
must be those of THEIRS, with the same sharing of storages; an optimizer must take its state by set_optimizer_state_dict
and then make the same step as ours made.
"""

import json
import pathlib
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "state"))
from generate import closure_of, make  # noqa: E402


def require(holds, *why):
    if not holds:
        raise AssertionError(" ".join(map(str, why)))


def same(a, b, path, storages):
    """Plain values alike; a Size may be a tuple, an OrderedDict a dict and a Parameter a tensor."""
    if isinstance(a, torch.Tensor):
        require(isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b), path, a, b)
        require(a.requires_grad == b.requires_grad and a.stride() == b.stride(), path, "requires_grad or strides")
        pair = (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr())
        require(a.numel() == 0 or storages.setdefault(pair[0], pair[1]) == pair[1], path, "another storage")
    elif isinstance(a, dict):
        require(isinstance(b, dict) and list(a) == list(b), path, list(a), list(b))
        for key in a:
            same(a[key], b[key], f"{path}.{key}", storages)
    elif isinstance(a, (list, tuple)):
        kind = list if isinstance(a, list) else tuple
        require(isinstance(b, kind) and len(a) == len(b), path, type(a), type(b))
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{path}.{i}", storages)
    else:
        require(type(a) is type(b) and repr(a) == repr(b), path, repr(a), repr(b))


def check_objects(theirs, ours):
    same(torch.load(theirs, weights_only=False), torch.load(ours, weights_only=True), "objects", {})


def check_optimizer(name, ours):
    saved = torch.load(ours, weights_only=True)
    model, optimizer = make(name)
    model.load_state_dict(saved["model"])
    if name == "lbfgs":  # whose one state set_optimizer_state_dict misses for all parameters but the first
        optimizer.load_state_dict(saved["optim"])
    else:
        set_optimizer_state_dict(model, optimizer, saved["optim"])
    got = get_optimizer_state_dict(model, optimizer)
    require(list(got["state"]) == list(saved["optim"]["state"]), list(got["state"]), list(saved["optim"]["state"]))
    for parameter, state in saved["optim"]["state"].items():
        same({k: v for k, v in got["state"][parameter].items() if k != "al"}, state, parameter, {})
    optimizer.step(closure_of(model, optimizer))
    for key, value in model.state_dict().items():
        require(torch.allclose(value, saved["after"][key], rtol=1e-5, atol=1e-7), key, value, saved["after"][key])


def main():
    theirs, ours = map(pathlib.Path, sys.argv[1:])
    for path in sorted(ours.iterdir()):
        answer = {"what": path.stem, "ok": True, "why": ""}
        try:
            if path.stem == "objects":
                check_objects(theirs / path.name, path)
            else:
                check_optimizer(path.stem.removeprefix("optimizer-"), path)
        except Exception as error:  # noqa: BLE001  PyTorch's refusals are of several types
            answer.update(ok=False, why=f"{type(error).__name__}: {error}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
