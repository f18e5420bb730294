#!/usr/bin/env python3
"""What train_checkpoint.cpp does, in one process: train_checkpoint.py OPTIMIZER SOURCE|none DESTINATION FIRST LAST."""

import json
import os
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def numbers(count, step):
    return (torch.arange(1, count + 1, dtype=torch.float64) * step).sin()


def make_optimizer(name, module):
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.1, amsgrad=True)
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def main():
    warnings.simplefilter("ignore")
    name, source, destination, first, last = sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo", USE_LIBUV="0")
    torch.set_num_threads(1)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            parameter.copy_(numbers(parameter.numel(), 0.1 * (i + 2)).view_as(parameter) * 0.5)
    optimizer = make_optimizer(name, network)
    if source != "none":
        model_state, optimizer_state = get_state_dict(network, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=dcp.FileSystemReader(source))
        set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for step in range(first, last + 1):
        batch = numbers(32, 0.37 * step).view(8, 4)
        optimizer.zero_grad()
        loss = (network(batch) - batch.prod(1, keepdim=True)).square().sum() / 8
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model_state, optimizer_state = get_state_dict(network, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=dcp.FileSystemWriter(destination))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
