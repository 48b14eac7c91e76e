"""Ranks that make their collective calls in different orders: all raise the same report."""

from __future__ import annotations

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


def _check(errors: list[tuple[str, str]]) -> None:
    assert hasattr(ddpx, "RankMismatch")
    for rank, (kind, text) in enumerate(errors):
        assert kind == "RankMismatch", errors
        assert text.startswith(f"ddpx.RankMismatch: [ddpx rank {rank}, "), text
        assert "ranks made different collective calls" in text, text
    # Behind the opening, which says who reports, and before what the backend may have said.
    told = {text.split("] ", 1)[1].split(" The backend said: ")[0] for _, text in errors}
    assert len(told) == 1, told
