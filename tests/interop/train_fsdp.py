#!/usr/bin/env python3
"""Trains a small network under PyTorch's FullyShardedDataParallel, as train_fsdp.cpp does under tessera's.

    train_fsdp.py --ranks N --steps A B --losses FILE [--load DIR] [--save DIR] ...
    train_fsdp.py --network mlp --tp M ...    tensor parallel too, on a mesh of N / M by M ranks
    train_fsdp.py --plain ...        one process that sees all ranks' batches, with nothing sharded
    train_fsdp.py --runs < RUNS      one such run for each line, a JSON list of arguments: starting PyTorch takes seconds

Runs steps A + 1 to B. If A > 0, it resumes from the checkpoint --load. --save writes one, {"model", "optim"},
by torch.distributed.checkpoint, each rank its shards. Rank 0 writes FILE: {"losses": one for each step, of all
ranks and micro-batches together, "norms": of the gradients before clipping, with --clip}.
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
import torch._dynamo  # here once, or each forked rank imports it with its first optimizer: half a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS = 24  # of a micro-batch, of all ranks together
FEATURES, WIDTH, OUTPUTS, MLP_WIDTH, MLP_HIDDEN = 5, 13, 3, 16, 24


def numbers(count, step):
    """Those that both languages make alike."""
    return (torch.arange(1, count + 1, dtype=torch.float64) * step).sin()


def fill(module, scale):
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(parameter.numel(), 0.1 * (i + 2)).view_as(parameter) * scale)


class Block(nn.Module):
    """Has odd sizes, so that shards split the parameters."""

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
        fill(self, 0.5)
        self.scale.copy_(numbers(WIDTH, 0.3) + 1.5)

    def forward(self, x):
        x = self.twice(torch.tanh(self.stem(x)))
        x = self.twice(self.tower(x))
        return self.head(self.norm(x * self.scale))


class ParallelBlock(nn.Module):
    """Can be tensor parallel, which takes sizes that the mesh divides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(MLP_WIDTH)
        self.up = nn.Linear(MLP_WIDTH, MLP_HIDDEN)
        self.down = nn.Linear(MLP_HIDDEN, MLP_WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, MLP_WIDTH)
        self.first = ParallelBlock()
        self.second = ParallelBlock()
        self.head = nn.Linear(MLP_WIDTH, OUTPUTS)
        fill(self, 0.2)

    def forward(self, x):
        return self.head(self.second(self.first(torch.tanh(self.stem(x)))))


def parallelize(network, mesh):
    for block in (network.first, network.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_each(network, mesh):
    """By fully_shard, each parameter by itself."""
    from torch.distributed.fsdp import fully_shard  # which isn't there before 2.6

    for block in (network.first, network.second):
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def shard(network, mesh, options):
    if options.engine == "fully_shard":
        return shard_each(network, mesh)
    mixed = None
    if options.mixed == "bf16":
        mixed = MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32 if options.reduce_float32 else None,
            buffer_dtype=torch.bfloat16,
            keep_low_precision_grads=bool(options.keep_low_precision),
        )
    # Over a mesh, so that state dicts have DTensors: PyTorch's can't have a ShardedTensor of which a rank has nothing. But
    # local states are refused over a mesh.
    return FullyShardedDataParallel(
        network,
        device_mesh=None if options.state == "local" else mesh,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        auto_wrap_policy=ModuleWrapPolicy({Block, Tower, ParallelBlock}),
        mixed_precision=mixed,
        use_orig_params=bool(options.orig_params),
        device_id=torch.device("cpu"),
    )


def make_optimizer(name, parameters):
    if name == "stateless":
        return torch.optim.SGD(parameters, lr=0.05)
    if name == "adamw":  # whose steps of elements that have hardly a gradient would be those of rounding errors, without eps
        return torch.optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1, amsgrad=True)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def load(model, optimizer, source, kind):
    if kind == "local":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = {"model": model.state_dict()}
            dcp.load(state, storage_reader=dcp.FileSystemReader(source))
            model.load_state_dict(state["model"])
        return
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(source))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def save(model, optimizer, destination, kind):
    if kind == "local":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = {"model": model.state_dict()}
    else:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(destination))


def clip(model, options):
    if options.plain:
        return nn.utils.clip_grad_norm_(model.parameters(), options.clip).item()
    return model.clip_grad_norm_(options.clip).item()


def model_of(options):
    """And the ranks that see different batches, of which this one is the i-th."""
    network = Mlp() if options.network == "mlp" else Network()
    if options.freeze:
        network.tower.wide.first.weight.requires_grad_(False)
    if options.plain:
        return network, 1, 0
    if options.tp == 1:
        mesh = init_device_mesh("cpu", (options.ranks,))
        return shard(network, mesh, options), options.ranks, mesh.get_local_rank()
    mesh = init_device_mesh("cpu", (options.ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    parallelize(network, mesh["tp"])
    parts, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
    # PyTorch's FullyShardedDataParallel of one rank takes no DTensors.
    return (network if parts == 1 else shard(network, mesh["dp"], options)), parts, part


def train(rank, options):
    model, parts, part = model_of(options)
    optimizer = make_optimizer(options.optimizer, model.parameters())
    first, last = options.steps
    if first > 0:
        load(model, optimizer, options.load, options.state)
    losses, norms = [], []
    for step in range(first + 1, last + 1):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(options.accumulate):
            batch = numbers(ROWS * FEATURES, 0.37 * step + 0.11 * micro).view(ROWS, FEATURES).float()
            mine = batch.tensor_split(parts)[part]

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
            total /= options.tp  # the ranks that saw the same batch
        losses.append(total.item() / parts)
    if options.save:
        save(model, optimizer, options.save, options.state)
    if rank == 0:
        with open(options.losses, "w", encoding="utf-8") as file:
            json.dump({"losses": losses, "norms": norms}, file)


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--network", choices=["tower", "mlp"], default="tower")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks; with --network mlp")
    parser.add_argument("--engine", choices=["fsdp", "fully_shard"], default="fsdp", help="the second with --network mlp")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--strategy", choices=["full_shard", "shard_grad_op", "no_shard"], default="full_shard")
    parser.add_argument("--orig-params", type=int, choices=[0, 1], default=1)
    parser.add_argument("--freeze", type=int, choices=[0, 1], default=0, help="one parameter; takes --orig-params 1")
    parser.add_argument("--mixed", choices=["none", "bf16"], default="none")
    parser.add_argument("--reduce-float32", type=int, choices=[0, 1], default=0, help="with --mixed bf16")
    parser.add_argument("--keep-low-precision", type=int, choices=[0, 1], default=0)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--sync-each", type=int, choices=[0, 1], default=0, help="communicate after each of them")
    parser.add_argument("--optimizer", choices=["sgd", "adamw", "stateless"], default="adamw")
    parser.add_argument("--state", choices=["sharded", "local"], default="sharded", help="the second without the optimizer's")
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
        train(rank, options)
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
