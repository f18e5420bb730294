#!/usr/bin/env python3
"""Loads checkpoints with the PyTorch that is installed and compares them with manifests.

Reads a JSON list of jobs from standard input and prints {"id", "ok", "why", "tensors"} for each, a line each. A job is
{"id", "check", "path", "manifest", ...}, the manifest being that of the state that the checkpoint must hold:

    dcp           torch.distributed.checkpoint.load into tensors and objects as its metadata has them
    dcp-to-torch  torch.distributed.checkpoint.format_utils.dcp_to_torch_save, then torch.load
    either        as dcp, and the state may be that of the manifest "other" instead
    dtensor       torch.distributed.checkpoint.load into DTensors on "ranks" real ranks, sharded in dimension "dim"
    sharded-tensor  the same into ShardedTensors
    torch         torch.load
    same-nested   torch.load, and nested as what dcp_to_torch_save makes of the checkpoint "reference" (or as the file)
    chunks        every chunk read by hand from the location that `inspect --json` (the file "inspected") reports
    safetensors   safetensors.torch, of a file or of a directory
    huggingface   torch.distributed.checkpoint.load through HuggingFaceStorageReader
    cast          floating-point tensors are those of "reference" after .to("dtype")

"exclude" names values that the checkpoint may lack.
"""

import collections
import contextlib
import functools
import json
import logging
import os
import pathlib
import sys
import tempfile
import traceback
import warnings

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from values import describe, dtype_name, fill, is_below, is_strided, manifest_of, row_major_bytes

IS_RECENT = hasattr(dcp, "HuggingFaceStorageReader")


class Mismatch(Exception):
    pass


def expect(found, expected, what):
    if found != expected:
        raise Mismatch(f"{what}: found {found}, expected {expected}")


def compare(state, manifest, exclude, flat):
    """Compares a state with a manifest; returns the number of tensors compared."""
    found = manifest_of(state, flatten=not flat, file=not flat and manifest["kind"] == "torch")
    for part in ("tensors", "plain", "opaque"):
        expected = {name: facts for name, facts in manifest[part].items() if not is_below(name, exclude)}
        actual = {name: facts for name, facts in found[part].items() if not is_below(name, exclude)}
        expect(sorted(actual), sorted(expected), f"names of {part}")
        for name in expected:
            expect(actual[name], expected[name], name)
    return len(found["tensors"])


def loadable_state(metadata):
    return {
        name: None if isinstance(entry, BytesStorageMetadata) else torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }


def check_dcp(job, manifest):
    reader = dcp.FileSystemReader(job["path"])
    state = loadable_state(reader.read_metadata())
    flatten = manifest.get("flatten", True)
    planner = dcp.DefaultLoadPlanner(flatten, flatten_sharded_tensors=flatten)
    dcp.load(state, storage_reader=reader, planner=planner)
    return compare(state, manifest, job["exclude"], flat=True)


def check_either(job, manifest):
    other = json.loads(pathlib.Path(job["other"]).read_text())
    names = dcp.FileSystemReader(job["path"]).read_metadata().state_dict_metadata.keys()
    return check_dcp(job, manifest if set(manifest["tensors"]) <= set(names) else other)


def converted_by_torch(folder):
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, f"{scratch}/ck.pt")
        return torch.load(f"{scratch}/ck.pt", weights_only=False)


def check_dcp_to_torch(job, manifest):
    return compare(converted_by_torch(job["path"]), manifest, job["exclude"], flat=False)


def load_torch(job, manifest):
    return torch.load(job["path"], weights_only=not set(manifest["full_unpickler"]) - set(job["exclude"]))


def check_torch(job, manifest):
    state = load_torch(job, manifest)
    if isinstance(state, torch.Tensor):
        state = {"tensor": state}
    if isinstance(state, list):
        state = dict(enumerate(state))
    return compare(state, manifest, job["exclude"], flat=not manifest.get("flatten", True))


def same(a, b, where="root", kinds=True):
    """Raises unless two nested values are equal in every type, key, order, element and bit.

    kinds: whether a dict and an OrderedDict differ.
    """
    if is_strided(a) and is_strided(b):
        expect(describe(a), describe(b), where)
        return 1
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        expect(str(a), str(b), where)
        return 0
    mappings = (dict, collections.OrderedDict)
    if kinds or not (type(a) in mappings and type(b) in mappings):
        expect(type(a).__name__, type(b).__name__, f"type at {where}")
    if isinstance(a, dict):
        expect(list(map(repr, a)), list(map(repr, b)), f"keys at {where}")  # 0 is not "0", nor False
        return sum(same(x, y, f"{where}[{key!r}]", kinds) for (key, x), y in zip(a.items(), b.values()))
    if isinstance(a, (list, tuple)):
        expect(len(a), len(b), f"length at {where}")
        return sum(same(x, y, f"{where}[{i}]", kinds) for i, (x, y) in enumerate(zip(a, b)))
    expect(repr(a), repr(b), where)
    return 0


