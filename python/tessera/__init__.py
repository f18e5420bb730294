"""Checkpoints of PyTorch: open, read, verify, compare, convert and reshard them.

    import tessera

    with tessera.open("step-1000") as checkpoint:
        print(checkpoint["model.weight"].shape)
        rows = checkpoint.read("model.weight", (slice(0, 16),))    # no other bytes are read
        weight = checkpoint["model.weight"].torch()
        step = checkpoint.objects["step"]
    assert tessera.verify("step-1000").good
    tessera.convert("step-1000", "model.safetensors", select=["model.*"], dtype="bfloat16")

A checkpoint is a directory of PyTorch's distributed checkpoint or of torch_checkpointing, safetensors, or a file of
torch.save. Nothing in it is executed. Neither PyTorch nor NumPy is needed; both are used where they are. Errors are
`tessera.Error` and its subclasses.

Functions that may take long release the interpreter lock, can be interrupted by ^C, and take `progress`: an object like
tqdm's, of which `total` is set and `update(bytes)` is called, or a function of the bytes that are done and their total.
"""

from ._checkpoint import Checkpoint, Chunk, Opaque, Tensor, open
from ._errors import (
    CancelledError,
    CorruptError,
    Error,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutcomeUnknownError,
    RankFailureError,
    StorageError,
    UnsupportedError,
)
from ._library import version as _version
from ._operations import ConvertReport, DiffReport, VerifyReport, convert, diff, inspect, reshard, verify

__version__ = _version()
__all__ = [
    "CancelledError",
    "Checkpoint",
    "Chunk",
    "ConvertReport",
    "CorruptError",
    "DiffReport",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "Opaque",
    "OutcomeUnknownError",
    "RankFailureError",
    "StorageError",
    "Tensor",
    "UnsupportedError",
    "VerifyReport",
    "convert",
    "diff",
    "inspect",
    "open",
    "reshard",
    "verify",
]
