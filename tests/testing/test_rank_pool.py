"""A pool of ranks reports ranks that fail, and goes on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from ddpx.testing import RankFailed, RankPool


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("out of cheese")
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _crash_on_rank_1() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def _unpicklable() -> object:
    return lambda: None


def _sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _rank() -> int:
    return dist.get_rank()


def test_failing_ranks_are_reported_and_replaced():
    with RankPool(2) as pool:
        assert pool.run(_rank) == [0, 1]
        with pytest.raises(RankFailed, match=r"(?s)rank 1: Traceback.*out of cheese"):
            pool.run(_raise_on_rank_1)
        with pytest.raises(RankFailed, match="rank 1: died, exit code 3"):
            pool.run(_die_on_rank_1)
        with pytest.raises(RankFailed, match=r"(?s)rank 1: died, exit code -11.*_crash_on_rank_1"):
            pool.run(_crash_on_rank_1)
        with pytest.raises(RankFailed, match="pickle"):
            pool.run(_unpicklable)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1: did not return \(_sleep_on_rank_1"):
            pool.run(_sleep_on_rank_1, timeout=4)
        assert time.monotonic() - start < 30
        assert pool.run(_rank) == [0, 1]


_CRASHES = """
import ctypes
from ddpx.testing import RankPool
with RankPool(1, start_method="spawn") as pool:
    pool.run(ctypes.string_at, 0)
"""


def test_a_crash_prints_cpp_stacks():
    done = subprocess.run(
        [sys.executable, "-c", _CRASHES], capture_output=True, text=True, check=False
    )
    assert "SIGSEGV(11), PID" in done.stderr and "frame #1: " in done.stderr
    assert "rank 0: died, exit code -11" in done.stderr and "Fatal Python error" in done.stderr


def test_bad_world_size():
    with pytest.raises(ValueError, match="world_size must be 1 or more"):
        RankPool(0)


# Runs in a process of its own. Records questions for CUDA devices, and operators: the first
# operator initializes CUDA under TORCH_CUDA_SANITIZER=1. The assignments make torch believe that it
# supports CUDA.
_IMPORTS_OF_THE_SERVER = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from ddpx.testing.rank_pool import PRELOADED

found = []
torch._C._cuda_getDeviceCount = lambda: found.append("device count") or 1
torch._C._cuda_getCurrentRawStream = lambda index: found.append("stream") or 0
torch._C._has_cuda = True
torch.version.cuda = "13.0"
torch.cuda._lazy_init = lambda: found.append("initialization")

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found.append(str(function))
        return function(*args, **(kwargs or {}))

assert torch.cuda.is_available() and found.pop() == "device count"
with Record():
    for name in PRELOADED:
        __import__(name)
print(found)
"""


def test_the_fork_server_leaves_cuda_alone():
    """A fork of a process that has counted CUDA devices cannot use CUDA."""
    command = [sys.executable, "-c", _IMPORTS_OF_THE_SERVER]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
