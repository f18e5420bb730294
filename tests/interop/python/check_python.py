#!/usr/bin/env python3
"""Saves and loads states by the package tessera within PyTorch, beside PyTorch's own dcp.save and dcp.load.

    check_python.py FOLDER SEED [KILLS]

Kills that many saves at random instants: PyTorch then loads the old state or the new one. For each layout of make_checkpoints.py: both save it, and the
checkpoints are the same state, as is that of an asynchronous save; then fewer or more ranks load
each checkpoint with each, and all have the same bits. Prints a line of JSON for each check.
"""

import datetime
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import devices
import layouts
import tessera
import tessera.torch
from make_checkpoints import CASES, quiet
from values import flatten_state_dict, row_major_bytes

# Layout: the ranks that save it, and those that load it.
LAYOUTS = {
    "fsdp": (4, [3, 1]), "fsdp1": (2, [3]), "fsdp2": (4, [2, 3]), "mesh2d": (4, [2]), "sharded": (3, [2]), "dtypes": (2, [3]),
    "new-dtypes": (3, [2]), "objects": (1, [2]), "optimizer": (2, [1]), "strided": (1, []), "unflattened": (2, [2]), "stages": (3, [3]),
}  # fmt: skip


def layout_of(name, bench):
    return CASES[name].layout(bench)[0]


def planners(flatten):
    options = {"flatten_state_dict": flatten, "flatten_sharded_tensors": flatten}
    return tessera.torch.SavePlanner(**options), tessera.torch.LoadPlanner(**options)


def local_tensors(value):
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, torch.Tensor) else None


def paths_of(state, flatten):
    """The path to each value of the state, by its name in a checkpoint."""
    return flatten_state_dict(state)[1] if flatten else {name: (name,) for name in state}


def key_in(container, key):
    """PyTorch's paths have the keys of dicts as text."""
    if isinstance(container, dict) and key not in container:
        return next(found for found in container if str(found) == key)
    return key


def at(state, path):
    for key in path:
        state = state[key_in(state, key)]
    return state


def emptied(state, paths):
    """The state with zeros in its tensors, and another value in place of its objects."""
    for path in paths.values():
        tensors = local_tensors(at(state, path))
        if tensors is None:
            container = at(state, path[:-1])
            container[key_in(container, path[-1])] = "not loaded"
            continue
        for tensor in tensors:
            zeros = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
            with torch.no_grad():
                tensor.detach().copy_(zeros.view(tensor.dtype).reshape(tensor.shape))
    return state


def shown(state, paths):
    """The bits of the tensors of a state, and its objects as text."""
    found = {}
    for name, path in paths.items():
        value = at(state, path)
        tensors = local_tensors(value)
        found[name] = repr(value) if tensors is None else [row_major_bytes(tensor) for tensor in tensors]
    return found


def difference(a, b):
    for name in a.keys() | b.keys():
        if a.get(name) != b.get(name):
            return f"'{name}': {str(a.get(name))[:200]} and {str(b.get(name))[:200]}"
    return ""


def on_ranks(world, work, *arguments):
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(one_rank, args=(world, f"{meeting}/rendezvous", work, *arguments), nprocs=world, start_method="fork")


def one_rank(rank, world, rendezvous, work, *arguments):
    quiet()
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=patience)
    work(rank, world, *arguments)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # destroy_process_group of 2.6 can wait for ever for a rank that has left