def check_same_nested(job, manifest):
    reference = pathlib.Path(job["reference"])
    ours = torch.load(job["path"], weights_only=False)
    if reference.is_dir():
        return same(ours, converted_by_torch(reference))
    theirs = torch.load(reference, weights_only=False)
    if isinstance(theirs, torch.Tensor):
        theirs = {"tensor": theirs}  # a lone tensor gets a name
    return same(ours, theirs, kinds=False)


def check_chunks(job, manifest):
    path = pathlib.Path(job["path"])
    tensors = json.loads(pathlib.Path(job["inspected"]).read_text())["tensors"]
    for name, tensor in tensors.items():
        full = zeros(tensor["shape"], getattr(torch, tensor["dtype"]))
        for chunk in tensor["chunks"]:
            with (path / chunk["file"] if path.is_dir() else path).open("rb") as stream:
                stream.seek(chunk["offset_bytes"])
                data = stream.read(chunk["length_bytes"])
            expect(len(data), chunk["length_bytes"], f"bytes of a chunk of {name}")
            stored = fill(torch.empty(len(data) // full.element_size(), dtype=full.dtype), data)
            strides = chunk.get("strides", torch.empty(chunk["sizes"], device="meta").stride())
            part = stored.as_strided(chunk["sizes"], strides)
            target = full
            for dim, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"])):
                target = target.narrow(dim, offset, size)
            target.copy_(part)
        expect(describe(full), manifest["tensors"].get(name), name)
    return len(tensors)


def safetensors_files(path):
    path = pathlib.Path(path)
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        expect(named, {file.name for file in files}, "files of the index")
    return files


def is_readable(file):
    """Whether the reader that is installed knows all types in a file: it refuses the file for one that it doesn't."""
    with open(file, "rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    types = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    known = set(safetensors.torch._TYPES) | {"U16", "U32", "U64"}
    return types <= known | ({"F4", "F8_E8M0"} if IS_RECENT else set())


def check_safetensors(job, manifest):
    expected = {name: facts for name, facts in manifest["tensors"].items() if name not in job["exclude"]}
    seen, compared = set(), 0
    files = safetensors_files(job["path"])
    if not all(map(is_readable, files)):
        if IS_RECENT:
            raise Mismatch("types that this version of the reader doesn't know")
        return 0  # newer types than this version of the reader
    for file in files:
        with safetensors.safe_open(file, "pt") as content:
            for name in content.keys():
                if name in seen:
                    raise Mismatch(f"{name}: stands in two files")
                seen.add(name)
                if content.get_slice(name).get_dtype() not in safetensors.torch._TYPES:
                    continue  # this version of the reader has no such type
                found = describe(content.get_tensor(name))
                if name in expected and found["dtype"] != expected[name]["dtype"]:
                    # Stored as another type, because safetensors lacks this one: the same bytes.
                    if getattr(torch, expected[name]["dtype"], None) in safetensors.torch._TYPES.values():
                        raise Mismatch(f"{name}: found {found}, expected {expected[name]}")
                    expect(found["crc32"], expected[name]["crc32"], f"bytes of {name}")
                else:
                    expect(found, expected.get(name), name)
                compared += 1
    expect(sorted(seen), sorted(expected), "names")
    return compared


def check_huggingface(job, manifest):
    reader = dcp.HuggingFaceStorageReader(job["path"])
    state = loadable_state(reader.read_metadata())
    dcp.load(state, storage_reader=reader)
    return compare(state, {**manifest, "plain": {}, "opaque": {}}, job["exclude"], flat=True)


def check_cast(job, manifest):
    target = getattr(torch, job["dtype"])
    ours = torch.load(job["path"], weights_only=True)
    expected = torch.load(job["reference"], weights_only=True)
    expect(sorted(ours), sorted(expected), "names")
    for name, tensor in expected.items():
        cast = tensor.to(target) if tensor.is_floating_point() else tensor
        if not torch.equal(ours[name].view(torch.uint8), cast.view(torch.uint8)):
            different = (ours[name] != cast).nonzero()[:1].tolist()
            where = tuple(different[0]) if different else ()
            raise Mismatch(f"{name}{list(where)}: {tensor[where]} became {ours[name][where]}, expected {cast[where]}")
    return len(expected)


def as_dtensor(size, dtype, dim):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = Replicate() if dim is None else Shard(dim)
    local_size, _ = compute_local_shape_and_global_offset(size, mesh, [placement])
    local = zeros(local_size, dtype)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=size, stride=stride), local


def as_sharded_tensor(size, dtype, dim):
    if dim is None:
        local = zeros(size, dtype)
        return local, local
    shards, offset = [], 0
    for rank, part in enumerate(torch.empty(size[dim], device="meta").chunk(dist.get_world_size())):
        offsets, sizes = [0] * len(size), list(size)
        offsets[dim], sizes[dim] = offset, len(part)
        offset += len(part)
        if rank == dist.get_rank() and (len(part) > 0 or rank == 0):  # PyTorch takes equal empty shards to overlap
            shards.append(LocalShard(zeros(sizes, dtype), ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")))
    full = sharded_tensor.init_from_local_shards(shards, *size)
    empty = torch.empty([0 if d == dim else n for d, n in enumerate(size)], dtype=dtype)
    return full, shards[0].tensor if shards else empty


def check_on_ranks(make, job, manifest):
    """On every rank: loads into tensors that start out as zeros, and compares what their parts make up.

    make: (size, dtype, sharded dimension or None) -> (the target of the load, this rank's part of it)
    """
    reader = dcp.FileSystemReader(job["path"])
    state, parts, dims = {}, {}, {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) or name not in manifest["tensors"]:
            continue
        expect(dtype_name(entry.properties.dtype), manifest["tensors"][name]["dtype"], name)
        size = entry.size
        dims[name] = min(job["dim"], len(size) - 1) if len(size) else None
        state[name], parts[name] = make(size, entry.properties.dtype, dims[name])
    dcp.load(state, storage_reader=reader)
    mine = {name: (list(part.shape), row_major_bytes(part)) for name, part in parts.items()}
    gathered = [None] * job["ranks"] if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0)  # as bytes: not every dtype can be pickled alone
    if dist.get_rank() != 0:
        return 0
    for name, facts in manifest["tensors"].items():
        if name in job["exclude"]:
            continue
        if name not in state:
            raise Mismatch(f"{name} is missing")
        dtype = parts[name].dtype
        of_ranks = [fill(torch.empty(of_rank[name][0], dtype=dtype), of_rank[name][1]) for of_rank in gathered]
        full = of_ranks[0] if dims[name] is None else joined(of_ranks, dims[name])
        expect(describe(full), facts, name)
    return len(state)


def zeros(size, dtype):
    """torch.zeros for every dtype."""
    tensor = torch.empty(size, dtype=dtype)
    return fill(tensor, bytes(tensor.numel() * tensor.element_size()))


def joined(parts, dim):
    """torch.cat for every dtype."""
    size = list(parts[0].shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    full = torch.empty(size, dtype=parts[0].dtype)
    at = 0
    for part in parts:
        full.narrow(dim, at, part.shape[dim]).copy_(part)
        at += part.shape[dim]
    return full


CHECKS = {
    "dcp": check_dcp,
    "either": check_either,
    "dcp-to-torch": check_dcp_to_torch,
    "dtensor": functools.partial(check_on_ranks, as_dtensor),
    "sharded-tensor": functools.partial(check_on_ranks, as_sharded_tensor),
    "torch": check_torch,
    "same-nested": check_same_nested,
    "chunks": check_chunks,
    "safetensors": check_safetensors,
    "huggingface": check_huggingface,
    "cast": check_cast,
}


def run_job(job):
    answer = {"id": job["id"], "ok": True, "why": "", "tensors": 0}
    try:
        manifest = json.loads(pathlib.Path(job["manifest"]).read_text())
        job.setdefault("exclude", [])
        with contextlib.redirect_stdout(sys.stderr):
            answer["tensors"] = CHECKS[job["check"]](job, manifest)
    except Mismatch as mismatch:
        answer.update(ok=False, why=str(mismatch))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # CheckpointException is no Exception
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip().splitlines() or [""])[-1]
        answer.update(ok=False, why=f"{type(error).__name__} at {pathlib.Path(at.filename).name}:{at.lineno}: {text}")
    return answer


def run_rank(rank, ranks, rendezvous, jobs, answers):
    quiet()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    with open(f"{answers}/{rank}", "w") as stream:
        for job in jobs:
            stream.write(json.dumps(run_job(job)) + "\n")
            dist.barrier()
    os._exit(0)  # destroy_process_group of 2.6 can wait for ever for a rank that has left


def run_on_ranks(ranks, jobs):
    """Runs the jobs on real ranks; one fails if it failed on any rank."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (ranks, f"{scratch}/rendezvous", jobs, scratch)
        mp.start_processes(run_rank, args=arguments, nprocs=ranks, start_method="fork")
        lines = [pathlib.Path(scratch, str(rank)).read_text().splitlines() for rank in range(ranks)]
    for answers in zip(*lines):
        answers = [json.loads(answer) for answer in answers]
        failed = [f"rank {rank}: {a['why']}" for rank, a in enumerate(answers) if not a["ok"]]
        yield {**answers[0], "ok": not failed, "why": "; ".join(failed[:1])}


def quiet():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def main():
    quiet()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    jobs = json.load(sys.stdin)
    by_ranks = collections.defaultdict(list)
    for job in jobs:
        by_ranks[job.get("ranks", 0)].append(job)
    alone = by_ranks.pop(0, [])
    for ranks, several in sorted(by_ranks.items()):  # before this process has threads of its own
        for answer in run_on_ranks(ranks, several):
            print(json.dumps(answer), flush=True)
    for job in alone:
        print(json.dumps(run_job(job)), flush=True)


if __name__ == "__main__":
    main()
