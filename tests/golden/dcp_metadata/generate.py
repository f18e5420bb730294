"""Writes odd-protocol<N>.metadata: everything rare that a `.metadata` can hold, in pickle protocols 2 to 5.

Run by PyTorch 2.14: python3 generate.py FOLDER
"""

import pathlib
import pickle
import sys

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor(dtype, size, chunks, **properties):
    return TensorStorageMetadata(TensorProperties(dtype=dtype, **properties), torch.Size(size), chunks)


def fields_reversed(instance):
    fields = list(instance.__dict__.items())
    instance.__dict__.clear()
    instance.__dict__.update(reversed(fields))
    return instance


def metadata():
    entries = {
        # Two ranks have nothing: their empty chunks begin at the same offsets, and share one item.
        "uneven": tensor(torch.float8_e5m2, (3, 2), [chunk((0, 0), (2, 2)), chunk((2, 0), (1, 2)), chunk((3, 0), (0, 2)),
                                                     chunk((3, 0), (0, 2))]),
        "backwards": tensor(torch.bfloat16, (4,), [chunk((3,), (1,)), chunk((2,), (1,)), chunk((0,), (2,))],
                            memory_format=torch.preserve_format),
        "images": tensor(torch.float16, (2, 3, 4, 5), [chunk((0, 0, 0, 0), (2, 3, 4, 5))], requires_grad=True,
                         memory_format=torch.channels_last, pin_memory=True),
        "sparse": tensor(torch.complex64, (2,), [], layout=torch.sparse_coo),
        "scalar": tensor(torch.uint16, (), [chunk((), ())]),
        "": tensor(torch.int64, (0,), [chunk((0,), (0,))]),
        "größe\n\ud800.\U0001f600": BytesStorageMetadata(),
        "nowhere": BytesStorageMetadata(),
    }
    storage = {
        MetadataIndex("backwards", (0,), 2): _StorageInfo("b/__1_0.distcp", 7, 11),
        MetadataIndex("uneven", (2, 0), 1): _StorageInfo("__0_0.distcp", 100, 10),
        MetadataIndex("uneven", (3, 0), 3): fields_reversed(_StorageInfo("__0_0.distcp", 110, 0)),
        MetadataIndex("uneven", (0, 0)): _StorageInfo("__0_0.distcp", 0, 100),
        MetadataIndex("backwards", (3,), 2): _StorageInfo("__1_0.distcp", 2**40, 2**33),
        fields_reversed(MetadataIndex("images", (0, 0, 0, 0), 0)): _StorageInfo("../x", 0, 1, ["zstd", "aes"]),
        MetadataIndex("scalar", (), 0): _StorageInfo("__1_0.distcp", 0, 5, ("zstd", "aes")),
        MetadataIndex("scalar"): _StorageInfo("stray", 1, 2),
        MetadataIndex("nowhere", (1,)): _StorageInfo("stray", 3, 4, []),
        MetadataIndex("gone", (4, 5), 6): _StorageInfo("stray", 7, 8),
        MetadataIndex("größe\n\ud800.\U0001f600"): _StorageInfo("__1_0.distcp", 5, 2, ["zstd"]),
    }
    paths = {
        "uneven": ("optim", "state", 0, "uneven"),
        "backwards": ("backwards",),
        "images": ("optim", -1),
        "gone": ("optim", 2**40, "gone"),
    }
    meta = StorageMeta(pathlib.PureWindowsPath("C:\\runs\\1"), "save", None, ["a", "b"])
    meta.future = {"of": [pathlib.PurePosixPath("storage")]}
    result = Metadata(entries, paths, storage, meta)
    del result.__dict__["version"]
    result.future = [1, 2.5, {"nested": torch.Size((1, 2))}]
    return fields_reversed(result)


if __name__ == "__main__":
    for protocol in range(2, 6):
        with open(pathlib.Path(sys.argv[1]) / f"odd-protocol{protocol}.metadata", "wb") as file:
            pickle.dump(metadata(), file, protocol)
