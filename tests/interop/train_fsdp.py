#!/usr/bin/env python3
"""Trains a small network under PyTorch's FullyShardedDataParallel, as train_fsdp.cpp does under tessera's.

    train_fsdp.py --ranks N --steps A B --losses FILE [--load DIR] [--save DIR] ...
    train_fsdp.py --plain ...        one process that sees all ranks' batches, with nothing sharded
    train_fsdp.py --runs < RUNS      one such run for each line, a JSON list of arguments: to start PyTorch takes seconds

Steps A + 1 to B of the whole: where A > 0 it goes on from the checkpoint --load. --save writes one, {"model", "optim"},
by torch.distributed.checkpoint, each rank its shards. FILE is what rank 0 writes: {"losses": one for each step, of all
ranks and micro-batches together, "norms": of the gradients before they were clipped, where --clip}.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # which it reads as it is loaded

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

ROWS = 24  # of a micro-batch, of all ranks together
FEATURES, WIDTH, OUTPUTS = 5, 13, 3


def numbers(count, step):
    """Those that both languages make alike."""
    return (torch.arange(1, count + 1, dtype=torch.float64) * step).sin()


class Block(nn.Module):
    """Of odd sizes, so that shards cut through the parameters."""

    def __init__(self, hidden):
        super().__init__()
        self.first = nn.Linear(WIDTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, WIDTH)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x):
        return x + self.gain * self.second(torch.tanh(self.norm(self.first(x))))


class Tower(nn.Module):
    """Units within a unit that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.narrow = Block(7)
        self.wide = Block(29)

    def forward(self, x):
        return self.wide(self.gain * self.narrow(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.empty(WIDTH))
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.twice = Block(17)
        self.tower = Tower()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(parameter.numel(), 0.1 * (i + 2)).view_as(parameter) * 0.5)
            self.scale.copy_(numbers(WIDTH, 0.3) + 1.5)

    def forward(self, x):
        x = self.twice(torch.tanh(self.stem(x)))
        x = self.twice(self.tower(x))
        return self.head(self.norm(x * self.scale))


def shard(network, options):
    mixed = None
    if options.mixed == "bf16":
        mixed = MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32 if options.reduce_float32 else None,
            buffer_dtype=torch.bfloat16,
            keep_low_precision_grads=bool(options.keep_low_precision),
        )
    # Over a mesh, so that state dicts have DTensors: PyTorch's can't have a ShardedTensor of which a rank has nothing.
    mesh = init_device_mesh("cpu", (options.ranks,))
    return FullyShardedDataParallel(
        network,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        auto_wrap_policy=ModuleWrapPolicy({Block, Tower}),
        mixed_precision=mixed,
        use_orig_params=bool(options.orig_params),
        device_id=torch.device("cpu"),
    )


def make_optimizer(name, parameters):
    if name == "adamw":  # whose steps of elements that have hardly a gradient would be those of rounding errors, but for eps
        return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1, amsgrad=True)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def load(model, optimizer, source):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(source))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def save(model, optimizer, destination):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(destination))


def clip(model, options):
    if options.plain:
        return nn.utils.clip_grad_norm_(model.parameters(), options.clip).item()
    return model.clip_grad_norm_(options.clip).item()


def train(rank, ranks, options):
    network = Network()
    if options.freeze:
        network.tower.wide.first.weight.requires_grad_(False)
    model = network if options.plain else shard(network, options)
    optimizer = make_optimizer(options.optimizer, model.parameters())
    first, last = options.steps
    if first > 0:
        load(model, optimizer, options.load)
    losses, norms = [], []
    for step in range(first + 1, last + 1):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(options.accumulate):
            batch = numbers(ROWS * FEATURES, 0.37 * step + 0.11 * micro).view(ROWS, FEATURES).float()
            mine = batch.tensor_split(ranks)[rank]

            def backward(mine=mine, total=total):
                loss = (model(mine).float() - mine[:, :OUTPUTS] * mine[:, 1 : OUTPUTS + 1]).square().mean()
                (loss / options.accumulate).backward()
                total += loss.detach().double() / options.accumulate

            if options.plain or options.sync_each or micro == options.accumulate - 1:
                backward()
            else:
                with model.no_sync():
                    backward()
        if options.clip > 0:
            norms.append(clip(model, options))
        optimizer.step()
        if not options.plain:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if options.save:
        save(model, optimizer, options.save)
    if rank == 0:
        with open(options.losses, "w", encoding="utf-8") as file:
            json.dump({"losses": losses, "norms": norms}, file)


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--strategy", choices=["full_shard", "shard_grad_op", "no_shard"], default="full_shard")
    parser.add_argument("--orig-params", type=int, choices=[0, 1], default=1)
    parser.add_argument("--freeze", type=int, choices=[0, 1], default=0, help="one parameter; takes --orig-params 1")
    parser.add_argument("--mixed", choices=["none", "bf16"], default="none")
    parser.add_argument("--reduce-float32", type=int, choices=[0, 1], default=0, help="with --mixed bf16")
    parser.add_argument("--keep-low-precision", type=int, choices=[0, 1], default=0)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--sync-each", type=int, choices=[0, 1], default=0, help="communicate after each of them")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--steps", type=int, nargs=2, required=True)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--losses", required=True)
    return parser.parse_args(arguments)


def run_rank(rank, options, folder):
    """In a process of its own; what goes wrong is written down for `run`."""
    try:
        if not options.plain:
            store = dist.FileStore(os.path.join(folder, "store"), options.ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
        train(rank, options.ranks, options)
        if not options.plain:
            dist.barrier()
        return 0
    except BaseException:
        with open(os.path.join(folder, "errors"), "a", encoding="utf-8") as file:
            file.write(f"rank {rank}: {traceback.format_exc()}\n")
        return 1


def run(arguments):
    """Why it failed, or nothing."""
    options = options_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(options.ranks):
            pid = os.fork()
            if pid == 0:
                status = run_rank(rank, options, folder)
                sys.stdout.flush()
                os._exit(status)
            children.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        errors = os.path.join(folder, "errors")
        if os.path.exists(errors):
            with open(errors, encoding="utf-8") as file:
                return file.read()
        return f"ranks ended with {statuses}" if any(statuses) else ""


def main():
    warnings.simplefilter("ignore")
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", USE_LIBUV="0")
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--runs"]:
        for line in sys.stdin:
            print(json.dumps({"why": run(json.loads(line))}), flush=True)
        return 0
    why = run(sys.argv[1:])
    print(why, end="", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
