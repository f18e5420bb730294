"""Writes states for state_values.cpp to load and to write again: make_state_values.py FOLDER SEED

objects.pt           torch.save of a list of values of every kind
optimizer-NAME.pt    torch.save of {"initial", "model", "optim", "grads", "after"}, see state/generate.py
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "state"))
from generate import OPTIMIZERS, objects, optimizer_case  # noqa: E402


def main():
    folder, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True)
    torch.save(objects(), folder / "objects.pt")
    for name in OPTIMIZERS:
        torch.save(optimizer_case(name, seed), folder / f"optimizer-{name}.pt")


if __name__ == "__main__":
    main()
