"""Failures are reported where the processes are at their limit of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fault_ranks import crash, let_meet, mark, run_ranks, text_of
from mistakes import Outcome
from refused_calls import start_no_more_threads
from torch import nn

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)
STALL_S = 1.5
DEADLINE_S = 5.0
LATE_S = 7.0


def _raise(_: torch.Tensor) -> None:
    raise ValueError("no such sample")


# What the last rank does, the error of the other ranks, and a part of its text.
FAULTS: dict[str, tuple[Callable[[ReducerDDP], object], str, str]] = {
    "differs": (
        lambda model: model.module.bias.requires_grad_(False),
        "RankMismatch",
        "'bias' on rank 2 only",
    ),
    "killed": (lambda _: crash("kill"), "RankFailure", "was killed by SIGKILL"),
    "late": (lambda _: time.sleep(LATE_S), "RankStalled", "rank 2 (host"),
    "raises": (
        lambda model: model.module.weight.register_hook(_raise),
        "RankFailure",
        "no such sample",
    ),
}


def _train(fault: str) -> Outcome:
    model = ReducerDDP(nn.Linear(32, 32))
    model(torch.ones(2, 32)).sum().backward()
    let_meet(model)
    ddpx.set_stall_timeout(error=STALL_S)
    start_no_more_threads()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=print).start()
    mark("fault")
    if dist.get_rank() == dist.get_world_size() - 1:
        FAULTS[fault][0](model)
    try:
        for _ in range(3):
            model(torch.ones(2, 32)).sum().backward()
    except Exception as error:
        return Outcome(type(error).__name__, text_of(error), time.monotonic())
    return Outcome("", "", time.monotonic())


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_report_comes_in_time(fault: str, transport: str) -> None:
    endings = run_ranks(3, _train, fault, backend=transport)
    _, kind, text = FAULTS[fault]
    start_s = min(ending.marks["fault"] for ending in endings)
    for ending in endings[:-1]:
        assert isinstance(ending.value, Outcome), ending
        assert ending.value.kind == kind, ending
        assert text in ending.value.text, ending
        assert ending.value.at_s - start_s < DEADLINE_S, ending
        assert ending.exit_code == 0, ending
