#!/usr/bin/env python3
"""Writes what PyTorch makes of states, beside this script. Deterministic. Run by 2.14, and for the
files by 2.6, too.

    generate.py            everything
    generate.py files      the files of VERSION alone

traversal.json   [{"state", "since_2_4": {"visited": [[path, value], ...], "names": [...] or null}, "until_2_3": ...}]: what
                 is visited, and the flat names, null where two values would have one name
elements.json    {"set": [{"root", "path", "value", "result"}], "get": [{"root", "path", "found", "result"}]}: "result" of a
                 set is null where PyTorch raises. What PyTorch does by accident is left out (see traverse.h).
modules.json     {name: [[key, sizes, dtype], ...]}: module.state_dict() in order
objects.json     a list of values
VERSION-objects.pt          the same by torch.save
VERSION-optimizers.pt       torch.save of {name: {"initial", "model", "optim", "grads", "after"}}: a model as it begins, the same
                            and its optimizer (get_optimizer_state_dict) after two steps, and after another with these
                            gradients
VERSION-flattened.pt        torch.save of {name: optim}: the same optimizer's state, but for LBFGS's, by
                            get_optimizer_state_dict with flatten_optimizer_state_dict=True
Values are written as encode.py says.
"""

import collections
import copy
import itertools
import json
import pathlib
import random
import sys

import torch
from torch import nn
from torch.distributed.checkpoint import _nested_dict, _traverse
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from encode import encode

HERE = pathlib.Path(__file__).resolve().parent
VERSION = ".".join(torch.__version__.split(".")[:2])


def tensor(*elements):
    return torch.tensor(elements, dtype=torch.int64)


# ---- traversal


def random_value(random_, depth):
    kind = random_.randrange(12)
    if depth == 0 or kind < 6:
        leaves = [None, True, 7, 0.5, "text", tensor(1, 2), tensor(3), b"\x00\xff", [], {}, ()]
        return leaves[random_.randrange(len(leaves))]
    count = random_.randrange(4)
    if kind < 9:
        keys = random_.sample(["a", "b", "c", "0", "1", 0, 1, "a.b", "step"], count)
        return {key: random_value(random_, depth - 1) for key in keys}
    items = [random_value(random_, depth - 1) for _ in range(count)]
    return items if kind < 11 else tuple(items)


def states():
    yield {}
    yield {"model": {"w": tensor(1), "b": tensor(2)}, "step": 3}
    yield {"list": [1, 2, 3], "tensors": [tensor(1), tensor(2)], "mixed": [1, tensor(1), "x"]}
    yield {"tuple": (tensor(1), {"a": 1}), "in_list": [(tensor(1),)], "pair": (0.9, 0.999)}
    yield {"empty": {}, "empties": [{}, {}], "none": [], "deep": [[[]]], "then": [[{}], tensor(1)]}
    yield {"dicts": [{"params": ["a", "b"], "lr": 0.1}, {"params": [], "lr": 0.2}]}
    yield {"plain": {"a": {"b": [1, 2]}, "c": "d"}, "with": {"a": {"b": [1, tensor(2)]}, "c": "d"}}
    yield {0: {1: tensor(0)}, "1": [{2: 3}]}
    yield {"a": {"b": 1}, "a.b": 2}
    yield {"a": [tensor(0)], "a.0": 1}
    yield {1: 1, "1": 2}
    yield {"nested": [[tensor(1), [2, 3]], [4, [tensor(5)]], [[6]]]}
    random_ = random.Random(214)
    for _ in range(300):
        state = random_value(random_, 5)
        if isinstance(state, dict):
            yield state


def visited(traverse, state):
    calls = []
    traverse(state, lambda path, value: calls.append([list(path), encode(value)]))
    names = [".".join(map(str, path)) for path, _ in calls]
    return {"visited": calls, "names": names if len(set(names)) == len(names) else None}


def traversal():
    for state in states():
        since = visited(_traverse.traverse_state_dict, state)
        try:
            flat, mapping = _nested_dict.flatten_state_dict(state)
            assert list(flat) == since["names"] and [list(p) for p in mapping.values()] == [p for p, _ in since["visited"]]
        except ValueError:
            assert since["names"] is None
        until = visited(_traverse.traverse_state_dict_v_2_3, state)
        yield {"state": encode(state), "since_2_4": since, "until_2_3": until}


# ---- elements


def elements():
    roots = [{}, {"a": {"b": 1}}, {"a": [1, [2]]}, {"a": 5}, {"a": None}, {"a": [None]}, {"a": [{"b": 1}]}, {"a": (1, 2)}]
    parts = ["a", "b", 0, 1, 3]
    sets, gets = [], []
    for root, length in itertools.product(roots, range(1, 4)):
        for path in itertools.product(parts, repeat=length):
            before = encode(root)
            found = get(root, path)
            if found != "accident":
                gets.append({"root": before, "path": path, "found": found[0], "result": encode(found[1])})
            result = set_(root, path)
            if result != "accident":
                sets.append({"root": before, "path": path, "value": "new", "result": result and encode(result)})
    random_ = random.Random(7)
    there = [case for case in gets if case["found"]]
    return {"set": random_.sample(sets, 300), "get": there + random_.sample(gets, 100)}


def get(root, path):
    absent = object()
    try:
        found = _traverse.get_element(root, path, absent)
    except IndexError:
        return "accident"
    return (False, None) if found is absent else (True, found)


def set_(root, path):
    root = copy.deepcopy(root)
    try:
        _traverse.set_element(root, path, "new")
    except AttributeError as error:  # an int key at the end of a path, for a dict with few entries; a leaf on the way
        return "accident" if "append" in str(error) and "dict" in str(error) else None
    except (TypeError, IndexError):
        return None
    return root


