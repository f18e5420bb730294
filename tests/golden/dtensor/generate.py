#!/usr/bin/env python3
"""Writes where PyTorch has the elements of DTensors to cases.json, beside this script. Deterministic; written by PyTorch
2.14. Placements are ["R"], ["S", dim], ["_S", dim, split_factor] or ["P", op].

layouts  [size, mesh_shape, placements, [[sizes, offsets] of each rank, in row-major order of coordinates]]
strided  [length, mesh_shape, placements, [indices of each rank]]: a one-dimensional tensor's elements
"""

import itertools
import json
import pathlib
import random

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
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


def main():
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
    text = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"
        for name, cases in [("layouts", layouts), ("strided", strided)]
    )
    pathlib.Path(__file__).with_name("cases.json").write_text("{" + text + "}\n", encoding="ascii")


if __name__ == "__main__":
    main()
