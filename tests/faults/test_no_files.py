"""Ranks at the limit of open files, or without descriptors of processes, are not lost."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
from fault_ranks import let_meet, run_ranks
from refused_calls import create_no_more_memory_files, open_no_more_pidfds
from torch import nn

from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(60)
# The failure detector looks for ended processes five times a second.
WAIT_S = 0.5
WARNING = b"ddpx cannot monitor"


def _use_up_files() -> list[int]:
    """Opens files up to the limit, which this function lowers. Returns their descriptors."""
    largest = max(map(int, os.listdir("/proc/self/fd")))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (largest + 1, hard))
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    return opened


def _wait(grad: torch.Tensor) -> None:
    time.sleep(WAIT_S)


def _train_at_the_limit(has_pidfds: bool) -> float:
    if not has_pidfds:
        open_no_more_pidfds()
    module = nn.Linear(32, 32)
    model = ReducerDDP(module)
    model(torch.ones(2, 32)).sum().backward()
    let_meet(model)
    module.weight.register_hook(_wait)
    opened = _use_up_files() if dist.get_rank() == 0 else []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 32)).sum().backward()
    for file in opened:
        os.close(file)
    assert module.bias.grad is not None
    return module.bias.grad.sum().item()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("has_pidfds", [True, False])
def test_the_other_ranks_live(has_pidfds: bool, transport: str) -> None:
    endings = run_ranks(2, _train_at_the_limit, has_pidfds, backend=transport)
    assert [ending.value for ending in endings] == [64.0, 64.0], endings


def _count_warnings() -> int:
    """Trains without a status page of rank 0. Returns the number of warnings."""
    with tempfile.TemporaryFile() as stderr:
        os.dup2(stderr.fileno(), 2)
        if dist.get_rank() == 0:
            create_no_more_memory_files()
        model = ReducerDDP(nn.Linear(32, 32))
        model(torch.ones(2, 32)).sum().backward()
        stderr.seek(0)
        return stderr.read().count(WARNING)


def test_a_group_without_a_monitor_has_one_warning() -> None:
    endings = run_ranks(2, _count_warnings, environment={"DDPX_TRANSPORT": "group"})
    assert [ending.value for ending in endings] == [1, 0], endings
