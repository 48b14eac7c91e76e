"""Ranks die, stall, or call another operation. Errors come in time and name the rank."""

from __future__ import annotations

import contextlib
import glob
import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mortal_ranks import Outcome, die, error_of, run_mortal
from torch import nn

from ddpx import ReducerDDP

DEADLINE_S = 5.0
KILLED = -9


def _assert_survivors_name(outcomes: list[Outcome], victim: int) -> None:
    assert outcomes[victim].exit_code == KILLED
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert isinstance(outcome.value, tuple), outcome.value
            text, seconds = outcome.value
            assert f"rank {victim} " in text, (rank, text)
            assert seconds < DEADLINE_S, (rank, text)


def _all_reduce_until_error(size: int) -> tuple[str, float]:
    return error_of(lambda: [dist.all_reduce(torch.ones(size)) for _ in range(3)])


def _die_in_all_reduce(victim: int, size: int, delay_s: float) -> Any:
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == victim:
        time.sleep(delay_s)
        die()
    return _all_reduce_until_error(size)


@pytest.mark.parametrize("victim, size, delay_s", [(0, 10, 0.5), (2, 300_000, 0.5), (1, 10, 0.0)])
def test_survivors_of_an_all_reduce_name_the_dead(victim, size, delay_s):
    outcomes = run_mortal(3, _die_in_all_reduce, victim, size, delay_s)
    _assert_survivors_name(outcomes, victim)


def _die_while_idle() -> Any:
    dist.barrier()
    if dist.get_rank() == 1:
        die()
    time.sleep(1.0)
    return _all_reduce_until_error(10)


def test_death_while_idle():
    _assert_survivors_name(run_mortal(2, _die_while_idle), 1)


def _die_in_backward() -> Any:
    model = ReducerDDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)

    def step() -> None:
        model(torch.randn(4, 64)).sum().backward()

    step()
    if dist.get_rank() == 1:
        model.module[1].weight.register_hook(lambda grad: die())
    return error_of(step)


def test_death_in_backward():
    _assert_survivors_name(run_mortal(2, _die_in_backward), 1)


def _stall() -> Any:
    dist.barrier()
    if dist.get_rank() == 1:
        return "stalled"  # the rank stays alive
    return _all_reduce_until_error(10)


def test_stalled_rank_is_named_when_time_is_up():
    outcomes = run_mortal(3, _stall, timeout_s=4.0, stay=True)
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert "timed out after 4000 ms: rank 1 did not arrive" in text
        # the timeout counts from this rank's call, which may be later
        assert 2.0 < seconds < 4.0 + DEADLINE_S


def _call_something_else() -> Any:
    dist.barrier()
    if dist.get_rank() == 1:
        return error_of(lambda: dist.broadcast(torch.ones(10), 0))
    return error_of(lambda: dist.all_reduce(torch.ones(10)))


def test_mismatch_names_both_calls():
    for outcome in run_mortal(2, _call_something_else):
        text, seconds = outcome.value
        assert "rank 0 called all_reduce #1 (SUM of 10 float32" in text
        assert "rank 1 called broadcast #1 (40 uint8 from local rank 0)" in text
        assert seconds < DEADLINE_S


def _fail_in_a_smaller_group(fault: str) -> Any:
    """The group has ranks 1 and 2 of the job, whose ranks in the group are 0 and 1."""
    group = dist.new_group([1, 2], backend="shm", timeout=timedelta(seconds=4))
    if dist.get_rank() == 0:
        return None
    dist.all_reduce(torch.ones(3), group=group)
    is_first = dist.get_rank() == 1
    if is_first and fault == "death":
        die()
    if is_first and fault == "late":
        return None  # the rank stays alive
    if fault == "gloo":
        if is_first:
            die()
        return error_of(lambda: dist.reduce(torch.ones(3), 1, group=group))
    size = 4 if fault == "mismatch" and is_first else 3
    return error_of(lambda: dist.all_reduce(torch.ones(size), group=group))


_SAID_IN_A_SMALLER_GROUP = {
    "death": "rank 0 (rank 1 of the job) died",
    "late": "rank 0 (rank 1 of the job) did not arrive",
    "gloo": "rank 1 (rank 2 of the job): reduce through gloo failed",
    "mismatch": "rank 0 (rank 1 of the job) called all_reduce #1 (SUM of 4 float32",
}


@pytest.mark.parametrize("fault", _SAID_IN_A_SMALLER_GROUP)
def test_a_smaller_group_names_ranks_of_the_job(fault):
    text, seconds = run_mortal(3, _fail_in_a_smaller_group, fault, stay=True)[2].value
    assert "[ddpx shm rank 1 (rank 2 of the job), phase " in text
    assert _SAID_IN_A_SMALLER_GROUP[fault] in text
    assert seconds < 4.0 + DEADLINE_S


def _die_at_once() -> None:
    dist.all_reduce(torch.ones(300_000))
    die()


def _left_behind() -> set[str]:
    """Names in /dev/shm, and sockets that no process holds.

    Ranks of other tests may have some, too.
    """
    with open("/proc/net/unix") as table:
        sockets = {line.split()[-1]: f"socket:[{line.split()[6]}]" for line in table}
    held = set()
    for fd in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended
            held.add(os.readlink(fd))
    left = {name for name, socket in sockets.items() if socket not in held}
    return {name for name in left | set(os.listdir("/dev/shm")) if "ddpx" in name}


def test_nothing_is_left_behind():
    assert [outcome.exit_code for outcome in run_mortal(2, _die_at_once)] == [KILLED, KILLED]
    # a socket that is not accepted yet has no holder for a moment
    deadline = time.monotonic() + DEADLINE_S
    while left := _left_behind():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
