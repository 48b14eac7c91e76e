"""Trainings with ``average=``, and the same trainings in one process over all data."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import ReducerDDP

SMALL_CAP = 0.0005  # several buckets, also for the small model here
TOLERANCE = 1e-12  # relative to the largest element of a gradient, in float64


class Net(nn.Module):
    """Has a branch that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.branch = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.branch(hidden).relu() if branch else hidden)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def num_items(step: int, rank: int, micro_step: int) -> int:
    """How many items a micro-batch has. Some ranks have none, but never all of them."""
    return (7 * step + 5 * rank + 3 * micro_step) % 4 + (rank == 0)


def batch(step: int, rank: int, micro_step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + micro_step)
    size = num_items(step, rank, micro_step)
    return torch.randn(size, 6, dtype=torch.float64, generator=generator)


def loss_sum(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def in_one_process(
    module: nn.Module, step: int, ranks: Sequence[int], num_micro_steps: int, average: str
) -> list[torch.Tensor | None]:
    """The gradients of one backward over the items of all ranks and micro-steps."""
    module = copy.deepcopy(module)
    module.zero_grad()
    parts = [batch(step, rank, m) for rank in ranks for m in range(num_micro_steps)]
    items = torch.cat(parts)
    divisor = {"sum": 1, "mean": len(ranks), "weights": len(items)}[average]
    (loss_sum(module(items)) / divisor).backward()
    return gradients(module)


def train_step(model: ReducerDDP, step: int, num_micro_steps: int, weighs: bool) -> None:
    """One averaged backward after local micro-steps."""
    for micro_step in range(num_micro_steps):
        items = batch(step, dist.get_rank(), micro_step)
        local = micro_step < num_micro_steps - 1
        with model.no_sync() if local else nullcontext():
            if weighs:
                ddpx.set_weight(model, len(items))
            loss_sum(model(items)).backward()


def relative_error(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]
) -> float:
    """The largest error of an element, relative to the largest element of its gradient."""
    errors = [0.0]
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            error = (left.double() - right.double()).abs().max().item()
            size = right.double().abs().max().item()
            errors.append(0.0 if error == 0 else error / size if size else math.inf)
    return max(errors)


def assert_close(
    actual: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    tolerance: float = TOLERANCE,
) -> None:
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.1e}"


def compare_steps(num_micro_steps: int, average: str, hook: Any = None, **options: Any) -> None:
    """Compares each step with one process over all data."""
    error = worst_error(num_micro_steps, average, hook, **options)
    assert error <= TOLERANCE, f"relative error {error:.1e}"


def worst_error(
    num_micro_steps: int, average: str, hook: Any = None, num_steps: int = 4, **options: Any
) -> float:
    """The largest relative error of all steps, compared with one process over all data."""
    module = make_module()
    model = ReducerDDP(module, bucket_cap_mb=SMALL_CAP, average=average, **options)
    if hook is not None:
        hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    errors = []
    for step in range(num_steps):
        optimizer.zero_grad()
        ranks = range(dist.get_world_size())
        expected = in_one_process(module, step, ranks, num_micro_steps, average)
        train_step(model, step, num_micro_steps, average == "weights")
        errors.append(relative_error(gradients(module), expected))
        optimizer.step()
    return max(errors)


def outcome_of(weight: float | None, **options: Any) -> str:
    """What a weight does that all ranks pass: which call raises, or what the gradients are."""
    module = make_module()
    model = ReducerDDP(module, average="weights", **options)
    call = "set_weight()"
    try:
        if weight is not None:
            ddpx.set_weight(model, weight)
        call = "forward"
        loss = loss_sum(model(torch.ones(3, 6, dtype=torch.float64)))
        call = "backward"
        loss.backward()
    except (RuntimeError, ValueError) as error:
        assert "set_weight(" in str(error), error
        found = [grad for grad in gradients(module) if grad is not None]
        all_nan = bool(found) and all(bool(grad.isnan().all()) for grad in found)
        return f"{call} raises" + (", gradients are NaN" if all_nan else "")
    return "no error"


def weighted_step(model: ReducerDDP, weight: object) -> None:
    """Clears the gradients. Then one forward with this weight, and its backward."""
    model.zero_grad()
    add_gradients(model, weight)


def add_gradients(model: ReducerDDP, weight: object) -> None:
    ddpx.set_weight(model, weight)  # type: ignore[arg-type]
    loss_sum(model(torch.ones(3, 6, dtype=torch.float64))).backward()


def right_step(model: ReducerDDP, step: int) -> None:
    """One step with ``average="weights"`` after cleared gradients, compared with one process."""
    model.zero_grad()
    expected = in_one_process(model.module, step, range(dist.get_world_size()), 1, "weights")
    train_step(model, step, 1, weighs=True)
    assert_close(gradients(model.module), expected)
