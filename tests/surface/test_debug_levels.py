"""TORCH_DISTRIBUTED_DEBUG: training is the same at every level, and errors have names."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, Mlp, assert_same_on_all_ranks, mlp_step
from modes import MODES
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import RankPool

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


@pytest.fixture(scope="module", params=["INFO", "DETAIL"])
def level_and_pool(request) -> Iterator[tuple[str, RankPool]]:
    """Ranks started at that level, which torch reads when it makes a process group."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = request.param
    try:
        with RankPool(2) as pool:
            pool.run(_check_level, request.param)
            yield request.param, pool
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before


def _check_level(level: str) -> None:
    assert dist.get_debug_level() == getattr(dist.DebugLevel, level)


def _check_trains(mode: str) -> None:
    """Compares with the bare module, since DDP itself crashes over gloo at DETAIL."""
    torch.manual_seed(0)
    module = Mlp()
    twin = copy.deepcopy(module)
    model = ReducerDDP(module, **MODES[mode], **SMALL_CAP)
    for number in range(4):
        for either in (model, twin):
            either.zero_grad()
            torch.manual_seed(10 * number + dist.get_rank())
            mlp_step(either)
        for ours, plain in zip(module.parameters(), twin.parameters(), strict=True):
            dist.all_reduce(plain.grad.mul_(0.5))
            assert torch.equal(ours.grad, plain.grad)


def _check_transport(level: str) -> None:
    """At DETAIL, torch compares the calls of the group, so buckets stay on the group."""
    model = ReducerDDP(Mlp())
    assert model.reducer.transport == ("gloo" if level == "DETAIL" else "shm")
    if level == "DETAIL":
        with pytest.raises(ValueError, match="unless TORCH_DISTRIBUTED_DEBUG=DETAIL is set"):
            ReducerDDP(Mlp(), transport="shm")


def test_transport(level_and_pool):
    level, pool = level_and_pool
    pool.run(_check_transport, level)


@pytest.mark.parametrize("mode", MODES)
def test_trains(level_and_pool, mode):
    level_and_pool[1].run(_check_trains, mode)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.spare = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) + self.spare(hidden) if use_spare else self.head(hidden)


def _check_errors() -> None:
    """Parameters that differ between ranks, and parameters without a gradient on one rank."""
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"parameter 'weight': shape \(2, 4\)"):
        ReducerDDP(nn.Linear(4, 2 + rank))
    model = ReducerDDP(_TwoHeads())
    torch.manual_seed(rank)
    for _ in range(2):
        model.zero_grad()
        mlp_step(model)
    x = torch.randn(6, 16)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"'spare\.weight', 'spare\.bias'"):
            model(x, use_spare=False).mean().backward()
    else:
        model(x).mean().backward()
    for _ in range(2):
        model.zero_grad()
        mlp_step(model)
        assert_same_on_all_ranks(*(param.grad for param in model.parameters()))


def test_errors(level_and_pool):
    level_and_pool[1].run(_check_errors)


def _logging_data() -> dict[str, Any]:
    model = ReducerDDP(Mlp(), **SMALL_CAP)
    for _ in range(3):
        mlp_step(model)
    return model._get_ddp_logging_data()


def test_logging_data(level_and_pool):
    level, pool = level_and_pool
    for data in pool.run(_logging_data):
        assert data["torch_distributed_debug"] == level
        assert data["has_rebuilt_buckets"] == 1
        assert data["iteration"] == 2


def _check_join_and_hook() -> None:
    """A shadow's collectives must have the form of its peers' collectives, which DETAIL
    compares."""
    torch.manual_seed(dist.get_rank())
    for options in MODES.values():
        model = ReducerDDP(_TwoHeads(), **options, **SMALL_CAP)
        with model.join():
            for _ in range(2 + 2 * dist.get_rank()):
                model.zero_grad()
                mlp_step(model)
        assert_same_on_all_ranks(*model.parameters())


def test_uneven_inputs(level_and_pool):
    level_and_pool[1].run(_check_join_and_hook)


def _check_varying_use() -> None:
    """The same holds for steps in which the use of parameters varies."""
    torch.manual_seed(dist.get_rank())
    model = ReducerDDP(_TwoHeads(), find_unused_parameters=True, **SMALL_CAP)
    for number in range(6):
        model.zero_grad()
        use_spare = number % 3 == 0 or (number % 3 == 1 and dist.get_rank() == 0)
        model(torch.randn(6, 16), use_spare).mean().backward()
        assert (model.module.spare.weight.grad is None) == (number % 3 == 2)
        assert_same_on_all_ranks(model.module.body.weight.grad, model.module.head.weight.grad)


def test_varying_use(level_and_pool):
    level_and_pool[1].run(_check_varying_use)
