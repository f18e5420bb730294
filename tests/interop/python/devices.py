#!/usr/bin/env python3
"""Saves and loads a state on a device by the package tessera.

    devices.py DEVICE       such as cuda, in a temporary folder; needs tests/interop in PYTHONPATH

Without a device, check_python.py calls `checks` with tensors of the CPU that the package takes for those of a device.
"""

import contextlib
import pathlib
import sys
import tempfile
import threading
import traceback

import torch
import torch.distributed.checkpoint as dcp

import tessera
import tessera.torch
from tessera import _staging
from values import row_major_bytes

SMALL_LIMIT = 4 << 20  # of pinned memory: less than the state has


class HostLane:
    """A _staging.Lane of the CPU, which copies when it is waited for, and not before."""

    def __init__(self, device):
        self._lock = threading.Lock()
        self._copies, self._done = [], 0

    def pinned(self, size_bytes):
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def copy(self, target, source):
        with self._lock:
            self._copies.append((target, source))

    def wait(self):
        with self._lock:
            self._run(len(self._copies))

    def mark(self):
        count = len(self._copies)
        return lambda: self._run(count)

    def _run(self, count):
        for target, source in self._copies[self._done : count]:
            target.copy_(source() if callable(source) else source)
        self._done = max(self._done, count)


