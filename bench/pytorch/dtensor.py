#!/usr/bin/python3
"""Times PyTorch's DTensor, with the same work as dtensor.cpp:
`dtensor.py gather|all_to_all|all_reduce|reduce_scatter BYTES REPEATS RANKS`.
Prints one line of JSON: {"seconds"}, the median, and {"side"}, see side.py."""

import json
import math
import statistics
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from pytorch_ranks import run_ranks, timed
from side import describe_side

WORKS = {
    "gather": (Shard(0), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
    "all_reduce": (Partial(), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
}


def run(work, size_bytes, repeats, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    width = int(math.sqrt(size_bytes / 4)) // (8 * ranks) * (8 * ranks)
    before, after = WORKS[work]
    tensor = DTensor.from_local(torch.ones(width // ranks if before.is_shard() else width, width), mesh, [before])
    times = [timed(lambda: tensor.redistribute(mesh, [after]).to_local()) for _ in range(repeats)]
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(times), "side": describe_side()}), flush=True)
    dist.barrier()


def main():
    work, size_bytes, repeats, ranks = sys.argv[1], *map(int, sys.argv[2:])
    run_ranks(lambda rank: run(work, size_bytes, repeats, rank, ranks), ranks)


if __name__ == "__main__":
    main()
