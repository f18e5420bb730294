#!/usr/bin/env python3
"""Exchanges checkpoints with torch_checkpointing, of which a checkout must be given. Runs under each PyTorch's Python.

    exchange.py make PACKAGE FOLDER [--seed N]
    exchange.py check PACKAGE CHECKPOINT MANIFEST RANKS

PACKAGE is the folder that contains the package torch_checkpointing (0.1.0 of github.com/meta-pytorch/torch_checkpointing).

`make` has real ranks over gloo save each of CASES with CheckpointManager: FOLDER/<name>/ck is the checkpoint,
FOLDER/<name>/manifest.json what it holds, as make_checkpoints.py writes it. These are the golden checkpoints `*-tc-*`.
`check` has RANKS real ranks load a checkpoint with CheckpointManager into DTensors and plain tensors of zeros, and
compares what they make up with the manifest. Exit status 1 if anything differs.

Two things in the package need a GPU or a file system that this place lacks, and are replaced here: metadata is gathered
by all_gather_object instead of through CUDA tensors, and files are written without O_DIRECT. Neither changes a byte of
what is saved.
"""

import argparse
import datetime
import json
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _utils as tensor_utils
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from layouts import Bench, both, Pair  # noqa: E402
from values import describe, fill, manifest_of, row_major_bytes  # noqa: E402

# What the package's resharder imports is not in PyTorch 2.6.
IS_RESHARDABLE = hasattr(tensor_utils, "_compute_local_shape_and_global_offset")
PATIENCE = datetime.timedelta(seconds=60)


