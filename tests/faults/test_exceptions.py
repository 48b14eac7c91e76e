"""The reports of the other ranks if one script ends with an exception, or normally after one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fault_ranks import await_that, let_meet, run_ranks, text_of
from test_waits import Log, run
from torch import nn

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(120)


class _Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS: dict[str, Callable[[], Exception]] = {
    # Longer than the space for it, which ends within a character.
    "long": lambda: ValueError("€" * 3000),
    "surrogate": lambda: ValueError("file \udc80"),
    "mute": _Mute,
}
CAUSES = {
    "long": "ValueError: €€€",
    "surrogate": r"ValueError: file \udc80",
    "mute": "_Mute: (its text could not be made)",
}


def _raise(error: str) -> tuple[str, str, str, int]:
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        raise ERRORS[error]()
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as failure:
        time.sleep(0.3)  # a separate thread logs
        cause = getattr(failure, "reason", "")
        return type(failure).__name__, text_of(failure), cause, len(log.texts)
    return "", "", "", 0


def _die_in_backward() -> tuple[str, str]:
    module = nn.Linear(4, 4)
    model = ReducerDDP(module)
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        module.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as failure:
        return type(failure).__name__, str(failure)
    return "", ""


@pytest.mark.parametrize("health, kind", [("1", "RankFailure"), ("0", "DistBackendError")])
def test_a_death_is_reported_with_and_without_health(health: str, kind: str) -> None:
    """Buckets move through shared memory beside gloo, which notices a death itself."""
    endings = run_ranks(3, _die_in_backward, environment={"DDPX_HEALTH": health})
    for rank in (0, 2):
        assert endings[rank].value[0] == kind, endings
        assert "rank 1" in endings[rank].value[1], endings
        assert endings[rank].exit_code == 0, endings


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("error", ERRORS)
def test_exceptions_of_any_text_are_told(error: str, transport: str) -> None:
    endings = run(3, _raise, error, backend=transport, exit_codes={1: 1})
    for rank in (0, 2):
        kind, text, cause, num_logged = endings[rank].value
        assert kind == "RankFailure", text
        assert cause.startswith(CAUSES[error]) and CAUSES[error] in text, text
        assert num_logged == 0  # the traceback is the only report


def _raise_in_a_part() -> tuple[str, str]:
    """The ranks of the job form two groups. The last rank raises before it has wrapped a model."""
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() == 3:
        raise ValueError("no such sample")
    try:
        ReducerDDP(nn.Linear(4, 4), process_group=parts[dist.get_rank() // 2])
    except ddpx.RankFailure as failure:
        return text_of(failure), failure.reason
    return "", ""


def test_exceptions_are_told_in_groups_for_which_no_model_is_wrapped_yet() -> None:
    endings = run(4, _raise_in_a_part, exit_codes={3: 1})
    assert endings[0].value == endings[1].value == ("", "")
    text, cause = endings[2].value
    assert "] rank 1 (rank 3 of the job, host " in text, text
    assert cause == "ValueError: no such sample"


def _end_well_behind_an_exception() -> bool:
    """Whether ranks that no longer train treat the end of another rank as a failure."""
    model = ReducerDDP(nn.Linear(4, 4))
    let_meet(model)
    if dist.get_rank() == 1:
        try:
            raise StopIteration
        except StopIteration:
            sys.exit(0)
    await_that(
        lambda: len([rank for rank in ddpx.peer_status(model) if not rank.alive]) == 1, "it lives"
    )
    time.sleep(0.5)  # long enough: five polls run per second
    return model.reducer.monitor.failed


def test_who_exits_with_0_behind_an_exception_has_not_failed() -> None:
    endings = run(3, _end_well_behind_an_exception)
    assert [endings[rank].value for rank in (0, 2)] == [False, False]


def _wrap_wrongly_beside_a_dead_rank() -> str:
    model = ReducerDDP(nn.Linear(4, 4))
    let_meet(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await_that(lambda: not all(rank.alive for rank in ddpx.peer_status(model)), "it lives")
    try:
        ReducerDDP(nn.Linear(4, 4).requires_grad_(False))
    except RuntimeError as error:
        return text_of(error)
    return ""


def test_a_fault_of_construction_is_reported_if_no_peer_can_learn_of_the_fault() -> None:
    endings = run_ranks(2, _wrap_wrongly_beside_a_dead_rank)
    assert "requires a gradient. Use the module itself" in endings[0].value, endings
