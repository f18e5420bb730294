#!/usr/bin/python3
"""Times PyTorch's training and checkpoints on a device, with the same work as device.cpp:
`device.py fsdp1|fsdp2|plain|save|load|async cpu|cuda float32|bfloat16 BLOCKS WIDTH BATCH REPEATS DIRECTORY RANKS BACKEND`.

fsdp1 is FullyShardedDataParallel, fsdp2 is fully_shard, plain is the model without sharding. save, load and async are DCP's,
of the state of a model of fully_shard and its optimizer; async is the time until async_save has returned and the device has
finished. Prints one line of JSON: {"seconds"}, the median, for saves that of the faster of one and two writer threads, as
{"threads"} states; {"library"}; {"loss"} of the first step."""

import itertools
import json
import math
import shutil
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytorch_ranks import run_ranks


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))


def make_model(work, device, in_bfloat16, blocks, width, ranks):
    with device:
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.arange(parameter.numel(), device=device, dtype=torch.float32).mul(0.37).sin().div(math.sqrt(width))
            parameter.copy_(values.view(parameter.shape))
    if work == "plain":
        return model.to(torch.bfloat16) if in_bfloat16 else model
    mesh = init_device_mesh(device.type, (ranks,))
    dtype = torch.bfloat16 if in_bfloat16 else None
    if work == "fsdp1":
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=device,
            mixed_precision=MixedPrecision(param_dtype=dtype) if dtype else None,
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def run(work, kind, dtype, blocks, width, batch, repeats, directory, backend, rank, ranks):
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=ranks, **({"device_id": device} if backend == "nccl" else {}))
    background = dist.new_group(backend="gloo")  # the thread of async_save communicates while this one waits
    in_bfloat16 = dtype == "bfloat16"
    model = make_model(work, device, in_bfloat16, blocks, width, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.arange(batch * width, device=device, dtype=torch.float32).mul(0.11).cos().view(batch, width)
    if work == "plain" and in_bfloat16:
        rows = rows.to(torch.bfloat16)
    path = f"{directory}/checkpoint"

    def finish_device():
        if kind == "cuda":
            torch.cuda.synchronize()

    def finish():
        finish_device()
        dist.barrier(background)

    def timed(f):
        finish()
        begin = time.perf_counter()
        f()
        finish()
        return time.perf_counter() - begin

    def step():
        optimizer.zero_grad()
        loss = model(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def clear():
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier(background)

    def state_of():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optimizer_state}

    by_threads, losses = {}, []
    if work in ("plain", "fsdp1", "fsdp2"):
        for i in range(-3, repeats):  # the first ones warm up
            seconds = timed(lambda: losses.append(step()))
            if i >= 0:
                by_threads.setdefault(1, []).append(seconds)
    else:
        for parameter in model.parameters():  # gives the optimizer a state without a step, which Gloo may not carry
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        clear()
        if work == "load":
            dcp.save(state_of(), checkpoint_id=path)
        for i, threads in itertools.product(range(-1, repeats), (1, 2) if work == "save" else (1,)):
            state = state_of()
            if work == "load":
                seconds = timed(lambda: dcp.load(state, checkpoint_id=path))
            else:
                clear()
                if work == "save":
                    seconds = timed(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=threads)))
                else:
                    finish()
                    begin = time.perf_counter()
                    answer = dcp.async_save(state, checkpoint_id=path, process_group=background)
                    finish_device()  # alone: the thread of async_save communicates in `background`
                    seconds = time.perf_counter() - begin
                    answer.result()
            if i >= 0:
                by_threads.setdefault(threads, []).append(seconds)
        clear()
    if rank == 0:
        seconds, threads = min((statistics.median(values), threads) for threads, values in by_threads.items())
        result = {"seconds": seconds, "library": f"PyTorch {torch.__version__}"}
        if work == "save":
            result["threads"] = threads
        if losses:
            result["loss"] = losses[0].item()
        print(json.dumps(result), flush=True)
    dist.barrier(background)


def main():
    work, kind, dtype = sys.argv[1:4]
    blocks, width, batch, repeats = map(int, sys.argv[4:8])
    directory, ranks, backend = sys.argv[8], int(sys.argv[9]), sys.argv[10]
    run_ranks(lambda rank: run(work, kind, dtype, blocks, width, batch, repeats, directory, backend, rank, ranks), ranks)


if __name__ == "__main__":
    main()