@contextlib.contextmanager
def replaced(**values):
    """Other values of the module _staging."""
    before = {name: getattr(_staging, name) for name in values}
    try:
        for name, value in values.items():
            setattr(_staging, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(_staging, name, value)


@contextlib.contextmanager
def little_pinned_memory():
    """Gives the list of the sizes that are pinned meanwhile, of less than the state has."""
    sizes = []

    class Counting(_staging.Lane):
        def pinned(self, size_bytes):
            sizes.append(size_bytes)
            return super().pinned(size_bytes)

    with replaced(LIMIT_BYTES=SMALL_LIMIT, BLOCK_BYTES=1 << 20, Lane=Counting):
        yield sizes


def state_on(device):
    """Values of every kind of memory, in dtypes of 1 to 16 bytes."""
    torch.manual_seed(7)
    wide = torch.randn(37, 101)
    state = {
        "large": torch.randn(1700, 1031),
        "columns": torch.randn(300, 700).t(),
        "planes": torch.randn(1, 3, 900, 501).permute(0, 3, 1, 2)[:, 1:],
        "few_rows": torch.randn(400, 3, 701).transpose(0, 1),
        "part": torch.randn(64, 64)[3:50, 5:9],
        "repeated": torch.randn(5, 1).expand(5, 7),
        "conjugated": torch.randn(9, 4, dtype=torch.complex64).conj(),
        "complex128": torch.randn(6, dtype=torch.complex128),
        "bfloat16": wide.bfloat16(),
        "float8": wide.to(torch.float8_e4m3fn),
        "int64": torch.arange(1001),
        "bool": wide > 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    state = {name: value.to(device) for name, value in state.items()}
    state["on_cpu"] = torch.randn(50, 3)
    state["step"] = 3
    return state


def bits(tensor):
    return row_major_bytes(tensor.cpu())


def difference(found, expected):
    wrong = [
        name
        for name, value in expected.items()
        if (bits(found[name]) != bits(value) if isinstance(value, torch.Tensor) else found[name] != value)
    ]
    return f"{wrong} differ" if wrong else ""


def emptied(state):
    return {
        name: torch.zeros_like(value, memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else 0
        for name, value in state.items()
    }


def save_and_load(device, folder):
    state = state_on(device)
    tessera.torch.save(state, folder / "saved", threads=3)
    if not tessera.verify(folder / "saved").good:
        return "what was saved is not good"
    theirs = emptied(state_on("cpu"))
    dcp.load(theirs, checkpoint_id=folder / "saved")
    ours = emptied(state)
    ours["columns"] = torch.zeros_like(state["columns"].t()).t()  # with other strides
    tessera.torch.load(ours, folder / "saved")
    return difference(theirs, state) or difference(ours, state)


def save_later(device, folder):
    """An asynchronous save has the values at its call, on the host through bounded memory."""
    state = state_on(device)
    with little_pinned_memory() as sizes:
        future = tessera.torch.async_save(state, folder / "later")
        of_copy = sum(sizes)
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel():
                value.untyped_storage().fill_(0)
        future.result()
    found = emptied(state)
    tessera.torch.load(found, folder / "later")
    why = difference(found, state_on(device))
    return why or ("" if 0 < of_copy <= SMALL_LIMIT else f"{of_copy} bytes of pinned memory, expected {SMALL_LIMIT}")


def elsewhere_by_default(device, folder):
    """The default device of the caller, on which new tensors have no elements here, changes nothing."""
    state = state_on(device)
    found = emptied(state)
    with torch.device("meta"):
        tessera.torch.async_save(state, folder / "elsewhere").result()
        tessera.torch.load(found, folder / "elsewhere")
        with tessera.open(folder / "elsewhere") as checkpoint:
            found["on_cpu"] = checkpoint["on_cpu"].torch()
    return difference(found, state)


def bounded(device, folder):
    """The pinned memory does not depend on the state's size."""
    with little_pinned_memory() as sizes:
        why = save_and_load(device, folder)
        # One save and one load.
        return why or ("" if 0 < sum(sizes) <= 2 * SMALL_LIMIT else f"{sum(sizes)} bytes of pinned memory, expected {2 * SMALL_LIMIT}")


def failing(device, folder):
    """An error of the device is that of the save, and the checkpoint that was there stays."""
    state = {"weight": torch.ones(3000, device=device), "step": 1}
    tessera.torch.save(state, folder / "failing")

    class Failing(_staging.Lane):
        def copy(self, target, source):
            raise RuntimeError("the device was lost")

    with replaced(Lane=Failing):
        try:
            tessera.torch.save({"weight": torch.zeros(3000, device=device), "step": 2}, folder / "failing")
            return "the save did not fail"
        except dcp.api.CheckpointException as error:
            if "the device was lost" not in str(error.failures):
                return str(error)
    found = emptied(state)
    tessera.torch.load(found, folder / "failing")
    left = tessera.verify(folder / "failing").left_over
    return difference(found, state) or (f"left {left}" if left else "")


def without_elements(device, folder):
    """A tensor on the meta device is refused by name."""
    try:
        tessera.torch.save({"weight": torch.ones(3, device="meta")}, folder / "meta")
        return "the save did not fail"
    except dcp.api.CheckpointException as error:
        return "" if "save 'weight': the tensor is on the meta device" in str(error.failures) else str(error)


def missing(device, folder):
    """A load that fails for what the checkpoint lacks has changed nothing."""
    tessera.torch.save({"on_cpu": torch.ones(50, 3), "weight": torch.ones(3000, device=device)}, folder / "missing")
    state = {"on_cpu": torch.zeros(50, 3), "weight": torch.zeros(3000, device=device), "more": torch.zeros(2, device=device)}
    try:
        tessera.torch.load(state, folder / "missing")
        return "the load did not fail"
    except dcp.api.CheckpointException as error:
        if "the checkpoint has no 'more'" not in str(error.failures):
            return str(error)
    return "" if not any(value.any() for value in state.values()) else "the load has changed the state"


def targets(device, folder):
    """What cannot hold the loaded elements is refused by name; a conjugate view gets the saved values."""
    saved = torch.complex(torch.arange(150.0), torch.ones(150))
    tessera.torch.save({"weight": saved}, folder / "targets")
    expanded = torch.zeros((), dtype=saved.dtype).expand(150)
    try:
        tessera.torch.load({"weight": expanded}, folder / "targets")
        return "the load to an expanded tensor did not fail"
    except dcp.api.CheckpointException as error:
        if "expected separate memory for each element" not in str(error.failures):
            return str(error)
    view = torch.zeros(150, dtype=saved.dtype).conj()
    tessera.torch.load({"weight": view}, folder / "targets")
    return "" if view.resolve_conj().eq(saved).all() else "the conjugate view has other values"


def in_order(device, folder):
    """A save reads what the current stream computes, though it has not yet."""
    module = torch.get_device_module(device)
    weight = torch.zeros(1 << 20, device=device)
    with module.stream(module.Stream()):
        module._sleep(200_000_000)
        weight.fill_(4)
        tessera.torch.save({"weight": weight}, folder / "ordered")
        found = {"weight": torch.zeros(1 << 20, device=device)}
        tessera.torch.load(found, folder / "ordered")
        return "" if found["weight"].eq(4).all() else "the save read what was there before"


CHECKS = {
    "a state is saved and loaded": save_and_load,
    "an asynchronous save has the values at its call": save_later,
    "new tensors are not on the default device": elsewhere_by_default,
    "the pinned memory is bounded": bounded,
    "an error of the device is that of the save": failing,
    "tensors without elements are refused": without_elements,
    "a load that lacks a tensor changes nothing": missing,
    "tensors that cannot hold the elements are refused": targets,
}


def checks(device, folder, more=()):
    """For each check its name and why it failed, or nothing."""
    for name, check in {**CHECKS, **dict(more)}.items():
        try:
            yield name, check(device, folder)
        except BaseException:  # CheckpointException is no Exception
            yield name, traceback.format_exc()[-1500:]


def checks_without_device(folder):
    # All but "on_cpu" is taken for elements of a device.
    with replaced(Lane=HostLane, is_on_host=lambda tensor: tensor.numel() == 150):
        return list(checks("cpu", folder))


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, why in checks(sys.argv[1], pathlib.Path(folder), {"a save comes after the current stream": in_order}):
            print(f"{'FAILED' if why else 'passed'}: {name}{why and ': '}{why}", flush=True)
            failed += bool(why)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
