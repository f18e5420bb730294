#!/usr/bin/python3
"""Times a training step of PyTorch's FSDP, with the same work as fsdp_step.cpp:
`fsdp_step.py fsdp1|fsdp2|plain|state_dict BLOCKS WIDTH BATCH REPEATS RANKS`.

fsdp1 is FullyShardedDataParallel, fsdp2 is fully_shard, plain is the model without sharding in one process with the batch
of a rank, state_dict is the sharded state dict of fsdp1. Prints one line of JSON: {"seconds"}, the median; {"peak_bytes"},
how much the resident memory of a rank grew, at its peak in a step, over the value before the model was made, the maximum
over the ranks, without pages of files, which belong to libraries; {"side"}, see side.py.
"""

import json
import os
import statistics
import sys
import time
import warnings

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when it is loaded; torch.set_num_threads does not affect it

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytorch_ranks import run_ranks
from side import describe_side


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


def status_bytes(field):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


files_at_forget = 0


def memory_bytes(field):
    """`field` is "VmRSS" or "VmHWM", the peak since forget_peak. Without pages of files, which the system may reclaim."""
    of_files = status_bytes("RssFile")
    return status_bytes(field) - (max(of_files, files_at_forget) if field == "VmHWM" else of_files)


def forget_peak():
    global files_at_forget
    files_at_forget = status_bytes("RssFile")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")


def make_model(work, blocks, width, ranks):
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    if work == "plain":
        return model
    mesh = init_device_mesh("cpu", (ranks,))
    if work == "fsdp2":
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def run(work, blocks, width, batch, repeats, rank, ranks):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    before = memory_bytes("VmRSS")
    model = make_model(work, blocks, width, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(batch, width)

    def step():
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    timed = step if work != "state_dict" else lambda: get_model_state_dict(model)
    times = []
    for i in range(-2, repeats):  # the first two warm up
        if i == 0:
            forget_peak()
        dist.barrier()
        begin = time.perf_counter()
        timed()
        dist.barrier()
        if i >= 0:
            times.append(time.perf_counter() - begin)
    peak = torch.tensor([memory_bytes("VmHWM") - before])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        result = {"seconds": statistics.median(times), "peak_bytes": peak.item(), "side": describe_side()}
        print(json.dumps(result), flush=True)
    dist.barrier()


def main():
    work, blocks, width, batch, repeats, ranks = sys.argv[1], *map(int, sys.argv[2:])
    ranks = 1 if work == "plain" else ranks
    run_ranks(lambda rank: run(work, blocks, width, batch, repeats, rank, ranks), ranks)


if __name__ == "__main__":
    main()
