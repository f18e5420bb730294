#!/usr/bin/env python3
"""Trains the model of the demo and saves it as training jobs do: sharded by four ranks with FSDP2, optimizer and all.

    generate.py FOLDER      needs PyTorch 2.14; about half a minute

FOLDER/ck is the checkpoint {"model", "optim", "step", "config", "progress"}, FOLDER/manifest.json what it holds: dtype,
shape and CRC-32 (row-major) of each whole tensor, the repr of each other value.

The model is a transformer of two layers that learns to continue a short text, letter by letter.
"""

import ctypes
import datetime
import json
import math
import os
import pathlib
import sys
import tempfile
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

RANKS = 4
SEED = 7
STEPS = 300
TEXT = """a mosaic is made of small tiles. each tile is a tessera: a piece of glass, of stone, of gold. no tile shows
the picture, and no tile may be lost. who lays the floor lays it tile by tile, and many hands lay it at once. who moves
the floor to another house must know where each tile was: in which row, in which column, beside which other. then the
picture is the same, in a house with three rooms or in a house with seven."""
CONFIG = {
    "width": 28,
    "layers": 2,
    "heads": 4,
    "hidden": 70,
    "context": 48,
    "batch": 8,
    "lr": 0.004,
    "betas": (0.9, 0.98),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = CONFIG["width"]
        self.attention_norm = nn.RMSNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, CONFIG["hidden"], bias=False)
        self.down = nn.Linear(CONFIG["hidden"], width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, CONFIG["heads"], -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class LetterModel(nn.Module):
    def __init__(self, letters):
        super().__init__()
        width = CONFIG["width"]
        self.embedding = nn.Embedding(letters, width)
        self.position = nn.Embedding(CONFIG["context"], width)
        self.layers = nn.ModuleList(Block() for _ in range(CONFIG["layers"]))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, letters):
        x = self.embedding(letters) + self.position(torch.arange(letters.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(rank):
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(letter) for letter in TEXT])
    torch.manual_seed(SEED)
    model = LetterModel(len(alphabet))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"], betas=CONFIG["betas"])
    generator = torch.Generator().manual_seed(SEED + rank)
    losses = []
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - CONFIG["context"] - 1, (CONFIG["batch"],), generator=generator)
        window = torch.stack([text[start : start + CONFIG["context"] + 1] for start in starts])
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            average = loss.detach().clone()
            dist.all_reduce(average)
            losses.append(round(average.item() / RANKS, 4))
    state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": state,
        "optim": optimizer_state,
        "step": STEPS,
        "config": {**CONFIG, "alphabet": "".join(alphabet), "dtype": torch.float32},
        "progress": {"loss": losses, "perplexity": math.exp(losses[-1]), "finished": True},
    }


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def describe(tensor):
    tensor = tensor.detach().contiguous()
    data = ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "crc32": zlib.crc32(data)}


def one_rank(rank, rendezvous, folder):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=patience)
    init_device_mesh("cpu", (RANKS,))
    state = train(rank)
    os.chdir(folder)  # the metadata keeps the path
    dcp.save(state, checkpoint_id="ck")
    flat = {name: whole(value) for name, value in flatten_state_dict(state)[0].items()}
    if rank == 0:
        tensors = {name: describe(value) for name, value in flat.items() if isinstance(value, torch.Tensor)}
        plain = {name: repr(value) for name, value in flat.items() if name not in tensors}
        facts = {"torch": torch.__version__, "python": sys.version.split()[0], "seed": SEED, "ranks": RANKS}
        kind = {"kind": "dcp", "name": "demo", "path": "ck", "opaque": {}, "full_unpickler": []}
        manifest = {**facts, **kind, "tensors": tensors, "plain": plain}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        print(f"PyTorch {torch.__version__}, {STEPS} steps, loss {state['progress']['loss']}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as meeting:
        mp.start_processes(one_rank, args=(f"{meeting}/rendezvous", folder), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
