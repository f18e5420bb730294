#!/usr/bin/env python3
"""Writes checkpoints with the PyTorch that is installed, by real ranks over gloo, and a manifest beside each.

    make_checkpoints.py FOLDER [--seed N] [--only NAME,NAME]

FOLDER/<name>/ck (or ck.pt, ck.safetensors) is the checkpoint, FOLDER/<name>/manifest.json what it holds: dtype, shape
and CRC-32 (row-major) of each tensor, the repr of each plain value. Everything follows from the seed.
"""

import argparse
import datetime
import json
import logging
import os
import pathlib
import tempfile
import warnings

import torch
import torch._dynamo  # here once, or each forked rank imports it with its first optimizer: half a second
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import layouts
import torch_files
from values import manifest_of

try:
    from torch.distributed.checkpoint._extension import ZStandard
except ImportError:  # before PyTorch 2.7
    ZStandard = None

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# Has the HuggingFace writer, saving without collectives, and the newer dtypes.
IS_RECENT = VERSION >= (2, 9)
HAS_ZSTD = ZStandard is not None and ZStandard.is_available()


class Case:
    """A layout and the way that it is saved. single: one file for each rank and thread, else one for each item."""

    def __init__(self, ranks, layout, kind="dcp", *, writer=None, needs=True, **how):
        self.ranks, self.layout, self.kind, self.writer, self.needs = ranks, layout, kind, writer, needs
        self.single, self.threads = how.get("single", True), how.get("threads", 1)
        self.flatten, self.collectives = how.get("flatten", True), how.get("collectives", True)
        self.asynchronous, self.compressed = how.get("asynchronous", False), how.get("compressed", False)

    def save(self, state, path):
        if self.writer:
            dcp.save(state, storage_writer=self.writer(path, state))
            return
        options = {} if self.collectives else {"use_collectives": False}
        compression = {"_extensions": [ZStandard()]} if self.compressed else {}
        options["storage_writer"] = dcp.FileSystemWriter(
            path, single_file_per_rank=self.single, thread_count=self.threads, **compression
        )
        options["planner"] = dcp.DefaultSavePlanner(self.flatten, flatten_sharded_tensors=self.flatten)
        if self.asynchronous:
            dcp.async_save(state, **options).result()
        else:
            dcp.save(state, **options)


def huggingface_sharded(path, state):
    return dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, thread_count=2)


def huggingface_consolidated(path, state):
    return dcp.HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)


def huggingface_indexed(path, state):
    index = {name: 1 + i % 3 for i, name in enumerate(sorted(state))}
    return dcp.HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=index)


CASES = {
    "fsdp": Case(4, layouts.fsdp),
    "fsdp-3": Case(3, layouts.fsdp, threads=3),
    "fsdp-1": Case(1, layouts.fsdp, single=False),
    "fsdp1": Case(2, layouts.fsdp1),
    "fsdp2": Case(4, layouts.fsdp2),
    "async": Case(3, layouts.fsdp, asynchronous=True),
    "zstd": Case(3, layouts.fsdp, compressed=True, threads=2, needs=HAS_ZSTD),
    "zstd-objects": Case(1, layouts.objects, compressed=True, single=False, needs=HAS_ZSTD),
    "mesh2d": Case(4, layouts.mesh2d, threads=2),
    "sharded": Case(3, layouts.sharded, single=False),
    "sharded-2": Case(2, layouts.sharded),
    "dtypes": Case(2, layouts.dtypes),
    "new-dtypes": Case(3, layouts.new_dtypes, needs=IS_RECENT),
    "objects": Case(1, layouts.objects),
    "optimizer": Case(2, layouts.optimizer, single=False, threads=2),
    "strided": Case(1, layouts.strided),
    "unflattened": Case(2, layouts.unflattened, flatten=False),
    "stages": Case(3, layouts.stages),
    "rank-metadata": Case(3, layouts.fsdp, "dcp-ranks", collectives=False, needs=IS_RECENT),
    "rank-metadata-stages": Case(2, layouts.stages, "dcp-ranks", collectives=False, needs=IS_RECENT),
    "hf-sharded": Case(
        3, layouts.for_safetensors, "safetensors-sharded", writer=huggingface_sharded, needs=IS_RECENT
    ),
    "hf-consolidated": Case(
        2, layouts.for_consolidation, "safetensors", writer=huggingface_consolidated, needs=IS_RECENT
    ),
    "hf-indexed": Case(
        1, layouts.for_safetensors_unsharded, "safetensors", writer=huggingface_indexed, needs=IS_RECENT
    ),
}


