#!/usr/bin/python3
"""Times PyTorch's planner of redistributions, with the same work as redistribution_plan.cpp: which collectives one of 1,024
ranks runs, first and again, from PyTorch's own cache. Prints one line of JSON: {CASE: {"first", "again"}}, medians in seconds."""

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CASES = {
    "gather_1d": ((1024,), (S0,), (R,)),
    "all_to_all_1d": ((1024,), (S0,), (S1,)),
    "gather_2d": ((32, 32), (S0, S1), (R, R)),
    "all_to_all_2d": ((32, 32), (S0, R), (S1, R)),
    "gather_3d": ((16, 8, 8), (S0, S0, S1), (R, R, R)),
}
REPEATS = 21


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=1024)
    times = {}
    for name, (shape, before, after) in CASES.items():
        mesh = init_device_mesh("cpu", shape)
        first, again = [], []
        for i in range(REPEATS):
            size = (8192, 8192 + i)
            meta = TensorMeta(torch.Size(size), (size[1], 1), torch.float32)
            source, target = DTensorSpec(mesh, before, tensor_meta=meta), DTensorSpec(mesh, after, tensor_meta=meta)
            for seconds in (first, again):
                begin = time.perf_counter()
                _redistribute._gen_transform_infos(source, target)
                seconds.append(time.perf_counter() - begin)
        times[name] = {"first": statistics.median(first), "again": statistics.median(again)}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
