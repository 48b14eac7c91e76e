"""Runs the example of a docstring in a rank. Ranks of a RankPool import this module."""

from __future__ import annotations

import doctest
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpx


class _AnyOutput(doctest.OutputChecker):
    """For ranks other than rank 0, whose output the docstrings do not show."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


def run_example(name: str, docstring: str, folder: str) -> str:
    """Runs the example on this rank, with the names that docs/api/index.rst lists.

    Args:
        name: The public name that the docstring belongs to.
        docstring: The docstring.
        folder: A folder for files. Each rank uses its own part.

    Returns:
        The failures, as text. Empty if there are none.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(folder) / f"rank{rank}"
    path.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(path)
    try:
        return _run(name, docstring, _namespace(name), rank)
    finally:
        os.chdir(before)


def run_and_write(name: str, docstring: str, folder: str) -> None:
    """Runs the example on rank 0 and writes its failures into a file. Kills rank 1."""
    namespace = _namespace(name)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (Path(folder) / "failures").write_text(_run(name, docstring, namespace, 0))


def run_with_late_rank(name: str, docstring: str, folder: str) -> str:
    """Runs the example on rank 0. Rank 1 sleeps until rank 0 has finished."""
    namespace = _namespace(name)
    done = Path(folder) / "done"
    if dist.get_rank() == 1:
        while not done.exists():
            time.sleep(0.02)
        return ""
    try:
        return _run(name, docstring, namespace, 0)
    finally:
        done.touch()


def run_under_launcher(name: str, docstring: str, folder: str) -> str:
    """Runs the example of an adapter, with the environment variables of a launcher."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # no library connects, since the process group exists already
    )
    return run_example(name, docstring, folder)


def _namespace(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"torch": torch, "dist": dist, "nn": nn, "ddpx": ddpx}
    if not dist.is_initialized():
        return namespace
    inputs = torch.full((8, 4), 3.0 if dist.get_rank() == 1 else 1.0)
    model = ddpx.ReducerDDP(nn.Linear(4, 1))
    namespace |= {
        "module": nn.Linear(4, 1),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "inputs": inputs,
        "batches": [inputs] * 3,
    }
    if name.startswith("ddpx.Timeline."):
        with ddpx.record(model) as timeline:
            for batch in namespace["batches"]:
                model(batch).sum().backward()
        model.zero_grad()
        namespace["timeline"] = timeline
    return namespace


def _run(name: str, docstring: str, namespace: dict[str, Any], rank: int) -> str:
    failures: list[str] = []
    report: Callable[[str], Any] = failures.append
    test = doctest.DocTestParser().get_doctest(docstring, namespace, name, None, None)
    checker = None if rank == 0 else _AnyOutput()
    runner = doctest.DocTestRunner(checker, verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report)
    return "".join(failures)
