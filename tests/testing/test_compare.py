"""The comparison with DDP finds differences of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP
from ddpx.testing import (
    Comparison,
    Trace,
    compare_traces,
    compare_with_ddp,
    record_training,
)
from ddpx.testing.compare import summarize


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


class _Counting(nn.Module):
    """The gradient of the weight is the input. A buffer counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.weight * x


def _plain_sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _record_counting(set_to_none: bool | None) -> tuple[list[float], list[dict[str, float]]]:
    drawn = []

    def step(model: nn.Module, number: int) -> None:
        x = torch.randn(())
        drawn.append(x.item())
        model(x).backward()

    trace = record_training(
        _Counting,
        lambda module: module,
        step,
        num_steps=3,
        make_optimizer=_plain_sgd,
        set_to_none=set_to_none,
    )
    return drawn, [{name: x.item() for name, x in tensors.items()} for tensors in trace.steps]


@pytest.mark.parametrize("set_to_none", [True, False, None])
def test_a_trace_has_the_tensors_of_each_step(ranks, set_to_none: bool | None) -> None:
    per_rank = ranks(2).run(_record_counting, set_to_none)
    assert len({x for drawn, _ in per_rank for x in drawn}) == 2 * 3
    for drawn, steps in per_rank:
        grad = weight = 0.0
        for number, (x, step) in enumerate(zip(drawn, steps, strict=True)):
            grad = grad + x if set_to_none is None else x
            weight -= grad
            assert step == {
                "gradient of weight": pytest.approx(grad),
                "parameter weight": pytest.approx(weight),
                "buffer count": number + 1,
            }


def _compare_and_look(seed: int) -> list[tuple[str, bool, bool, float, float]]:
    seen = []

    def step(model: nn.Module, number: int) -> None:
        weight, x = model.module.weight, torch.randn(())
        seen.append(
            (
                type(model).__name__,
                model.find_unused_parameters,
                weight.grad is None,
                weight.item(),
                x.item(),
            )
        )
        model(torch.ones(())).backward()

    comparison = compare_with_ddp(
        _Counting,
        step,
        num_steps=2,
        make_optimizer=_plain_sgd,
        set_to_none=None,
        seed=seed,
        find_unused_parameters=True,
    )
    comparison.raise_if_different()
    return seen


def test_both_trainings_have_the_same_arguments(ranks) -> None:
    seen, other_seed = (ranks(1).run(_compare_and_look, seed)[0] for seed in (3, 4))
    steps = [(True, True, 0.0), (True, False, -1.0)]
    wrappers = ("DistributedDataParallel", "ReducerDDP")
    assert [each[:4] for each in seen] == [(name, *step) for name in wrappers for step in steps]
    draws = [each[4] for each in seen]
    assert draws[:2] == draws[2:] and draws[:2] != [each[4] for each in other_seed[:2]]


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
        (
            torch.tensor([1.0, 0.0]).to_sparse(),
            torch.sparse_coo_tensor([[0, 1]], [1.0, 0.0], (2,)),
            "has other indices$",
        ),
        (torch.tensor([True, False]), torch.tensor([True, True]), "differs in 1 of 2 elements$"),
        (
            torch.tensor([5, 7], dtype=torch.uint8),
            torch.tensor([6, 7], dtype=torch.uint8),
            "differs in 1 of 2 elements, largest difference 1$",
        ),
        (
            torch.ones(2).to(torch.float8_e5m2),
            torch.zeros(2).to(torch.float8_e5m2),
            "differs in 2 of 2 elements, largest difference 1$",
        ),
        (
            torch.tensor([2**60]),
            torch.tensor([2**60 + 1]),
            "differs in 1 of 1 element, largest difference 1$",
        ),
        (
            torch.tensor([1j]),
            torch.tensor([3j]),
            "differs in 1 of 1 element, largest difference 2$",
        ),
    ],
    ids=[
        "signed zero",
        "missing",
        "dtype",
        "shape",
        "strides",
        "layout",
        "indices",
        "bool",
        "unsigned",
        "8-bit float",
        "large integer",
        "complex",
    ],
)
def test_kinds_of_difference(left, right, expected):
    comparison = compare_traces(Trace(({"x": left},)), Trace(({"x": right},)))
    assert not comparison.identical
    with pytest.raises(AssertionError, match=f"step 0: x {expected}"):
        comparison.raise_if_different()


def test_lengths_differ():
    comparison = compare_traces(Trace(({},)), Trace(({}, {})))
    assert comparison.differences == ("1 step against 2",)


def test_names_differ():
    left, right = Trace(({"x": torch.ones(1)},)), Trace(({"y": torch.ones(1)},))
    assert compare_traces(left, right).differences == (
        "step 0: x is in one trace only",
        "step 0: y is in one trace only",
    )


def test_a_summary_names_the_ranks():
    total = summarize([Comparison(2, ("step 0: x",)), Comparison(3, ("step 0: y", "step 1: x"))])
    assert total == Comparison(5, ("rank 0, step 0: x", "rank 1, step 0: y", "rank 1, step 1: x"))


def test_nan_equals_itself():
    trace = Trace(({"x": torch.tensor([float("nan"), 1.0]), "y": None},))
    assert compare_traces(trace, trace).identical
