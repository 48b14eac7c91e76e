"""Ranks die in operations that ``shm`` runs through gloo.

The failure detector names the ranks. It starts with the first wrapper. Without a wrapper, errors
name the operation, and quote gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_ranks import Outcome, die, error_of, run_mortal
from torch import nn

from ddpx import ReducerDDP

DEADLINE_S = 5.0
WORLD_SIZE = 3


def _start_detector() -> None:
    ReducerDDP(nn.Linear(2, 2))


def _tensors() -> list[torch.Tensor]:
    return [torch.ones(1000) for _ in range(WORLD_SIZE)]


def _gather(root: int) -> None:
    dist.gather(torch.ones(1000), _tensors() if dist.get_rank() == root else None, root)


def _scatter(root: int) -> None:
    dist.scatter(torch.ones(1000), _tensors() if dist.get_rank() == root else None, root)


def _all_reduce_sparse(root: int) -> None:
    """An operation on sparse tensors, which runs through gloo."""
    dist.all_reduce(torch.eye(3).to_sparse())


COLLECTIVES: dict[str, Callable[[int], Any]] = {
    "reduce": lambda root: dist.reduce(torch.ones(1000), root),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": lambda root: dist.all_to_all(_tensors(), _tensors()),
    "all_to_all_single": lambda root: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    "all_reduce_coalesced": lambda root: dist.all_reduce_coalesced(_tensors()),
    "all_reduce": _all_reduce_sparse,
}


def _assert_survivors_say(outcomes: list[Outcome], victim: int, phase: str, said: str) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert isinstance(outcome.value, tuple), outcome.value
        text, seconds = outcome.value
        assert text.startswith("DistBackendError: "), (rank, text)
        assert f"[ddpx shm rank {rank}, phase {phase}" in text, (rank, text)
        assert said in text, (rank, text)
        assert seconds < DEADLINE_S, (rank, seconds, text)


def _assert_survivors_name(outcomes: list[Outcome], victim: int, phase: str) -> None:
    _assert_survivors_say(outcomes, victim, phase, f"rank {victim} (")


def _die_in(name: str, root: int, victim: int, detector: bool = True) -> Any:
    if detector:
        _start_detector()
    collective = COLLECTIVES[name]
    collective(root)
    if dist.get_rank() == victim:
        time.sleep(0.5)
        die()
    # One send may succeed before the death is detected, so this rank sends several times.
    return error_of(lambda: [collective(root) for _ in range(3)])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_survivors_of_a_collective_name_the_dead(name):
    outcomes = run_mortal(WORLD_SIZE, _die_in, name, 0, 2)
    _assert_survivors_name(outcomes, 2, name)


@pytest.mark.parametrize("name", ["reduce", "gather", "scatter"])
def test_a_dead_root_is_named(name):
    _assert_survivors_name(run_mortal(WORLD_SIZE, _die_in, name, 0, 0), 0, name)


@pytest.mark.parametrize("name", ["reduce", "gather", "scatter", "all_to_all"])
def test_without_a_detector_the_operation_is_named(name):
    outcomes = run_mortal(WORLD_SIZE, _die_in, name, 0, 2, False)
    _assert_survivors_say(outcomes, 2, name, "gloo said: ")


def test_who_waits_for_a_failed_survivor_hears_of_it_without_a_detector():
    outcomes = run_mortal(WORLD_SIZE, _die_in, "gather", 0, 2, False, stay=True)
    _assert_survivors_say(outcomes, 2, "gather", "rank 0: gather through gloo failed")


def test_who_waits_for_a_failed_survivor_hears_of_the_dead():
    """Rank 1 waits for the root only. The root stays alive after its error."""
    outcomes = run_mortal(WORLD_SIZE, _die_in, "gather", 0, 2, stay=True)
    _assert_survivors_name(outcomes, 2, "gather")


def _die_in_p2p(action: str) -> Any:
    _start_detector()
    rank = dist.get_rank()
    tensor = torch.ones(1000)
    if rank == 2:
        time.sleep(0.5)
        die()
    if action == "recv":
        return error_of(lambda: dist.recv(tensor, 2, tag=rank))
    if action == "send":
        return error_of(lambda: [dist.send(tensor, 2, tag=rank) for _ in range(3)])
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 2)])
    return error_of(lambda: [work.wait() for work in works])


@pytest.mark.parametrize("action", ["recv", "send", "batch"])
def test_death_of_a_partner(action):
    outcomes = run_mortal(WORLD_SIZE, _die_in_p2p, action)
    _assert_survivors_name(outcomes, 2, "send" if action == "send" else "recv")


def _send_after_death() -> Any:
    """The connection is known to be broken, so the operation fails at its start instead of in its
    wait."""
    _start_detector()
    if dist.get_rank() == 1:
        die()
    time.sleep(1.0)
    first = error_of(lambda: dist.isend(torch.ones(10), 1).wait())
    return first, error_of(lambda: dist.isend(torch.ones(10), 1).wait())


def test_sending_to_the_dead():
    for outcome in run_mortal(2, _send_after_death)[0].value:
        _assert_survivors_name([Outcome(outcome, 0), Outcome(None, None)], 1, "send")


def _outlive() -> Any:
    """Rank 2 leaves after its part of the operation. The other ranks continue.

    There is no detector, so only the operations themselves end them.
    """
    rank = dist.get_rank()
    tensor = torch.full((1000,), float(rank))
    if rank == 2:
        dist.send(tensor, 0)
        dist.gather(tensor, None, 0)
        die()
    if rank == 1:
        time.sleep(2.0)  # the root waits for this rank while rank 2 is gone
        dist.gather(tensor, None, 0)
        for _ in range(3):
            dist.send(tensor, 0)
        return "done"
    assert dist.recv(torch.empty(1000)) == 2
    gathered = _tensors()
    dist.gather(tensor, gathered, 0)
    assert [int(part[0]) for part in gathered] == [0, 1, 2]
    assert [dist.recv(tensor) for _ in range(2)] == [1, 1]
    dist.recv(tensor, 1)
    return "done"


def test_who_has_done_its_part_may_go():
    outcomes = run_mortal(WORLD_SIZE, _outlive)
    assert [outcome.value for outcome in outcomes[:2]] == ["done", "done"]


def _stall() -> Any:
    dist.reduce(torch.ones(10), 0)
    if dist.get_rank() == 1:
        return None  # the rank stays alive
    return error_of(lambda: dist.reduce(torch.ones(10), 0))


def test_a_timeout_of_gloo_is_quoted():
    text, seconds = run_mortal(2, _stall, timeout_s=3.0, stay=True)[0].value
    assert "phase reduce through gloo" in text and "Timed out waiting 3000ms" in text, text
    assert seconds < 3.0 + DEADLINE_S


def _call_wrongly() -> Any:
    return error_of(lambda: dist.gather(torch.ones(3), [torch.ones(4)] * 2, 0))


def test_calls_that_make_no_sense_are_told_at_once():
    text, seconds = run_mortal(2, _call_wrongly)[0].value
    assert text and "ddpx" not in text, text
    assert seconds < 5.0
