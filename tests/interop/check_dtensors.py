"""Loads DTensors from checkpoints: `check_dtensors.py PATH...`, each resaved from one of make_dtensor_values.py, on
two ranks and under each placement. Exits with 1, naming them, if elements differ."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros

from pytorch_ranks import run_ranks


def run(rank, paths):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for path in paths:
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        for placement in (Replicate(), Shard(0), Shard(1)):
            state = {n: zeros((5, 7), dtype=torch.float64, device_mesh=mesh, placements=[placement]) for n in names}
            dcp.load(state, checkpoint_id=path)
            for name, tensor in state.items():
                expected = torch.arange(35, dtype=torch.float64).view(5, 7) + int(name[1:])
                if not torch.equal(tensor.full_tensor(), expected):
                    print(f"{path}: {name} as {placement}: {tensor.full_tensor()}", file=sys.stderr)
                    os._exit(1)
    dist.barrier()


def main():
    run_ranks(lambda rank: run(rank, sys.argv[1:]), 2)


if __name__ == "__main__":
    main()
