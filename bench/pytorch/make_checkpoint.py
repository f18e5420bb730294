"""Writes a DCP checkpoint with PyTorch: float32 tensors, sharded in dimension 0 over the ranks.

make_checkpoint.py FOLDER TOTAL_BYTES CHUNK_BYTES RANKS
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def save(rank: int, folder: str, total_bytes: int, chunk_bytes: int, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ["USE_LIBUV"] = "0"  # Debian builds PyTorch without it
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    rows = chunk_bytes // (1024 * 4)
    generator = torch.Generator().manual_seed(rank)
    state = {}
    for i in range(total_bytes // (chunk_bytes * ranks)):
        local = torch.randn(rows, 1024, generator=generator)
        state[f"layers.{i}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    dcp.save({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    destination, total, chunk, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    mp.spawn(save, (destination, total, chunk, world), nprocs=world)
