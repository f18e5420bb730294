#!/usr/bin/python3
"""Times PyTorch's distributed checkpoint at what save_load.cpp does:
`save_load_pytorch.py save|load|load_other_dim|async DIRECTORY TENSORS TENSOR_BYTES REPEATS RANKS`.
Prints one line of JSON: {"seconds"}, the median."""

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

from pytorch_ranks import run_ranks


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


def run(work, directory, tensors, tensor_bytes, repeats, rank, ranks):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    path = f"{directory}/checkpoint"

    def clean():
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def save(state):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))

    times = []
    if work in ("save", "async"):
        state = make_state(mesh, 0, tensors, tensor_bytes, ranks)
        for i in range(repeats):
            clean()
            if work == "save":
                times.append(timed(lambda: save(state)))
            else:
                answers = []
                times.append(timed(lambda: answers.append(dcp.async_save(state, checkpoint_id=path))))
                answers[0].result()
    else:
        clean()
        save(make_state(mesh, 0, tensors, tensor_bytes, ranks))
        wanted = make_state(mesh, 0 if work == "load" else 1, tensors, tensor_bytes, ranks)
        for _ in range(repeats):
            times.append(timed(lambda: dcp.load(wanted, storage_reader=dcp.FileSystemReader(path))))
    clean()
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(times)}), flush=True)
    dist.barrier()


def main():
    work, directory, tensors, tensor_bytes, repeats, ranks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    run_ranks(lambda rank: run(work, directory, tensors, tensor_bytes, repeats, rank, ranks), ranks)


if __name__ == "__main__":
    main()
