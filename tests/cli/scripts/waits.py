"""Says that it runs, and runs for a minute."""

from __future__ import annotations

import os
import sys
import time

# In one piece: launchers start ranks unbuffered, and print() then writes the end of a line apart.
sys.stdout.write(f"waiting in {os.getpid()}\n")
sys.stdout.flush()
time.sleep(60)
