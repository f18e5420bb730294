#!/usr/bin/python3
"""Times the work of PyTorch's coordinator: `plan.py RANKS TENSORS`. Prints one line of JSON: {"seconds"}, from the gathered
plans of all ranks to the bytes of `.metadata`, and {"peak_bytes"}: how much the memory of the process grew, at its peak, over what it
had after rank 0's plan was made, as `tessera plan` reports it."""

import io
import json
import pickle
import resource
import sys
import time

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType


def plan_of(rank, ranks, tensors):
    items, mappings = [], {}
    rows = 8192 // ranks
    for t in range(tensors):
        name = f"model.layers.{t // 8}.block.{t % 8}.weight"
        offsets, sizes = torch.Size([rank * rows, 0]), torch.Size([rows, 8192])
        chunk = ChunkStorageMetadata(offsets, sizes)
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([8192, 8192]))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        mappings[name] = ("model", name[6:])
    return SavePlan(items, planner_data=mappings)


def gathered_plan_of(rank, ranks, tensors):
    return pickle.loads(pickle.dumps(plan_of(rank, ranks, tensors)))


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main():
    ranks, tensors = map(int, sys.argv[1:])
    plans = [gathered_plan_of(0, ranks, tensors)]
    before = resident_bytes()
    plans += [gathered_plan_of(rank, ranks, tensors) for rank in range(1, ranks)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    begin = time.perf_counter()
    plans, metadata = planner.create_global_plan(plans)
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", i * 1000, 1000)
        for rank, plan in enumerate(plans)
        for i, item in enumerate(plan.items)
    }
    stream = io.BytesIO()
    pickle.dump(metadata, stream)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak - before}))


if __name__ == "__main__":
    main()
