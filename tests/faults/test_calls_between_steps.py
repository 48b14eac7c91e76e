"""A rank dies while other ranks are in a collective call of ddpx that belongs to no step."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fault_ranks import crash, let_meet, mark, run_ranks, text_of
from mistakes import Outcome
from torch import nn

import ddpx
from ddpx import ReducerDDP, health
from ddpx.comm.collectives import all_gather_json
from ddpx.timeline.record import clocks

pytestmark = pytest.mark.timeout(90)
DEADLINE_S = 2.0  # nominally 0.2 s; neighbours of the tests may hold a rank up
LAST = 2


def _is_last() -> bool:
    return dist.get_rank() == LAST


def _step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


def _synchronized_grads(model: nn.Module, die: Callable[[], None]) -> None:
    loss = model(torch.ones(2, 4)).sum()
    die()
    ddpx.synchronized_grads(model, loss, list(model.parameters()))


def _start_of_a_recording(model: nn.Module, die: Callable[[], None]) -> None:
    die()
    ddpx.record(model).start()


def _end_of_a_recording(model: nn.Module, die: Callable[[], None]) -> None:
    with ddpx.record(model):
        _step(model)
        die()


def _out_of_batches(model: nn.Module, die: Callable[[], None]) -> None:
    """The rank that dies has one batch more than the others."""
    with ddpx.join(model):
        _step(model)
        die()


CALLS = {
    "synchronized_grads": _synchronized_grads,
    "start of a recording": _start_of_a_recording,
    "end of a recording": _end_of_a_recording,
    "join": _out_of_batches,
}


def _die(fault: str) -> None:
    if _is_last():
        mark("fault")
        if fault == "exception":
            raise ValueError("no such sample")
        crash(fault)


def _call(name: str, fault: str) -> Outcome:
    model = ReducerDDP(nn.Linear(4, 4))
    _step(model)
    let_meet(model)
    try:
        CALLS[name](model, lambda: _die(fault))
    except ValueError:
        raise
    except Exception as error:
        outcome = Outcome(type(error).__name__, text_of(error), time.monotonic())
        time.sleep(1)  # the end of one survivor must not be the loss that another survivor reports
        return outcome
    return Outcome("", "", time.monotonic())


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("fault", ["kill", "exception"])
@pytest.mark.parametrize("name", CALLS)
def test_survivors_name_the_lost_rank(name: str, fault: str, backend: str) -> None:
    endings = run_ranks(LAST + 1, _call, name, fault, backend=backend)
    for ending in endings[:LAST]:
        assert ending.value.kind == "RankFailure", ending
        assert f"rank {LAST} (host" in ending.value.text, ending
        assert ("no such sample" in ending.value.text) == (fault == "exception"), ending
        assert ending.exit_code == 0, ending
        assert ending.value.at_s - endings[LAST].marks["fault"] < DEADLINE_S, ending


def _compare_clocks() -> Outcome:
    """Each rank has a clock of its own, as on three hosts. Rank 1 dies before its round trips."""
    model = ReducerDDP(nn.Linear(4, 4))
    _step(model)
    let_meet(model)
    group, device, identity = model.process_group, torch.device("cpu"), f"clock {dist.get_rank()}"
    if dist.get_rank() == 1:
        all_gather_json(identity, group, device)
        mark("fault")
        crash("kill")
    try:
        with health.between_steps(group):  # as a recording does
            clocks.read_clocks(group, device, identity)
    except Exception as error:
        assert health.failed_between_steps(group)
        outcome = Outcome(type(error).__name__, text_of(error), time.monotonic())
        time.sleep(3)  # rank 2 waits for rank 0, which lives
        return outcome
    return Outcome("", "", time.monotonic())


def test_a_comparison_of_clocks_names_the_lost_rank() -> None:
    endings = run_ranks(3, _compare_clocks)
    for ending in (endings[0], endings[2]):
        assert ending.value.kind == "RankFailure", ending
        assert "rank 1 (host" in ending.value.text, ending
        assert ending.value.at_s - endings[1].marks["fault"] < DEADLINE_S, ending


def _shrink_afterwards() -> tuple[str, int]:
    """The call may stand between a backward and the optimizer's step."""
    model = ReducerDDP(nn.Linear(4, 4))
    _step(model)
    let_meet(model)
    with pytest.raises(ddpx.RankFailure):
        _synchronized_grads(model, lambda: _die("kill"))
    try:
        ddpx.shrink(model)
    except RuntimeError as error:
        return str(error), ddpx.shrink(model, step=0).step
    return "", -1


def test_shrink_then_needs_the_number_of_the_step() -> None:
    for ending in run_ranks(LAST + 1, _shrink_afterwards)[:LAST]:
        text, step = ending.value
        assert "Pass step=" in text, text
        assert step == 0


def _end_early() -> str:
    """torch's own error of a rank that has no more batches is no failure of a rank."""
    model = ReducerDDP(nn.Linear(4, 4))
    with ddpx.join(model, throw_on_early_termination=True):
        for _ in range(2 if dist.get_rank() else 1):
            _step(model)
    return ""


def _error_of_early_end() -> str:
    try:
        return _end_early()
    except RuntimeError as error:
        text = text_of(error)
    dist.barrier()
    return text


def test_early_end_of_join_is_no_failure() -> None:
    for rank, ending in enumerate(run_ranks(2, _error_of_early_end)):
        assert ending.value.startswith("RuntimeError: "), ending
        assert ("exhausted all inputs" in ending.value) == (rank == 0), ending
