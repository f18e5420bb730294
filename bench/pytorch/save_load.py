#!/usr/bin/python3
"""Times PyTorch's distributed checkpoint, with the same work as save_load.cpp:
`save_load.py save|load|load_other_dim|async DIRECTORY TENSORS TENSOR_BYTES REPEATS RANKS [tessera]`, the last for
the planner, writer and reader of the package tessera, which is beside this file.
Prints one line of JSON: {"seconds"}, the median; for saves by PyTorch, that of the faster of one and two writer threads, as
{"threads"} states; and {"side"}, see side.py."""

import json
import os
import shutil
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

try:
    import tessera.torch
except ImportError:
    pass  # not asked for
from pytorch_ranks import run_ranks
from side import describe_side


def timed(work):
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def make_state(mesh, dim, tensors, tensor_bytes, ranks):
    size = [64, tensor_bytes // 4 // 64]
    local = list(size)
    local[dim] //= ranks
    model = {
        f"layer.{i}.weight": DTensor.from_local(torch.full(local, float(i)), mesh, [Shard(dim)], run_check=False)
        for i in range(tensors)
    }
    return {"model": model, "step": 1}


def run(work, directory, tensors, tensor_bytes, repeats, rank, ranks, by_tessera):
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, os.cpu_count() // ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    background = dist.new_group()  # the thread of async_save communicates while this one waits at a barrier
    path = f"{directory}/checkpoint"

    def clean():
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def save(state, threads=1):
        if by_tessera:
            return tessera.torch.save(state, path, threads=threads)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=threads))

    def load(state):
        if by_tessera:
            return tessera.torch.load(state, path)
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))

    def async_save(state):
        if by_tessera:
            return tessera.torch.async_save(state, path, process_group=background)
        return dcp.async_save(state, checkpoint_id=path, process_group=background)

    by_threads = {}
    if work in ("save", "async"):
        state = make_state(mesh, 0, tensors, tensor_bytes, ranks)
        for i in range(repeats):
            clean()
            if work == "save":
                for threads in (0,) if by_tessera else (1, 2):  # 0: as many as the package chooses
                    clean()
                    by_threads.setdefault(threads, []).append(timed(lambda: save(state, threads)))
            else:
                answers = []
                by_threads.setdefault(1, []).append(timed(lambda: answers.append(async_save(state))))
                answers[0].result()
    else:
        clean()
        save(make_state(mesh, 0, tensors, tensor_bytes, ranks))
        wanted = make_state(mesh, 0 if work == "load" else 1, tensors, tensor_bytes, ranks)
        for _ in range(repeats):
            by_threads.setdefault(1, []).append(timed(lambda: load(wanted)))
    clean()
    seconds, threads = min((statistics.median(values), threads) for threads, values in by_threads.items())
    if rank == 0:
        print(json.dumps({"seconds": seconds, "threads": threads, "side": describe_side()}), flush=True)
    dist.barrier()


def main():
    work, directory, tensors, tensor_bytes, repeats, ranks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
    by_tessera = sys.argv[7:] == ["tessera"]
    run_ranks(lambda rank: run(work, directory, tensors, tensor_bytes, repeats, rank, ranks, by_tessera), ranks)


if __name__ == "__main__":
    main()
