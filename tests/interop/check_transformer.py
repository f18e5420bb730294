"""Computes the loss of examples/dtensor_transformer.cpp: `check_transformer.py CHECKPOINT STEP` loads the parameters
that the example saved and prints its loss in that step, of the same batch, in PyTorch."""

import math
import sys

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

BATCH, LENGTH, VOCABULARY, HEADS, LAYERS = 8, 12, 26, 4, 2


def load_model(path):
    sizes = {
        name.removeprefix("model."): described.size
        for name, described in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if name.startswith("model.")
    }
    model = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    dcp.load({"model": model}, checkpoint_id=path)
    return model


def batch_of(step):
    row, place = torch.arange(BATCH).view(BATCH, 1), torch.arange(LENGTH + 1)
    return (row * 3 + step * 5 + place * (row % 5 + 1)) % VOCABULARY


def heads_of(x):
    return x.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)


def attention(x, layer):
    query, key, value = (heads_of(x @ layer[name].T) for name in ("query", "key", "value"))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
    return mixed.transpose(1, 2).reshape(x.shape) @ layer["project"].T


def loss_of(model, tokens):
    width = model["norm"].shape
    x = model["embedding"][tokens[:, :-1]] + model["positions"]
    for number in range(LAYERS):
        prefix = f"layer{number}_"
        layer = {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
        x = x + attention(F.layer_norm(x, width, layer["norm_attention"]), layer)
        x = x + F.gelu(F.layer_norm(x, width, layer["norm_mlp"]) @ layer["up"].T) @ layer["down"].T
    logits = F.layer_norm(x, width, model["norm"]) @ model["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    path, step = sys.argv[1:]
    print(loss_of(load_model(path), batch_of(int(step))).item())


if __name__ == "__main__":
    main()
