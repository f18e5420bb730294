#!/usr/bin/env python3
"""Writes what PyTorch says of sharding specs to cases.json, beside this script. Deterministic; written by PyTorch 2.6.

remote_devices  [text, null or [worker, rank, device, repr]]: null where PyTorch refuses the text
chunk_specs     [dim, placements, size, null or [[offsets, sizes], ...]]
shards          [size, [[offsets, sizes], ...], overlaps, is_tensor]: whether validate_non_overlapping_shards_metadata and
                check_tensor refuse them
inferred        [[[offsets, sizes, placement], ...], null or [dim, placements]]: null for an EnumerableShardingSpec
"""

import itertools
import json
import pathlib
import random

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharding_spec import _infer_sharding_spec_from_shards_metadata as infer
from torch.distributed._shard.sharding_spec._internals import check_tensor, validate_non_overlapping_shards_metadata
from torch.distributed.remote_device import _remote_device

TEXTS = """cpu|cpu:0|cuda|cuda:0|cuda:1|cuda:15|cuda:127|meta|xla:3|mps|privateuseone:2|rank:0/cpu|rank:0/cuda:1|rank:0|rank:12
rank:12/cuda|worker0/cpu|worker0|worker0/cuda:2|trainer-1_a.b/cpu|rank/cpu|rank|cuda:|cuda:01|cuda:00|cuda:-1|cuda:1a|CPU|gpu|gpu:0
/cpu|worker0/|worker0/gpu|a/b/c|rank:/cpu|rank:x/cpu|rank:-1/cpu|rank:+1|rank:1:2/cpu|ranks:0/cpu|worker:0|worker:0/cpu||/|:|rank:0/
rank:007/cpu| cpu|cpu |worker 0/cpu|rank: 1/cpu|cuda/cuda|cpu/cpu|cpu:0/cuda:1|rank:0/rank:0|rank:0/cuda:01|cuda:1:2""".replace("\n", "|")


def refused(call):
    try:
        return call()
    except Exception:  # noqa: BLE001  PyTorch's refusals are of several types
        return None


def remote_device(text):
    device = _remote_device(text)
    return [device.worker_name(), device.rank(), str(device.device()), str(device)]


def chunk_spec(dim, count, size):
    spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{i}/cpu" for i in range(count)])
    shards = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
    return [[s.shard_offsets, s.shard_sizes] for s in shards]


def is_accepted(call, *arguments):
    try:
        call(*arguments)
        return True
    except ValueError:
        return False


def cut(random_, size, depth):
    """A partition by nested cuts, empty parts included."""
    boxes = [([0] * len(size), list(size))]
    for _ in range(depth):
        offsets, sizes = boxes.pop(random_.randrange(len(boxes)))
        if not size:
            return [(offsets, sizes)]
        dim = random_.randrange(len(size))
        at = random_.randint(0, sizes[dim])
        for begin, end in ((0, at), (at, sizes[dim])):
            part_offsets, part_sizes = list(offsets), list(sizes)
            part_offsets[dim] += begin
            part_sizes[dim] = end - begin
            boxes.append((part_offsets, part_sizes))
    return boxes


def spoil(random_, boxes):
    kind = random_.randrange(6)
    box = random_.randrange(len(boxes))
    offsets, sizes = boxes[box]
    dim = random_.randrange(len(sizes)) if sizes else None
    if kind == 0 and len(boxes) > 1:
        del boxes[box]
    elif kind == 1:
        boxes.append((list(offsets), list(sizes)))
    elif kind == 2 and sizes:
        sizes[dim] += 1
    elif kind == 3 and sizes and offsets[dim] > 0:
        offsets[dim] -= 1
    elif kind == 4 and sizes:
        offsets[dim] += 1


def shards():
    random_ = random.Random(20240)
    for i in range(1500):
        size = [random_.randint(0, 6) for _ in range(random_.randint(0, 4))]
        boxes = cut(random_, size, random_.randint(0, 7))
        if i % 3:
            spoil(random_, boxes)
        random_.shuffle(boxes)
        metadata = [ShardMetadata(o, s) for o, s in boxes]
        overlaps = not is_accepted(validate_non_overlapping_shards_metadata, metadata)
        yield [size, [[o, s] for o, s in boxes], overlaps, is_accepted(check_tensor, metadata, size)]


def inferred():
    random_ = random.Random(7)
    for i in range(400):
        size = [random_.randint(1, 9) for _ in range(random_.randint(1, 3))]
        count = random_.randint(1, 6)
        if i % 2:
            boxes = [(o, s) for o, s in chunk_spec(random_.randrange(len(size)), count, size)]
        else:
            boxes = cut(random_, size, random_.randint(0, 4))
        placed = [[o, s, f"rank:{random_.randrange(8)}/cpu"] for o, s in boxes]
        random_.shuffle(placed)
        metadata = [ShardMetadata(*p) for p in placed]
        spec = refused(lambda: infer(metadata))
        if spec is None:
            continue  # they overlap
        chunked = isinstance(spec, ChunkShardingSpec)
        yield [placed, [spec.dim, [str(p) for p in spec.placements]] if chunked else None]


def main():
    sizes = [[], [0], [1], [5], [8], [3, 4], [7, 2], [0, 3], [2, 3, 4], [1, 1, 9], [2, 0, 3, 5]]
    cases = {
        "remote_devices": [[text, refused(lambda text=text: remote_device(text))] for text in TEXTS.split("|")],
        "chunk_specs": [
            [dim, count, size, refused(lambda d=dim, c=count, s=size: chunk_spec(d, c, s))]
            for size, dim, count in itertools.product(sizes, range(-3, 4), (1, 2, 3, 4, 8))
        ],
        "shards": list(shards()),
        "inferred": list(inferred()),
    }
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(c, separators=(",", ":")) for c in entries) + "\n]"
        for name, entries in cases.items()
    )
    (pathlib.Path(__file__).parent / "cases.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    main()
