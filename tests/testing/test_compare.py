"""The comparison with DDP finds differences of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import (
    Trace,
    compare_traces,
    compare_with_ddp,
    record_training,
)


def _step(model: nn.Module, number: int) -> None:
    model(torch.randn(8, 16)).square().mean().backward()


def _build() -> nn.Module:
    return nn.Linear(16, 4)


def _compare() -> None:
    comparison = compare_with_ddp(_build, _step, gradient_as_bucket_view=True)
    comparison.raise_if_different()
    assert comparison.num_tensors == 5 * 4


def test_compare_with_ddp(ranks):
    ranks(2).run(_compare)


def _nudged(model: nn.Module, number: int) -> None:
    """Differs from _step in one bit of one gradient, in step 2 on rank 1."""
    _step(model, number)
    if number == 2 and dist.get_rank() == 1:
        grad = model.module.bias.grad
        grad[3] = torch.nextafter(grad[3], torch.tensor(torch.inf))


def _find_the_bit() -> list[str]:
    expected = record_training(_build, ReducerDDP, _step, num_steps=3)
    actual = record_training(_build, ReducerDDP, _nudged, num_steps=3)
    return [d for d in compare_traces(expected, actual).differences if "gradient" in d]


def test_one_bit_is_found(ranks):
    on_rank_0, on_rank_1 = ranks(2).run(_find_the_bit)
    assert on_rank_0 == []
    assert len(on_rank_1) == 1
    assert "step 2: gradient of module.bias differs in 1 of 4 elements" in on_rank_1[0]


@pytest.mark.parametrize(
    "left, right, expected",
    [
        (torch.tensor(0.0), torch.tensor(-0.0), "differs in 1 of 1 element,"),
        (torch.ones(2), None, "is dense against None"),
        (torch.ones(2), torch.ones(2).double(), "has dtype torch.float32 against torch.float64"),
        (torch.ones(2, 2), torch.ones(4), r"has shape \(2, 2\) against \(4,\)"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), r"has strides \(3, 1\) against \(1, 2\)"),
        (torch.ones(2), torch.ones(2).to_sparse(), "is dense against sparse"),
    ],
    ids=["signed zero", "missing", "dtype", "shape", "strides", "layout"],
)
def test_kinds_of_difference(left, right, expected):
    comparison = compare_traces(Trace(({"x": left},)), Trace(({"x": right},)))
    assert not comparison.identical
    with pytest.raises(AssertionError, match=f"step 0: x {expected}"):
        comparison.raise_if_different()


def test_lengths_differ():
    comparison = compare_traces(Trace(({},)), Trace(({}, {})))
    assert comparison.differences == ("1 step against 2",)


def test_nan_equals_itself():
    trace = Trace(({"x": torch.tensor([float("nan"), 1.0]), "y": None},))
    assert compare_traces(trace, trace).identical
