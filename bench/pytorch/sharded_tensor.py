#!/usr/bin/python3
"""Times PyTorch's ShardedTensor, with the same work as sharded_tensor.cpp:
`sharded_tensor.py gather|reshard BYTES REPEATS RANKS`.
Prints one line of JSON: {"seconds"}, the median, and {"side"}, see side.py."""

import json
import math
import statistics
import sys

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from pytorch_ranks import run_ranks, timed
from side import describe_side


def run(work, size_bytes, repeats, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    width = int(math.sqrt(size_bytes / 4)) // (8 * ranks) * (8 * ranks)
    specs = [ChunkShardingSpec(dim=d, placements=[f"rank:{r}/cpu" for r in range(ranks)]) for d in (0, 1)]
    tensor = sharded_tensor.ones(specs[0], width, width)
    out = torch.ones(width, width) if rank == 0 else None
    times = []
    for i in range(repeats):
        if work == "gather":
            times.append(timed(lambda: tensor.gather(0, out)))
        else:
            times.append(timed(lambda i=i: tensor.reshard(specs[(i + 1) % 2])))
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(times), "side": describe_side()}), flush=True)
    dist.barrier()


def main():
    work, size_bytes, repeats, ranks = sys.argv[1], *map(int, sys.argv[2:])
    run_ranks(lambda rank: run(work, size_bytes, repeats, rank, ranks), ranks)


if __name__ == "__main__":
    main()
