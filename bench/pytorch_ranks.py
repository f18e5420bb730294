"""Ranks of PyTorch on this machine, for benchmarks (as measure_ranks.h has those of tessera) and tests/interop."""

import os
import socket
import time


def timed(work):
    """Seconds from when all ranks begin to when all have ended."""
    import torch.distributed as dist  # which not all who have ranks time

    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def run_ranks(run, ranks):
    """Calls run(rank) with `ranks` ranks, which can make a process group of Gloo; 0 in this process, the others in
    processes of their own. A rank that fails ends all with its exit status."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", USE_LIBUV="0")
    children = []
    for rank in range(1, ranks):
        pid = os.fork()
        if pid == 0:
            run(rank)
            os._exit(0)
        children.append(pid)
    run(0)
    for pid in children:
        _, status = os.waitpid(pid, 0)
        if status != 0:
            raise SystemExit(os.waitstatus_to_exitcode(status))
    os._exit(0)  # without waiting for the threads that a process group leaves
