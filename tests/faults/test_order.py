"""Ranks that make their collective calls in different orders: all raise the same report."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import run_ranks, text_of
from torch import nn

import ddpx
from ddpx import ReducerDDP

pytestmark = pytest.mark.timeout(90)


def _swapped_wrappers() -> tuple[str, str]:
    """Two models of the same sizes, whose backwards the last rank runs the other way round."""
    models = [ReducerDDP(nn.Linear(32, 32)) for _ in range(2)]
    order = models[::-1] if dist.get_rank() == dist.get_world_size() - 1 else models
    x = torch.full((2, 32), float(dist.get_rank() + 1))
    return _error_of(lambda: [model(x).pow(2).sum().backward() for model in order])


def _extra_call(num_elements: int) -> tuple[str, str]:
    """Between steps, rank 1 alone calls an all-reduce."""
    model = ReducerDDP(nn.Linear(32, 32))

    def steps() -> None:
        for number in range(6):
            model(torch.ones(2, 32)).sum().backward()
            if number == 1 and dist.get_rank() == 1:
                dist.all_reduce(torch.zeros(num_elements))

    return _error_of(steps)


def _error_of(steps: Any) -> tuple[str, str]:
    try:
        steps()
    except RuntimeError as error:
        return type(error).__name__, text_of(error)
    return "", ""


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_swapped_backwards(world_size: int, transport: str) -> None:
    _check([ending.value for ending in run_ranks(world_size, _swapped_wrappers, backend=transport)])


@pytest.mark.parametrize("num_elements", [3, 5000])
def test_an_extra_call_of_another_size_over_shm(num_elements: int) -> None:
    """The transport compares what ranks call; rank 1 hears it from its own call."""
    endings = run_ranks(3, _extra_call, num_elements, backend="shm")
    errors = [ending.value for ending in endings]
    assert [kind for kind, _ in errors] == ["RankMismatch", "DistBackendError", "RankMismatch"]
    for _, text in errors:
        assert "rank 0 called all_reduce #" in text and "(SUM of 1056 float32" in text, text
        assert f"rank 1 called all_reduce #5 (SUM of {num_elements} float32" in text, text
    assert "Look for a collective call" in errors[0][1]


@pytest.mark.parametrize("num_elements", [3, 5000])
def test_an_extra_call_of_another_size_over_gloo(num_elements: int) -> None:
    """gloo ends one of the processes; the others say what that may have come from."""
    # Rank 1 hears of it in its own call, which may wait for rank 2 until the group's timeout.
    endings = run_ranks(3, _extra_call, num_elements, timeout_s=10.0)
    dead = [rank for rank, ending in enumerate(endings) if ending.value is None]
    assert dead and all(endings[rank].exit_code == -signal.SIGABRT for rank in dead), endings
    for rank in {0, 2}.difference(dead):
        kind, text = endings[rank].value
        assert kind == "RankFailure", text
        assert any(f"rank {victim} (host " in text for victim in dead), text
        # How a process ended the kernel may not tell any more.
        gloo = "gloo does if ranks make different collective calls"
        assert gloo in text or (f"rank {dead[0]}" in text and ") died" in text), text


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_an_extra_call_that_fits_by_chance(transport: str) -> None:
    """As many elements as the bucket has: from there on each step meets one of another number."""
    _check([ending.value for ending in run_ranks(3, _extra_call, 1056, backend=transport)])


def _check(errors: list[tuple[str, str]]) -> None:
    assert hasattr(ddpx, "RankMismatch")
    for rank, (kind, text) in enumerate(errors):
        assert kind == "RankMismatch", errors
        assert text.startswith(f"ddpx.RankMismatch: [ddpx rank {rank}, "), text
        assert "ranks made different collective calls" in text, text
    # Behind the opening, which says who reports, and before what the backend may have said.
    told = {text.split("] ", 1)[1].split(" The backend said: ")[0] for _, text in errors}
    assert len(told) == 1, told
