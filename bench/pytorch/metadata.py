#!/usr/bin/python3
"""Times PyTorch, with the same work as metadata.cpp: `metadata.py read|write|roundtrip FILE`. Prints the same line of JSON.

Reading is pickle.load into PyTorch's classes, as FileSystemReader does it; writing is pickle.dump to FILE.out, as
FileSystemWriter does it. `write` does not count the read before it.
"""

import json
import pickle
import resource
import sys
import time

import torch.distributed.checkpoint  # noqa: F401  so that the imports of the pickle do not count


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("read", "write", "roundtrip"):
        sys.exit("usage: metadata.py read|write|roundtrip FILE")
    work, path = sys.argv[1:]
    seconds = 0.0
    begin = time.perf_counter()
    with open(path, "rb") as file:
        metadata = pickle.load(file)
    if work != "write":
        seconds += time.perf_counter() - begin
    if work != "read":
        begin = time.perf_counter()
        with open(path + ".out", "wb") as file:
            pickle.dump(metadata, file)
        seconds += time.perf_counter() - begin
    chunks = sum(len(getattr(entry, "chunks", ())) for entry in metadata.state_dict_metadata.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"work": work, "chunks": chunks, "seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