def write_manifest(folder, name, kind, seed, path, **facts):
    manifest = {"name": name, "kind": kind, "path": path, "torch": torch.__version__, "seed": seed, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def one_rank(rank, world, rendezvous, root, seed, names):
    quiet()
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=patience)
    for name in names:
        case = CASES[name]
        bench = layouts.Bench(rank, world, seed)
        saved, full = case.layout(bench)
        case.save(saved, root / name / "ck")
        if rank == 0:
            facts = manifest_of(full, case.flatten)
            facts |= {"ranks": world, "flatten": case.flatten, "compressed": case.compressed}
            write_manifest(root / name, name, case.kind, seed, "ck", **facts)
        dist.barrier()
    os._exit(0)  # destroy_process_group of 2.6 can wait for ever for a rank that has left


def write_files(root, seed, wanted):
    for stem, value in torch_files.torch_files(seed, IS_RECENT).items():
        name = f"pt-{stem}"
        if wanted(name):
            folder = root / name
            folder.mkdir()
            torch.save(value, folder / "ck.pt")
            # A lone tensor has no name of its own, a list's items have their numbers.
            state = {"tensor": value} if isinstance(value, torch.Tensor) else value
            state = dict(enumerate(state)) if isinstance(state, list) else state
            write_manifest(folder, name, "torch", seed, "ck.pt", **manifest_of(state, file=True))
    if wanted("pt-legacy"):
        (root / "pt-legacy").mkdir()
        torch.save({"w": torch.ones(2)}, root / "pt-legacy" / "ck.pt", _use_new_zipfile_serialization=False)
        write_manifest(root / "pt-legacy", "pt-legacy", "refused", seed, "ck.pt")
    if wanted("pt-script"):
        (root / "pt-script").mkdir()
        torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(root / "pt-script" / "ck.pt")
        write_manifest(root / "pt-script", "pt-script", "refused", seed, "ck.pt")
    state = torch_files.safetensors_state(seed)
    if wanted("st-one"):
        (root / "st-one").mkdir()
        torch_files.write_one_safetensors(state, root / "st-one" / "ck.safetensors")
        write_manifest(root / "st-one", "st-one", "safetensors", seed, "ck.safetensors", **manifest_of(state, False))
    if wanted("st-index"):
        torch_files.write_sharded_safetensors(state, root / "st-index" / "ck")
        write_manifest(root / "st-index", "st-index", "safetensors", seed, "ck", **manifest_of(state, False))


def quiet():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))

    def wanted(name):
        return not only or name in only

    quiet()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    options.folder.mkdir(parents=True, exist_ok=True)
    by_ranks = {}
    for name, case in CASES.items():
        if wanted(name) and case.needs:
            (options.folder / name).mkdir()
            by_ranks.setdefault(case.ranks, []).append(name)
    for ranks, names in sorted(by_ranks.items()):
        with tempfile.TemporaryDirectory() as meeting:
            arguments = (ranks, f"{meeting}/rendezvous", options.folder, options.seed, names)
            mp.start_processes(one_rank, args=arguments, nprocs=ranks, start_method="fork")
    write_files(options.folder, options.seed, wanted)
    print(f"PyTorch {torch.__version__}: {len(list(options.folder.iterdir()))} checkpoints in {options.folder}")


if __name__ == "__main__":
    main()
