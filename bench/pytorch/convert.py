"""Times PyTorch's conversion of a DCP checkpoint to one torch.save file. Prints one line of JSON: {"seconds", "peak_bytes"}.

convert.py SOURCE DESTINATION
"""

import json
import resource
import sys
import time

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

begin = time.perf_counter()
dcp_to_torch_save(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
