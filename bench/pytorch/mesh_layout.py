#!/usr/bin/python3
"""Times PyTorch, with the same work as mesh_layout.cpp: `mesh_layout.py TENSORS`.
Prints one line of JSON: {"seconds"} and {"elements"}."""

import json
import sys
import time

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_shape
from torch.distributed.tensor.placement_types import _StridedShard

PLACEMENTS = [
    [Replicate(), Shard(0), Shard(1)],
    [Shard(0), Shard(0), Shard(1)],
    [_StridedShard(0, split_factor=16), Shard(0), Replicate()],
    [Shard(0), Shard(0), Shard(0)],
]


def main():
    tensors = int(sys.argv[1])
    elements, seconds = 0, 0.0
    for i in range(tensors):
        begin = time.perf_counter()
        sizes, _ = local_shape((1000 + i % 4096, 500 + i % 1024), (16, 16, 16), [3, 5, 7], PLACEMENTS[i % 4])
        seconds += time.perf_counter() - begin
        elements += sizes[0] * sizes[1]
    print(json.dumps({"seconds": seconds, "elements": elements}))


if __name__ == "__main__":
    main()
