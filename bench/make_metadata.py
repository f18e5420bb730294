#!/usr/bin/env python3
"""Writes the `.metadata` that PyTorch 2.14 would write for RANKS x TENSORS chunks, without PyTorch.

Every tensor is sharded evenly along dimension 0, one chunk per rank, and every rank has one data file. Stand-in classes
with PyTorch's modules and names make `pickle` emit the same bytes as PyTorch's own classes.

    make_metadata.py RANKS TENSORS OUT
"""

import pickle
import sys
import types

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
ROWS, COLUMNS, ITEM_BYTES = 64, 512, 4
ARCHIVE_BYTES = 1500  # roughly what a torch.save archive adds to the bytes of a tensor


def module(name):
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]


def stand_in(module_name, name, base=object, **members):
    """A class, or a function that an instance's __reduce__ names. pickle finds it in PyTorch's module."""
    made = type(name, (base,), {"__module__": module_name, "__qualname__": name, **members})
    setattr(module(module_name), name, made)
    return made


Metadata = stand_in(METADATA, "Metadata")
TensorStorageMetadata = stand_in(METADATA, "TensorStorageMetadata")
ChunkStorageMetadata = stand_in(METADATA, "ChunkStorageMetadata")
MetadataIndex = stand_in(METADATA, "MetadataIndex")
StorageMeta = stand_in(METADATA, "StorageMeta")
StorageInfo = stand_in(FILESYSTEM, "_StorageInfo")
TensorProperties = stand_in(METADATA, "TensorProperties", __getstate__=lambda self: self.state)
get_layout = stand_in("torch.serialization", "_get_layout")
mem_format_encoding = stand_in(METADATA, "_MEM_FORMAT_ENCODING")
Size = stand_in("torch", "Size", tuple, __reduce__=lambda self: (Size, (tuple(self),)))
Layout = stand_in("torch", "layout", __reduce__=lambda self: (get_layout, ("torch.strided",)))
MemoryFormat = stand_in(METADATA, "_memory_format", __reduce__=lambda self: (mem_format_encoding, (0,)))
DType = stand_in("torch", "dtype", __reduce__=lambda self: "float32")

STRIDED, CONTIGUOUS, FLOAT32 = Layout(), MemoryFormat(), DType()
FLOAT32.__module__ = "torch"
module("torch").float32 = FLOAT32


def with_fields(cls, **fields):
    made = cls()
    made.__dict__.update(fields)
    return made


def another(text):
    """An equal string that is another object, like one received from another rank."""
    return text.encode().decode()


def tensor(ranks):
    properties = TensorProperties()
    properties.state = (FLOAT32, STRIDED, False, CONTIGUOUS, False)
    chunks = [
        with_fields(ChunkStorageMetadata, offsets=Size((rank * ROWS, 0)), sizes=Size((ROWS, COLUMNS)))
        for rank in range(ranks)
    ]
    return with_fields(TensorStorageMetadata, properties=properties, size=Size((ranks * ROWS, COLUMNS)), chunks=chunks)


def storage_of_rank(rank, names):
    path = f"__{rank}_0.distcp"
    length = ROWS * COLUMNS * ITEM_BYTES + ARCHIVE_BYTES
    for i, name in enumerate(names):
        index = with_fields(MetadataIndex, fqn=another(name), index=rank, offset=Size((rank * ROWS, 0)))
        yield index, with_fields(StorageInfo, relative_path=path, offset=i * length, length=length)


def metadata(ranks, tensors):
    names = [f"model.layers.{i}.weight" for i in range(tensors)]
    storage = {}
    for rank in range(ranks):
        storage.update(storage_of_rank(rank, names))
    meta = with_fields(
        StorageMeta, checkpoint_id="/checkpoints/step-1000", save_id="51609003-a949-4c18-bcdc-7f1831ae84f2", load_id=None,
        modules=[],
    )
    return with_fields(
        Metadata,
        state_dict_metadata={name: tensor(ranks) for name in names},
        planner_data={another(name): (name,) for name in names},
        storage_data=storage,
        storage_meta=meta,
        version="1.0.0",
    )


def main():
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} RANKS TENSORS OUT")
    with open(sys.argv[3], "wb") as out:
        pickle.dump(metadata(int(sys.argv[1]), int(sys.argv[2])), out, protocol=5)


if __name__ == "__main__":
    main()
