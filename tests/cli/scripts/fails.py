"""Rank 1 ends with its own exit code, before any group exists."""

from __future__ import annotations

import os
import sys

if os.environ["RANK"] == "1":
    sys.exit(3)
