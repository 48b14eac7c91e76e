"""Other collectives in the same backward, on the same group: they pair up as under DDP.

With ``find_unused_parameters`` the use of parameters may differ by rank. A bucket must leave at the
same place among all collectives of a backward on every rank, whatever this rank uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import RankPool

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0002},
}
NUM_STEPS = 5


@pytest.fixture(scope="module", params=["gloo", "shm"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(2, request.param) as two_ranks:
        yield two_ranks


class Decoder(nn.Module):
    """Uses ``optional`` in the steps in which it is told to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.optional = nn.Linear(8, 8)
        self.last = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.last(x + self.optional(x) if use else x)


class SumInBackward(torch.autograd.Function):
    """Sums its gradient over ranks in backward, as SyncBatchNorm sums statistics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


class WithCollective(nn.Module):
    """A collective call in backward lies between its optional layers and its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.decoder = Decoder(8)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.decoder(SumInBackward.apply(self.first(x)), use)


# Whether this rank uses the optional layer in a step.
USES: dict[str, Callable[[int], bool]] = {
    "rank 0 alone": lambda step: dist.get_rank() == 0,
    "rank 1 alone": lambda step: dist.get_rank() == 1,
    "in turn": lambda step: (step + dist.get_rank()) % 2 == 0,
    "all but in the fourth step": lambda step: step != 3 or dist.get_rank() == 0,
}


def _two_wrappers(wrap: Callable[..., Any], uses: Callable[[int], bool], width: int, mode: str):
    encoder = wrap(Decoder(8), **MODES[mode])
    decoder = wrap(Decoder(width), find_unused_parameters=True, **MODES[mode])

    def step(number: int) -> torch.Tensor:
        return decoder(encoder(torch.randn(4, 8), True), uses(number))

    return nn.ModuleList([encoder, decoder]), step


def _collective_within(wrap: Callable[..., Any], uses: Callable[[int], bool], mode: str):
    model = wrap(WithCollective(), find_unused_parameters=True, **MODES[mode])
    return model, lambda number: model(torch.randn(4, 8), uses(number))


def _grads(make: Callable[..., Any], wrap: Callable[..., Any], uses: str, *args: Any) -> list:
    torch.manual_seed(0)
    model, step = make(wrap, USES[uses], *args)
    kept = []
    for number in range(NUM_STEPS):
        torch.manual_seed(100 * number + dist.get_rank())
        model.zero_grad()
        step(number).square().sum().backward()
        kept.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return kept


def _compare(make: Callable[..., Any], uses: str, *args: Any) -> None:
    expected = _grads(make, DistributedDataParallel, uses, *args)
    found = _grads(make, ReducerDDP, uses, *args)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for left, right in zip(ours, theirs, strict=True):
            assert (left is None) == (right is None), f"step {number}"
            assert left is None or torch.equal(left, right), f"step {number}"


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [8, 3])
def test_two_wrappers_in_one_backward(pool, width, mode, uses):
    pool.run(_compare, _two_wrappers, uses, width, mode, timeout=30.0)


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("mode", MODES)
def test_a_collective_within_the_module(pool, mode, uses):
    pool.run(_compare, _collective_within, uses, mode, timeout=30.0)
