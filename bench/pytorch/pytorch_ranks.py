"""Starts ranks of PyTorch on this machine, for the benchmarks and for tests/interop."""

import os
import socket
import time


def timed(work):
    """Seconds from when all ranks have begun `work` to when all have finished it."""
    import torch.distributed as dist  # not every user of this module times

    dist.barrier()
    begin = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - begin


def run_ranks(run, ranks):
    """Calls run(rank) for each of `ranks` ranks: rank 0 in this process, the others in child processes. The environment
    lets them make a Gloo process group. If a rank fails, this process exits with its status."""
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
    os._exit(0)  # does not wait for threads that a process group leaves
