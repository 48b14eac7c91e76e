"""``TORCH_DISTRIBUTED_DEBUG=DETAIL``: torch's wrapper compares the calls of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx.testing import RankFailed, RankPool

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks started at that debug level, which torch reads when it makes a process group."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "DETAIL"
    try:
        with RankPool(2, "shm") as pool:
            yield pool
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before


def _check_sequence_numbers() -> None:
    group = dist.group.WORLD
    assert group is not None
    # the group itself supports this call for known backend names only
    wrapper = group._get_backend(torch.device("cpu"))
    assert type(wrapper).__name__ == "_ProcessGroupWrapper"
    before = wrapper._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(3), 0)
    dist.reduce(torch.ones(3), 0)  # runs through gloo
    assert wrapper._get_sequence_number_for_group() == before + 3


def test_sequence_numbers(pool):
    pool.run(_check_sequence_numbers)


def _check_trains() -> None:
    torch.manual_seed(0)
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = ddpx.ReducerDDP(nn.Linear(20, 20), bucket_cap_mb=0.001, **options)
        for number in range(3):
            model.zero_grad()
            inputs = torch.full((2, 20), float(dist.get_rank() + number))
            model(inputs).sum().backward()
            assert (model.module.weight.grad == 2 * number + 1).all()


def test_trains(pool):
    pool.run(_check_trains)


def _mismatch() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(4))


def test_mismatch_is_told(pool):
    with pytest.raises(RankFailed, match=r"(?is)mismatch.*all_?reduce|all_?reduce.*mismatch"):
        pool.run(_mismatch)
