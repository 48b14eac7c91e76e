"""Prints that it runs, and runs for a minute."""

from __future__ import annotations

import os
import sys
import time

# One write: launchers start ranks unbuffered, and print() would write the end of the line
# separately.
sys.stdout.write(f"waiting in {os.getpid()}\n")
sys.stdout.flush()
time.sleep(60)
