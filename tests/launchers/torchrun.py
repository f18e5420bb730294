#!/usr/bin/env python3
"""torchrun with stores that do not use libuv: torchrun asks for libuv, which Debian's PyTorch lacks."""

import os

import torch.distributed

os.environ["USE_LIBUV"] = "0"


class StoreWithoutLibuv(torch.distributed.TCPStore):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{**options, "use_libuv": False})


torch.distributed.TCPStore = StoreWithoutLibuv
from torch.distributed.run import main  # noqa: E402  its modules take TCPStore from torch.distributed when they load

if __name__ == "__main__":
    main()
