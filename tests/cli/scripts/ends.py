"""Ends as the argument for this rank says: with an exit code, or killed.

Commas separate restarts.
"""

from __future__ import annotations

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
ends = sys.argv[1 + rank].split(",")
end = ends[min(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), len(ends) - 1)]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end != "0":
    sys.exit(int(end))
# Longer than a launcher would let the process live. Other ranks may start seconds later.
time.sleep(3)
print(f"rank {rank} ends well", flush=True)
