"""The machine and the versions of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path

import torch

import ddpx


def describe() -> dict[str, str]:
    """Machine and versions."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_memory_bytes() / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"ddpx {ddpx.__version__}",
    }


def now() -> dict[str, str]:
    """Date and load average at the start of a part."""
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return {"date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"), "load": load}


def _processor() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return match[1] if match else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