def manager_of(layouts, reshardable):
    """A CheckpointManager that saves at once; `layouts` has the file of some items, the others get `<item>_<rank>.pt`."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization, TorchSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(self, data, process_group=None):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, data)
        return dict(enumerate(gathered))

    DefaultMetadataManager._all_gather_pickled_data = gather
    if reshardable:
        from torch_checkpointing.default_resharder import DefaultResharder  # cannot be imported with PyTorch 2.6
    items = {}
    for key in {*layouts, *reshardable}:
        layout = None
        if key in layouts:
            of_safetensors = layouts[key].endswith(".safetensors")
            layout = LayoutInfo(layouts[key], SafetensorsSerialization() if of_safetensors else TorchSerialization())
        items[key] = ItemSpec(layout=layout, resharder=DefaultResharder() if key in reshardable else None)
    return CheckpointManager(
        CheckpointManager.Config(
            items=items,
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


def sharded(bench, name, shape, dtype, mesh, *placements):
    full = bench.make.bits(name, shape, dtype)
    return Pair(bench.dtensor(full, mesh, *placements), full)


def plain(bench, name, shape, dtype="float32"):
    full = bench.make.bits(name, shape, dtype)
    return Pair(full, full)


def of_ranks(bench, make):
    """A value that differs between ranks: what tessera reads of it has a name for each rank."""
    return Pair(make(bench.rank), {f"rank_{rank}": make(rank) for rank in range(bench.world)})


def model(bench, mesh):
    return {
        "layers.0.weight": sharded(bench, "w0", (7, 3), "float32", mesh, Shard(0)),
        "layers.0.bias": sharded(bench, "b0", (2,), "bfloat16", mesh, Shard(0)),
        "layers.1.weight": sharded(bench, "w1", (4, 6), "float16", mesh, Shard(1)),
        "norm": sharded(bench, "norm", (3,), "float64", mesh, Replicate()),
        "mask": plain(bench, "mask", (2, 2), "bool"),
        "count": plain(bench, "count", (), "int64"),
    }


def optimizer(bench, mesh):
    return {
        "state": {
            "layers.0.weight": {
                "exp_avg": sharded(bench, "a0", (7, 3), "float32", mesh, Shard(0)),
                "step": plain(bench, "s0", ()),
            }
        },
        "param_groups": [{"lr": 0.25, "betas": (0.9, 0.98), "param_names": ["layers.0.weight"]}],
    }


def fsdp(bench):
    mesh = bench.mesh(bench.world)
    return {
        "model": model(bench, mesh),
        "optimizer": optimizer(bench, mesh),
        "step": 12,
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.5], "base": None},
        "rng": of_ranks(bench, lambda rank: bench.make.bits(f"rng{rank}", (5,), "uint8")),
        "dataloader": {"epoch": 1, "position": of_ranks(bench, lambda rank: [rank, "ab"])},
    }


def mesh2d(bench):
    mesh = bench.mesh(2, 2)
    weights = {
        "shard_shard": sharded(bench, "ss", (5, 4), "float32", mesh, Shard(0), Shard(1)),
        "shard_shard_same": sharded(bench, "s0s0", (9, 2), "int32", mesh, Shard(0), Shard(0)),
        "replicate_shard": sharded(bench, "rs", (3, 4), "bfloat16", mesh, Replicate(), Shard(1)),
        "shard_replicate": sharded(bench, "sr", (6,), "complex64", mesh, Shard(0), Replicate()),
        "strided": sharded(bench, "st", (8, 2), "float32", mesh, _StridedShard(0, split_factor=2), Shard(0)),
        "nested": [{"x": sharded(bench, "nx", (2, 2), "uint8", mesh, Shard(1), Replicate())}, {"y": 5}],
    }
    return {"model": weights}


def parts(bench):
    mesh = bench.mesh(bench.world)
    return {
        "model": {
            "a": sharded(bench, "a", (5, 2), "float32", mesh, Shard(0)),
            "block": {"b": sharded(bench, "b", (2, 7), "bfloat16", mesh, Shard(1))},
            "c": plain(bench, "c", (3,), "int64"),
        },
        "step": 4,
    }


class Case:
    def __init__(self, ranks, state, reshardable, **layouts):
        self.ranks, self.state, self.reshardable, self.layouts = ranks, state, reshardable, layouts


CASES = {
    "tc-fsdp": Case(3, fsdp, ("model", "optimizer")),
    "tc-mesh": Case(4, mesh2d, ("model",)),
    "tc-local": Case(2, fsdp, ()),  # no resharder, and so no metadata.pkl
    "tc-one": Case(1, parts, ("model",)),
    "tc-files": Case(2, parts, ("model",), model="weights/of_{rank}.safetensors"),
}


def start(rank, world, rendezvous, package):
    sys.path.insert(0, package)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=PATIENCE)


def save_all(rank, world, rendezvous, package, root, seed, names):
    start(rank, world, rendezvous, package)
    bench = Bench(rank, world, seed)
    for name in names:
        case = CASES[name]
        saved, full = both(case.state(bench))
        manager_of(case.layouts, case.reshardable).save(str(root / name / "ck"), saved)
        dist.barrier()
        if rank == 0:
            facts = {"name": name, "kind": "torch_checkpointing", "torch": torch.__version__, "seed": seed, "ranks": world}
            facts["paths"] = {name: list(path) for name, path in flatten_state_dict(full)[1].items()}
            text = json.dumps(facts | manifest_of(full), indent=1, sort_keys=True)
            (root / name / "manifest.json").write_text(text + "\n")
    dist.barrier()
    os._exit(0)


def insert(state, path, value):
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def load_and_compare(rank, world, rendezvous, package, checkpoint, manifest, failures):
    start(rank, world, rendezvous, package)
    mesh = init_device_mesh("cpu", (world,))
    bench = Bench(rank, world, 0)
    expected = manifest["tensors"]
    into, leaves = {}, {}
    for name, facts in expected.items():
        path = manifest["paths"][name]
        size, dtype = facts["shape"], getattr(torch, facts["dtype"])
        full = torch.empty(size, dtype=dtype)
        fill(full, bytes(full.numel() * full.element_size()))
        leaf = full
        if len(size) and name.startswith("model."):
            leaf = bench.dtensor(full, mesh, Shard(len(size) - 1))
        insert(into, path, leaf)
        leaves[name] = leaf
    manager_of({}, [key for key in into if isinstance(into[key], dict)]).load(str(checkpoint), into)
    mine = {}
    for name, leaf in leaves.items():
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        offsets = compute_local_shape_and_global_offset(leaf.shape, mesh, leaf.placements)[1] if isinstance(leaf, DTensor) else [0] * leaf.dim()
        mine[name] = (list(offsets), list(local.shape), row_major_bytes(local))
    gathered = [None] * world
    dist.all_gather_object(gathered, mine)
    wrong = []
    if rank == 0:
        for name, facts in expected.items():
            full = torch.empty(facts["shape"], dtype=getattr(torch, facts["dtype"]))
            for of_rank in gathered:
                offsets, sizes, data = of_rank[name]
                target = full
                for dim, (offset, size) in enumerate(zip(offsets, sizes)):
                    target = target.narrow(dim, min(offset, full.shape[dim]), size)
                target.copy_(fill(torch.empty(sizes, dtype=full.dtype), data))
            if describe(full) != facts:
                wrong.append(f"{name}: found {describe(full)}, expected {facts}")
        pathlib.Path(failures).write_text(json.dumps(wrong))
    dist.barrier()
    os._exit(0)


def run(world, function, *arguments):
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(function, args=(world, f"{meeting}/rendezvous", *arguments), nprocs=world, start_method="fork")


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("package")
    make.add_argument("folder", type=pathlib.Path)
    make.add_argument("--seed", type=int, default=1)
    check = commands.add_parser("check")
    check.add_argument("package")
    check.add_argument("checkpoint", type=pathlib.Path)
    check.add_argument("manifest", type=pathlib.Path)
    check.add_argument("ranks", type=int)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.command == "make":
        for name, case in CASES.items():
            if case.reshardable and not IS_RESHARDABLE:
                continue
            (options.folder / name).mkdir(parents=True)
            run(case.ranks, save_all, options.package, options.folder, options.seed, [name])
        return 0
    manifest = json.loads(options.manifest.read_text())
    with tempfile.NamedTemporaryFile() as failures:
        run(options.ranks, load_and_compare, options.package, options.checkpoint, manifest, failures.name)
        wrong = json.loads(pathlib.Path(failures.name).read_text())
    print("\n".join(wrong) or f"{len(manifest['tensors'])} tensors are the same on {options.ranks} ranks")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
