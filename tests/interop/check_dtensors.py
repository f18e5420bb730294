"""Loads DTensors from checkpoints: `check_dtensors.py PATH...`, each written anew from make_dtensor_values.py's, on two
ranks and under each placement. Exits with 1, saying which, if elements are others than they were."""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros


def run(rank, port, paths):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", USE_LIBUV="0")
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pid = os.fork()
    run(1 if pid == 0 else 0, port, sys.argv[1:])
    if pid != 0 and os.waitpid(pid, 0)[1] != 0:
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