def tell(rank, row, what, why):
    """Prints a check that all ranks made; `why` is empty where it is good."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why)
    reasons = [f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason]
    if rank == 0:
        print(json.dumps({"row": f"python {row}", "what": what, "ok": not reasons, "why": "; ".join(reasons)}), flush=True)


def attempt(work):
    try:
        return work() or ""
    except (Exception, dcp.api.CheckpointException):  # which is no Exception
        return traceback.format_exc()[-1500:]


def save_both(rank, world, name, folder, seed):
    flatten = CASES[name].flatten

    def ours():
        state = layout_of(name, layouts.Bench(rank, world, seed))
        dcp.save(state, checkpoint_id=folder / "ours", storage_writer=tessera.torch.Writer(), planner=planners(flatten)[0])

    def theirs():
        state = layout_of(name, layouts.Bench(rank, world, seed))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "theirs"), planner=dcp.DefaultSavePlanner(flatten, flatten))

    def later():
        """Changes the state as soon as async_save has returned."""
        state = layout_of(name, layouts.Bench(rank, world, seed))
        writer, planner = tessera.torch.Writer(threads=2), planners(flatten)[0]
        future = dcp.async_save(state, checkpoint_id=folder / "later", storage_writer=writer, planner=planner)
        for path in paths_of(state, flatten).values():
            for tensor in local_tensors(at(state, path)) or []:
                if tensor.numel():
                    tensor.untyped_storage().fill_(0)
        future.result()

    def compare(saved):
        if rank != 0:
            return ""
        verified, found = tessera.verify(folder / saved), tessera.diff(folder / "theirs", folder / saved)
        with tessera.open(folder / saved) as a, tessera.open(folder / "theirs") as b:
            names = "" if set(a) | set(a.objects) == set(b) | set(b.objects) else "the names differ"
        return "" if verified and found and not names else f"{names} {verified.problems[:3]} {found.differences[:3]}"

    tell(rank, name, f"{world} ranks save", attempt(ours) or attempt(theirs))
    tell(rank, name, f"{world} ranks save the same state", attempt(lambda: compare("ours")))
    tell(rank, name, f"{world} ranks save a state that changes meanwhile", attempt(later) or attempt(lambda: compare("later")))


def load_both(rank, world, name, folder, seed):
    flatten = CASES[name].flatten
    expected = {}
    for saver in ("theirs", "ours"):
        for loader in ("theirs", "ours"):

            def load():
                state = layout_of(name, layouts.Bench(rank, world, seed))
                paths = paths_of(state, flatten)
                emptied(state, paths)
                if loader == "ours":
                    reader = tessera.torch.Reader(unpickle=True)
                    dcp.load(state, checkpoint_id=folder / saver, storage_reader=reader, planner=planners(flatten)[1])
                else:
                    planner = dcp.DefaultLoadPlanner(flatten, flatten)
                    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / saver), planner=planner)
                found = shown(state, paths)
                return difference(expected.setdefault("state", found), found)

            tell(rank, name, f"{world} ranks load what {saver} saved by {loader}", attempt(load))


def save_again(rank, world, folder, seed):
    """A save replaces a checkpoint, an asynchronous one too; foreign planners and failing ranks are named."""
    path = folder / "again"

    def state(step):
        made = layout_of("fsdp", layouts.Bench(rank, world, seed))
        made["step"] = step
        return made

    def expect(step):
        target = state(0)
        paths = paths_of(target, True)
        tessera.torch.load(emptied(target, paths), path)
        return difference(shown(state(step), paths), shown(target, paths))

    def replaced():
        tessera.torch.save(state(1), path)
        tessera.torch.save(state(2), path, files_per_rank=3)
        return expect(2)

    def asynchronous():
        changed = state(3)
        future = tessera.torch.async_save(changed, path)
        future.result() if not hasattr(future, "upload_completion") else future.upload_completion.result()
        return expect(3)

    def refused(text, call):
        try:
            call()
        except (Exception, dcp.api.CheckpointException) as error:
            return "" if text in str(error) + str(getattr(error, "failures", "")) else str(error)
        return "was not refused"

    def foreign():
        ours, theirs = tessera.torch, dcp
        calls = [
            lambda: theirs.save(state(4), storage_writer=ours.Writer(path)),
            lambda: theirs.save(state(4), checkpoint_id=folder / "foreign", planner=ours.SavePlanner()),
            lambda: theirs.load(state(4), storage_reader=ours.Reader(path)),
        ]
        texts = ["planner=tessera.torch.SavePlanner()", "storage_writer=tessera.torch.Writer()", "planner=tessera.torch.LoadPlanner()"]
        return "".join(refused(text, call) for text, call in zip(texts, calls, strict=True)) + expect(3)

    def failing():
        class Failing:
            def __reduce__(self):
                raise RuntimeError("cannot be pickled")

        broken = state(5)
        if rank == world - 1:
            broken["of_this_rank"] = Failing()
        why = refused("cannot be pickled", lambda: tessera.torch.save(broken, path))
        dist.barrier()
        left = tessera.verify(path).left_over if rank == 0 else []
        kept = tessera.torch.save(broken, path, on_error="warn", retries=1)
        return why or (f"left {left}" if left else "") or ("" if kept is None else "a failed save returned") or expect(3)

    def missing():
        wanted = state(6)
        wanted["more"] = {"weight": torch.zeros(2)}
        why = refused("the checkpoint has no 'more.weight'", lambda: tessera.torch.load(wanted, path))
        tessera.torch.load(wanted, path, allow_partial_load=True)
        del wanted["more"]
        wrong = state(7)
        wrong["model"]["rotary.inv_freq"] = torch.zeros(7)
        return why or refused("has shape [6], expected [7]", lambda: tessera.torch.load(wrong, path))

    def lost():
        """An error of the connection after the commit."""
        real = dcp.save

        def save_and_lose(*arguments, **options):
            real(*arguments, **options)
            raise RuntimeError("connection lost")

        dcp.save = save_and_lose
        try:
            why = refused("connection lost", lambda: tessera.torch.save(state(8), path, on_error="warn"))
        finally:
            dcp.save = real
        dist.barrier()
        return why or expect(8)

    def interrupted():
        """A signal of the coordinator alone during the commit, whose handler raises."""
        commit = tessera.torch.functions.save_commit

        def commit_and_raise(*arguments):
            commit(*arguments)
            raise KeyboardInterrupt

        tessera.torch.functions.save_commit = commit_and_raise
        try:
            why = refused("KeyboardInterrupt", lambda: tessera.torch.save(state(9), path, on_error="warn", retries=2))
        finally:
            tessera.torch.functions.save_commit = commit
        dist.barrier()
        return why or expect(9)

    for what, check in [
        ("a save replaces a checkpoint", replaced),
        ("an asynchronous save", asynchronous),
        ("foreign planners are refused", foreign),
        ("a rank that fails is named, and nothing is left", failing),
        ("what the checkpoint lacks is named", missing),
        ("after a lost connection, what was committed stays", lost),
        ("after an interrupted commit, what was committed stays", interrupted),
    ]:
        tell(rank, "saves", what, attempt(check))


KILLED_RANKS = 2
KILLED_TENSORS = 24
ENOUGH_KILLS = 100


def killed_state(rank, world, value):
    mesh = layouts.init_device_mesh("cpu", (world,))
    return {f"w{i}": layouts.Bench(rank, world, 0).dtensor(torch.full((64, 999 + i), value), mesh, layouts.Shard(0)) for i in range(KILLED_TENSORS)}


def save_when_told(rank, world, place, value, begins):
    state = killed_state(rank, world, value)
    dist.barrier()
    os.write(begins, b"x")
    tessera.torch.save(state, place)
    os.write(begins, b"x")


def wait_for_ranks(ends):
    """Waits until each rank has written a byte."""
    for _ in range(KILLED_RANKS):
        os.read(ends, 1)


def start_save(meeting, place, value):
    """Starts ranks that save. Returns their processes, and what they write a byte to before and after the save."""
    ends, begins = os.pipe()
    arguments = (KILLED_RANKS, f"{meeting}/{place.name}", save_when_told, place, value, begins)
    context = mp.start_processes(one_rank, args=arguments, nprocs=KILLED_RANKS, start_method="fork", join=False)
    os.close(begins)
    wait_for_ranks(ends)
    return context.processes, ends


def value_at(place):
    """The value that all elements of a checkpoint have, as PyTorch loads it."""
    state = {f"w{i}": torch.zeros(64, 999 + i) for i in range(KILLED_TENSORS)}
    dcp.load(state, checkpoint_id=place)
    values = {value.item() for tensor in state.values() for value in (tensor.min(), tensor.max())}
    return values.pop() if len(values) == 1 else values


def kill_saves(folder, seed, kills):
    folder.mkdir()
    instants, found = random.Random(seed), {1.0: 0, 2.0: 0}
    with tempfile.TemporaryDirectory() as meeting:
        processes, ends = start_save(meeting, folder / "old", 1.0)
        began = time.monotonic()
        wait_for_ranks(ends)
        duration = time.monotonic() - began
        for process in processes:
            process.join()
        for i in range(kills):
            place = folder / str(i)
            shutil.copytree(folder / "old", place)
            processes, ends = start_save(meeting, place, 2.0)
            time.sleep(instants.uniform(0, 1.5 * duration))
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
            for process in processes:
                process.join()
            os.close(ends)
            value, verified = value_at(place), tessera.verify(place)
            good = value in found and verified.good
            if good:
                found[value] += 1
            why = "" if good else f"all elements are {value}, expected 1 or 2; {verified.problems[:3]}"
            print(json.dumps({"row": "python kills", "what": f"kill {i}", "ok": good, "why": why}), flush=True)
            shutil.rmtree(place)
    if kills >= ENOUGH_KILLS:  # fewer may all be on one side of the commit
        what = "some kept the old state and some got the new one"
        print(json.dumps({"row": "python kills", "what": what, "ok": all(found.values()), "why": str(found)}))


def main():
    folder, seed, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    quiet()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, (savers, loaders) in LAYOUTS.items():
        if not CASES[name].needs:
            continue
        place = folder / name
        place.mkdir(parents=True)
        on_ranks(savers, save_both, name, place, seed)
        for world in loaders:
            on_ranks(world, load_both, name, place, seed)
    on_ranks(3, save_again, folder, seed)
    for what, why in devices.checks_without_device(folder):
        print(json.dumps({"row": "python devices", "what": what, "ok": not why, "why": why}), flush=True)
    if kills:
        kill_saves(folder / "killed", seed, kills)


if __name__ == "__main__":
    main()
