"""Ranks in new processes, for tests that leave threads or groups behind, or count them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from ddpx.testing.rank_pool import forking_context


def run_in_new_ranks(
    function: Callable[..., None], args: tuple[Any, ...] = (), world: int = 2, limit_s: float = 60.0
) -> None:
    """Calls ``function(rank, *args)`` in each new process, and waits for all of them.

    Raises:
        AssertionError: A process still runs after ``limit_s`` seconds.
        torch.multiprocessing.ProcessException: A process failed. The error has its traceback.
    """
    forking_context()  # the processes are forks of one that has imported torch
    context = mp.start_processes(function, args, world, join=False, start_method="forkserver")
    deadline = time.monotonic() + limit_s
    try:
        while not context.join(timeout=1):  # returns False, too, when the first of them ends
            assert time.monotonic() < deadline, "a rank hangs"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
