"""torch.save files and safetensors files, written the ways that people write them."""

import collections
import json

import torch
from safetensors.torch import save_file

from layouts import plain_objects, strange_objects, strided_tensors
from values import SAVABLE_IN_FILES, SAVABLE_NEW, Maker


class TiedModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))


def trained(seed):
    torch.manual_seed(seed)
    model = TiedModel()
    optim = torch.optim.AdamW([{"params": model.body.parameters(), "lr": 1e-3}, {"params": [model.head.weight]}])
    for _ in range(2):
        optim.zero_grad()
        hidden = model.body(model.embedding(torch.randint(0, 11, (8,))))
        model.head(hidden).logsumexp(-1).mean().backward()
        optim.step()
    return model, optim


def torch_files(seed, new_dtypes):
    """name -> what torch.save is given."""
    make = Maker(seed)
    model, optim = trained(seed)
    files = {
        "state_dict": model.state_dict(),  # an OrderedDict with _metadata, tied weights
        "training": {
            "model": model.state_dict(),
            "optim": optim.state_dict(),
            "epoch": 3,
            "best": 0.25,
            "rng": torch.get_rng_state(),
            "dtype": torch.bfloat16,
        },
        "parameters": dict(model.named_parameters()),
        "views": strided_tensors(make),
        "nested": {
            "lists": [make.bits("a", (2,)), [make.bits("b", (3,)), {"deep": make.bits("c", (1, 2))}], "text", []],
            "ints": {0: make.bits("zero", (2,), "int32"), 10: {"x": 1}},
            "keys": {(1, "a"): make.bits("tuple", (2,)), None: 1, True: {"x": 2}, 2.5: "half", b"x": make.bits("bytes", (1,))},
            "empty": {},
            "tuple": (1, 2),
        },
        "bare": make.bits("bare", (3, 5)),
        "listed": [make.bits("first", (2,)), make.bits("second", (1, 2), "float16")],
        "dtypes": {d: make.bits(d, (2, 3), d) for d in SAVABLE_IN_FILES + (SAVABLE_NEW if new_dtypes else [])},
        "dtypes_small": {
            f"{dtype}.{len(shape)}": make.bits(f"{dtype}{shape}", shape, dtype)
            for dtype in SAVABLE_IN_FILES
            for shape in ((), (0,), (1, 0, 2))
        },
        "objects": {"plain": plain_objects(seed), "w": make.bits("w", (2, 2))},
        "strange": {"strange": strange_objects(seed), "w": make.bits("w", (2, 2)), "none": None},
        "exotic": {
            "quantized": torch.quantize_per_tensor(make.numbers("q", (2, 3)), 0.5, 2, torch.qint8),
            "sparse": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
            "plain": make.bits("plain", (2, 2)),
            "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        },
        "ordered": collections.OrderedDict([("z", make.bits("z", (2,))), ("a", make.bits("a2", (2,)))]),
        "cast": {
            **{d: make.numbers(d, (40, 5), d) for d in ("float64", "float32", "float16", "bfloat16")},
            "ids": make.bits("ids", (3,), "int64"),
        },
    }
    return files


def safetensors_state(seed):
    make = Maker(seed)
    state = {}
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    kinds += ["float8_e4m3fn", "float8_e5m2"]
    for i, dtype in enumerate(kinds):
        state[f"model.layers.{i}.weight"] = make.bits(f"s{i}", (i + 1, 3), dtype)
    state["model.scale"] = make.bits("scale", ())
    state["model.nothing"] = make.bits("nothing", (0, 2))
    return state


def write_one_safetensors(state, path):
    save_file(state, path, metadata={"format": "pt", "note": "one"})


def write_sharded_safetensors(state, folder):
    """Three files and an index, as model hubs have them."""
    folder.mkdir(parents=True)
    names, weight_map, total = sorted(state), {}, 0
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        part = {name: state[name] for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
        total += sum(tensor.numel() * tensor.element_size() for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
