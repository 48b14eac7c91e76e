"""A pool of ranks reports ranks that fail, and goes on."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
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
        start = time.monotonic()
        both = r"(?s)rank 0: had not returned.*rank 1: Traceback.*out of cheese"
        with pytest.raises(RankFailed, match=both):
            pool.run(_raise_on_rank_1)
        assert time.monotonic() - start < 30
        with pytest.raises(RankFailed, match="rank 1: died, exit code 3"):
            pool.run(_die_on_rank_1)
        with pytest.raises(RankFailed, match=r"(?s)rank 1: died, exit code -11.*_crash_on_rank_1"):
            pool.run(_crash_on_rank_1)
        with pytest.raises(RankFailed, match=r"(?s)rank 1: Traceback.*SystemExit: 3"):
            pool.run(sys.exit, 3)
        with pytest.raises(RankFailed, match="pickle"):
            pool.run(_unpicklable)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1: did not return \(_sleep_on_rank_1"):
            pool.run(_sleep_on_rank_1, timeout=4)
        assert time.monotonic() - start < 30
        assert pool.run(_rank) == [0, 1]


class _CannotCross:
    """An object whose unpickling raises an error.

    Args:
        pid: The process in which the error is raised. 0 stands for each process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> object:
        return _arrive, (self.pid,)


def _arrive(pid: int) -> None:
    if pid in (0, os.getpid()):
        raise ImportError("no such module here")


def _return_what_cannot_arrive(pid: int) -> object:
    return _CannotCross(pid) if dist.get_rank() == 0 else "of an earlier call"


def _return_late() -> str:
    time.sleep(2)
    return "of an earlier call"


def _die_soon_on_rank_1() -> None:
    if dist.get_rank() == 1:
        threading.Timer(0.2, os._exit, (3,)).start()


def _interrupted(pool: RankPool) -> None:
    # A shell lets its background processes ignore the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
        pool.run(_return_late)
    finally:
        signal.signal(signal.SIGINT, handler)


def _dead_before_the_call(pool: RankPool) -> None:
    pool.run(_die_soon_on_rank_1)
    time.sleep(1)
    pool.run(_rank)


@pytest.mark.parametrize(
    "fail, error, text",
    [
        (
            lambda pool: pool.run(_return_what_cannot_arrive, os.getpid()),
            ImportError,
            "no such module",
        ),
        (
            lambda pool: pool.run(_rank, _CannotCross(0)),
            RankFailed,
            r"(?s)rank 1: Traceback.*no such module",
        ),
        (_interrupted, KeyboardInterrupt, "^$"),
        (
            _dead_before_the_call,
            RankFailed,
            "_rank failed on 1 of 2 .*\n.*rank 1: died, exit code 3",
        ),
    ],
    ids=["result", "argument", "interrupt", "death"],
)
def test_a_call_that_failed_leaves_no_results(
    fail: Callable[[RankPool], object], error: type[BaseException], text: str
) -> None:
    """The next call gets its own results."""
    with RankPool(2) as pool:
        assert pool.run(_rank) == [0, 1]
        with pytest.raises(error, match=text):
            fail(pool)
        assert pool.run(_rank) == [0, 1]


def test_a_pool_with_a_dead_rank_is_closed() -> None:
    with RankPool(2) as pool:
        pool.run(_die_soon_on_rank_1)
        time.sleep(1)


class _NotToBePickled:
    def __reduce__(self) -> str:
        raise FileNotFoundError("data.bin")


def test_an_argument_that_cannot_be_pickled() -> None:
    with RankPool(1) as pool, pytest.raises(FileNotFoundError, match=r"data\.bin"):
        pool.run(repr, _NotToBePickled(), timeout=5)


def test_a_partial_function() -> None:
    with RankPool(1) as pool:
        assert pool.run(functools.partial(int, "101", base=2)) == [5]


def _state() -> tuple[object, ...]:
    return (
        os.environ.get("DDPX_TEST"),
        "RES_OPTIONS" in os.environ,
        sys.path[-1],
        dist.get_debug_level().name,
        torch.get_num_threads(),
    )


def test_a_rank_has_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server has that of its start. conftest.py sets RES_OPTIONS before."""
    with RankPool(1) as pool:
        pool.run(_rank)
    monkeypatch.setenv("DDPX_TEST", "yes")
    monkeypatch.delenv("RES_OPTIONS")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setattr(sys, "path", [*sys.path, "/last"])
    with RankPool(1) as pool:
        assert pool.run(_state) == [("yes", False, "/last", "DETAIL", 1)]


_SIGNALS = """
import ctypes, signal
from ddpx.testing import RankFailed, RankPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
with RankPool(1, start_method="spawn") as pool:
    try:
        pool.run(signal.raise_signal, signal.SIGINT)
    except RankFailed as error:
        print(error)
    pool.run(ctypes.string_at, 0)
"""


def test_a_crash_prints_cpp_stacks_and_an_interrupt_does_not():
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALS], capture_output=True, text=True, check=False
    )
    assert "raise_signal failed on 1 of 1 rank\n" in done.stdout
    assert "KeyboardInterrupt" in done.stdout and "SIGINT" not in done.stderr
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
