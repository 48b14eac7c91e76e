"""Prints what a script sees of its start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ["RANK"] == "0":
    print(f"name {__name__}, argv {[Path(sys.argv[0]).name, *sys.argv[1:]]}")
    print(f"path starts with {Path(sys.path[0]).name}, ranks {os.environ['WORLD_SIZE']}")
    print(f"threads {os.environ.get('OMP_NUM_THREADS')}")
    print("launcher serves the store:", os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