# ---- modules


class Net(nn.Module):
    """Own parameters and buffers come first, whatever the order of registration."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2, bias=False)])
        self.register_buffer("mean", torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(2))
        self.named = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "act": nn.ReLU()})
        self.shift = nn.Parameter(torch.zeros(()))
        self.tied = self.body[0]


MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "linear_no_bias": lambda: nn.Linear(3, 2, bias=False),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "batch_norm_2d_not_affine": lambda: nn.BatchNorm2d(4, affine=False),
    "batch_norm_no_stats": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance_norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "layer_norm": lambda: nn.LayerNorm([2, 3]),
    "layer_norm_not_affine": lambda: nn.LayerNorm([2, 3], elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "embedding": lambda: nn.Embedding(5, 3),
    "embedding_bag": lambda: nn.EmbeddingBag(5, 3),
    "lstm": lambda: nn.LSTM(2, 3),
    "lstm_two_layers_both_ways": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True),
    "lstm_projected": lambda: nn.LSTM(2, 4, proj_size=3),
    "gru_no_bias": lambda: nn.GRU(2, 3, bias=False),
    "rnn": lambda: nn.RNN(2, 3, num_layers=2),
    "lstm_cell": lambda: nn.LSTMCell(2, 3),
    "multihead_attention": lambda: nn.MultiheadAttention(4, 2),
    "multihead_attention_no_bias": lambda: nn.MultiheadAttention(4, 2, bias=False),
    "multihead_attention_other_sizes": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=3, vdim=5),
    "conv1d": lambda: nn.Conv1d(2, 3, 3),
    "conv2d_no_bias": lambda: nn.Conv2d(2, 4, (3, 2), groups=2, bias=False),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(2, 3, 3),
    "prelu": lambda: nn.PReLU(3),
    "transformer_encoder_layer": lambda: nn.TransformerEncoderLayer(4, 2, dim_feedforward=6),
    "transformer_decoder_layer": lambda: nn.TransformerDecoderLayer(4, 2, dim_feedforward=6),
    "net": Net,
}


def modules():
    return {
        name: [[key, list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in make().state_dict().items()]
        for name, make in MODULES.items()
    }


# ---- objects


def objects():
    shared = torch.arange(6, dtype=torch.float32)
    return [
        None,
        True,
        False,
        0,
        255,
        -1,
        65536,
        2**40,
        -(2**63),
        0.1,
        -0.0,
        float("inf"),
        "",
        "text",
        "\u00e9\U0001f600",
        b"",
        b"\x00\x80\xff",
        [],
        [1],
        [1, [2, [3]]],
        (),
        (1,),
        (1, 2),
        (1, "b", 3.5),
        (1, 2, 3, 4),
        {},
        {"a": 1},
        {"a": {"b": [1, None]}, 3: (0.9, 0.999)},
        collections.OrderedDict(b=1, a=2),
        torch.Size([2, 3]),
        list(range(2500)),
        {f"key{i}": i for i in range(1500)},
        (shared[:3], shared[3:]),
        {"weights": [shared, shared.view(2, 3), torch.ones(2, 2).t()], "mask": torch.tensor([True, False])},
        torch.zeros(0, 3),
        torch.tensor(5),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1, 2], dtype=torch.int16),
        nn.Parameter(torch.ones(2)),
    ]


# ---- optimizers


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)),
    "sgd_nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)),
    "adam_amsgrad": (torch.optim.Adam, dict(lr=0.01, eps=1e-6, amsgrad=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.01)),
    "rmsprop_centered": (torch.optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True, weight_decay=0.01)),
    "lbfgs": (torch.optim.LBFGS, dict(lr=0.5, max_iter=3, history_size=4)),
}


def loss_of(model):
    return model(torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]])).pow(2).sum()


def make(name):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    kind, options = OPTIMIZERS[name]
    if kind is torch.optim.LBFGS:
        return model, kind(model.parameters(), **options)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return model, kind(groups, **options)


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


def copies(state):
    return {key: value.detach().clone() for key, value in state.items()}


def trained(name, seed=6):
    torch.manual_seed(seed)
    model, optimizer = make(name)
    closure = closure_of(model, optimizer)
    initial = copies(model.state_dict())
    for _ in range(2):
        optimizer.step(closure)
    closure()
    return model, optimizer, closure, initial


def flattened_case(name):
    model, optimizer, _, _ = trained(name)
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def optimizer_case(name, seed=6):
    model, optimizer, closure, initial = trained(name, seed)
    saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, get_optimizer_state_dict(model, optimizer))
    case = {"initial": initial, "model": copies(model.state_dict()), "optim": saved}
    case["grads"] = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    optimizer.step(closure)
    case["after"] = copies(model.state_dict())
    return case


def write(name, content):
    (HERE / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main():
    if sys.argv[1:] != ["files"]:
        write("traversal.json", list(traversal()))
        write("elements.json", elements())
        write("modules.json", modules())
        write("objects.json", [encode(value) for value in objects()])
    torch.save(objects(), HERE / f"{VERSION}-objects.pt")
    torch.save({name: optimizer_case(name) for name in OPTIMIZERS}, HERE / f"{VERSION}-optimizers.pt")
    flattened = {name: flattened_case(name) for name in OPTIMIZERS if name != "lbfgs"}
    torch.save(flattened, HERE / f"{VERSION}-flattened.pt")


if __name__ == "__main__":
    main()
