#!/usr/bin/env python3
"""Writes where PyTorch has the elements of DTensors to cases.json, beside this script. Deterministic; written by PyTorch
2.14. Placements are ["R"], ["S", dim], ["_S", dim, split_factor] or ["P", op].

layouts  [size, mesh_shape, placements, [[sizes, offsets] of each rank, in row-major order of coordinates]]
strided  [length, mesh_shape, placements, [indices of each rank]]: a one-dimensional tensor's elements
wrappers [[sizes of each shard], [offsets of each], {what a LocalShardsWrapper of them says}]; elements are 0, 1, 2 ... in
         the order of the shards; null where PyTorch throws. "gathered" is for one rank.
"""

import itertools
import json
import math
import os
import pathlib
import random

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_shape
from torch.distributed.tensor.placement_types import _StridedShard


def placement_of(text):
    kind, *rest = text
    if kind == "_S":
        return _StridedShard(rest[0], split_factor=rest[1])
    return {"R": Replicate, "S": Shard, "P": Partial}[kind](*rest)


def coordinates(mesh_shape):
    return itertools.product(*map(range, mesh_shape))


def layout(size, mesh_shape, placements):
    of = [placement_of(p) for p in placements]
    return [local_shape(tuple(size), tuple(mesh_shape), list(c), of) for c in coordinates(mesh_shape)]


def elements(length, mesh_shape, placements):
    ranks = []
    for coordinate in coordinates(mesh_shape):
        local = torch.arange(length)
        for placement, n, i in zip(map(placement_of, placements), mesh_shape, coordinate):
            if placement.is_shard() or isinstance(placement, _StridedShard):
                local = placement._split_tensor(local, n, with_padding=False)[0][i]
        ranks.append(local.tolist())
    return ranks


def refused(call):
    try:
        return call()
    except Exception:  # noqa: BLE001  PyTorch's refusals are of several types
        return None


def shards_of(sizes):
    counts = [math.prod(size) for size in sizes]
    return [torch.arange(sum(counts[:i]), sum(counts[: i + 1])).view(size) for i, size in enumerate(sizes)]


def chunks_of(wrapper):
    return [[list(chunk.offsets), list(chunk.sizes)] for chunk in wrapper.local_chunks]


def wrapper(sizes, offsets):
    def make():
        return LocalShardsWrapper(shards_of(sizes), offsets)

    def gathered():
        all_gather = LocalShardsWrapper.handle_all_gather_into_tensor
        return torch.ops._c10d_functional.wait_tensor(all_gather([make(), 1, "0"], {})).tolist()

    made = make()
    views = [list(made.size()), [*made.size()][::-1], [math.prod(made.size())]]
    return {
        "size": list(made.size()),
        "chunks": chunks_of(made),
        "is_empty_shard": refused(made.is_empty_shard),
        "bytes": made._get_tensor_size_bytes(),
        "views": [[v, refused(lambda v=v: chunks_of(make().view(v)))] for v in views],
        "gathered": refused(gathered),
        "items": [list(item.index.offset) for item in made.__create_write_items__("w", made)],
    }


def main():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29411", USE_LIBUV="0")
    dist.init_process_group("gloo", rank=0, world_size=1)
    random_ = random.Random(1)
    layouts, strided = [], []
    for _ in range(400):
        size = [random_.choice([0, 1, 2, 3, 4, 5, 7, 8, 12, 17]) for _ in range(random_.randint(1, 3))]
        mesh_shape = [random_.randint(1, 4) for _ in range(random_.randint(1, 3))]
        placements = [
            random_.choice([["R"], ["P", "sum"], ["P", "max"]] + 3 * [["S", d] for d in range(len(size))])
            for _ in mesh_shape
        ]
        layouts.append([size, mesh_shape, placements, layout(size, mesh_shape, placements)])
    for _ in range(150):
        mesh_shape = [random_.randint(1, 4) for _ in range(random_.randint(1, 3))]
        placements = [random_.choice([["R"], ["S", 0], ["_S", 0, random_.randint(2, 4)]]) for _ in mesh_shape]
        length = random_.randint(0, 40)
        strided.append([length, mesh_shape, placements, elements(length, mesh_shape, placements)])
        layouts.append([[length], mesh_shape, placements, layout([length], mesh_shape, placements)])
    wrappers = []
    for _ in range(60):
        dims, count = random_.randint(1, 3), random_.randint(0, 3)
        sizes = [[random_.randint(1, 4) for _ in range(dims)] for _ in range(count)]
        for size in sizes[1:]:
            size[:-1] = sizes[0][:-1]
        offsets = [[random_.randint(0, 9) for _ in range(dims)] for _ in sizes]
        wrappers.append([sizes, offsets, wrapper(sizes, [tuple(o) for o in offsets])])
    text = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"
        for name, cases in [("layouts", layouts), ("strided", strided), ("wrappers", wrappers)]
    )
    pathlib.Path(__file__).with_name("cases.json").write_text("{" + text + "}\n", encoding="ascii")


if __name__ == "__main__":
    main()
