"""The side that a figure comes from, in the fields of bench/side.h: which PyTorch and BLAS computed it, on how many
threads, and how fast."""

import ctypes
import os
import time

import torch


def mapped_file(part):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and part in os.path.basename(fields[5]):
                return fields[5].strip()
    return None


def openblas():
    path = mapped_file("openblas")
    return ctypes.CDLL(path) if path else None


def blas_name():
    library = openblas()
    if library:
        library.openblas_get_config.restype = ctypes.c_char_p
        return library.openblas_get_config().decode()
    return next(filter(None, map(mapped_file, ("libmkl_rt", "libmkl_core", "libblas"))), "unknown")


def compute_threads():
    library = openblas()
    return max(torch.get_num_threads(), library.openblas_get_num_threads() if library else 1)


def matmul_gflops():
    """GFLOP/s of a product of two 1024 x 1024 matrices: the fastest of 10."""
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    fastest = 1e9
    for _ in range(10):
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * 1024**3 / fastest / 1e9


def describe_side():
    """Allocates and computes, so call it after everything else has been measured."""
    return {
        "library": f"PyTorch {torch.__version__}",
        "libtorch": torch.__version__.split("+")[0],
        "blas": blas_name(),
        "threads": compute_threads(),
        "matmul_gflops": matmul_gflops(),
    }
