"""Writes expected.json: what PyTorch itself finds in each `.metadata` here and in ../checkpoints.

Run by PyTorch 2.14: python3 describe.py FOLDER, where FOLDER is this one.
"""

import json
import pathlib
import pickle
import sys

CHECKPOINTS = ("1.13-sharded", "2.6-dtensor", "2.14-dtensor", "2.14-optim")


def raw(name):
    """The bytes of a name, each as the character of its number: JSON has no lone surrogates."""
    return name.encode("utf-8", "surrogatepass").decode("latin-1")


def item(info):
    return info and [info.relative_path, info.offset, info.length, list(getattr(info, "transform_descriptors", None) or ())]


def entry(name, value, storage, classes):
    if not isinstance(value, classes.TensorStorageMetadata):
        return {"name": raw(name), "item": item(storage.pop(classes.MetadataIndex(name), None))}
    properties = value.properties
    indices = [classes.MetadataIndex(name, chunk.offsets) for chunk in value.chunks]
    described = {
        "name": raw(name),
        "dtype": str(properties.dtype).removeprefix("torch."),
        "layout": str(properties.layout),
        "requires_grad": properties.requires_grad,
        "memory_format": str(properties.memory_format),
        "pin_memory": properties.pin_memory,
        "shape": list(value.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in value.chunks],
        "items": [item(storage.get(index)) for index in indices],
    }
    for index in indices:
        storage.pop(index, None)
    return described


def describe(path):
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    # PyTorch 2 imports the module under the name that 1.13 wrote as a second one, with classes of its own.
    classes = sys.modules[type(metadata).__module__]
    storage = dict(metadata.storage_data)
    meta = metadata.storage_meta if hasattr(metadata, "storage_meta") else None
    return {
        "module": type(metadata).__module__,
        "version": metadata.version,
        "entries": [entry(name, value, storage, classes) for name, value in metadata.state_dict_metadata.items()],
        "unclaimed": [[raw(i.fqn), None if i.offset is None else list(i.offset), item(info)] for i, info in storage.items()],
        "paths": metadata.planner_data and {raw(name): list(path) for name, path in metadata.planner_data.items()},
        "storage_meta": meta and {
            "checkpoint_id": meta.checkpoint_id and str(meta.checkpoint_id),
            "save_id": meta.save_id,
            "load_id": meta.load_id,
            "modules": getattr(meta, "modules", []),
        },
    }


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    files = [f"../checkpoints/{name}/ck/.metadata" for name in CHECKPOINTS]
    files += sorted(path.name for path in folder.glob("*.metadata"))
    expected = {name: describe(folder / name) for name in files}
    (folder / "expected.json").write_text(
        "{\n" + ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in expected.items()) + "\n}\n"
    )
