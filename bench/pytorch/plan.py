#!/usr/bin/python3
"""Times the work of PyTorch's coordinator: `plan.py RANKS TENSORS`. Prints one line of JSON: {"seconds"}, from the gathered
plans of all ranks to the bytes of `.metadata`, and {"peak_bytes"}, the peak memory of the process."""

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


def main():
    ranks, tensors = map(int, sys.argv[1:])
    plans = [pickle.loads(pickle.dumps(plan_of(rank, ranks, tensors))) for rank in range(ranks)]
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
    print(json.dumps({"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


if __name__ == "__main__":
    main()
