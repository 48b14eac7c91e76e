"""Says that it runs, and runs for a minute."""

from __future__ import annotations

import os
import time

print(f"waiting in {os.getpid()}", flush=True)
time.sleep(60)
