"""Usages in which DDP gives wrong gradients and raises no error: rows of docs/divergences.md.

Each test shows both. A gradient of DDP is not the average over ranks, although DDP has raised no
error up to then. Each gradient of ours is the average.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import OURS, Wrapper
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

_NUM_STEPS = 3


@dataclasses.dataclass
class _Output:
    """torch does not walk objects of this class, since it is no pytree node."""

    y: torch.Tensor


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


class _Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 3, 8, 8))


class _Objects(_Net):
    def forward(self, x: torch.Tensor) -> _Output:
        return _Output(super().forward(x))


class _OwnBackward(_Net):
    """Forward runs the backward of the loss, and returns the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


class _Recomputed(nn.Module):
    """Both uses of the layer are in reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def _plain(model: nn.Module) -> nn.Module:
    """The module of a wrapper, or the module itself: the reference has no wrapper."""
    return getattr(model, "module", model)


def _mean_of_squares(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _step(model: nn.Module, x: torch.Tensor, number: int) -> None:
    _mean_of_squares(model(x)).backward()


def _step_of_objects(model: nn.Module, x: torch.Tensor, number: int) -> None:
    _mean_of_squares(model(x).y).backward()


def _only_forward(model: nn.Module, x: torch.Tensor, number: int) -> None:
    model(x)


def _step_of_module(model: nn.Module, x: torch.Tensor, number: int) -> None:
    _step(_plain(model), x, number)


def _two_backwards(model: nn.Module, x: torch.Tensor, number: int) -> None:
    losses = [_mean_of_squares(model(x * scale)) for scale in (1.0, 0.5)]
    for loss in losses:
        loss.backward()


def _step_that_freezes(model: nn.Module, x: torch.Tensor, number: int) -> None:
    _plain(model).first.weight.requires_grad_(number != 1)
    _step(model, x, number)


def _grad_before_backward(model: nn.Module, x: torch.Tensor, number: int) -> None:
    loss = _mean_of_squares(model(x))
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def _wrap(module: nn.Module, wrapper: Callable[..., Wrapper], options: dict[str, Any]) -> Wrapper:
    return wrapper(module, **options)


def _move_channels(module: nn.Module, wrapper: Any, options: dict[str, Any]) -> Wrapper:
    return wrapper(module, **options).to(memory_format=torch.channels_last)


def _hook_with_strides(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The result is right, but its elements are two apart in memory."""

    def spread(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        average = future.value()
        return torch.stack((average, torch.zeros_like(average)), 1)[:, 0]

    return allreduce_hook(None, bucket).then(spread)


_hook_with_strides.__annotations__.clear()  # DDP refuses annotations that are text


def _register_hook(module: nn.Module, wrapper: Any, options: dict[str, Any]) -> Wrapper:
    model = wrapper(module, **options)
    model.register_comm_hook(None, _hook_with_strides)
    return model


def _pickle_after_a_step(module: nn.Module, wrapper: Any, options: dict[str, Any]) -> Wrapper:
    model = wrapper(module, **options)
    _step(model, torch.ones(4, 6), 0)
    return pickle.loads(pickle.dumps(model))


@dataclasses.dataclass(frozen=True)
class Usage:
    build: Callable[[], nn.Module] = _Net
    wrap: Callable[[nn.Module, Callable[..., Wrapper], dict[str, Any]], Wrapper] = _wrap
    step: Callable[[nn.Module, torch.Tensor, int], None] = _step
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


STATIC = {"static_graph": True}
USAGES: dict[str, Usage] = {
    "model.module": Usage(step=_step_of_module),
    "two backwards": Usage(step=_two_backwards),
    "reentrant checkpoints": Usage(_Recomputed),
    "a frozen parameter": Usage(step=_step_that_freezes),
    "a frozen parameter, static graph": Usage(step=_step_that_freezes, options=STATIC),
    "autograd.grad first, static graph": Usage(step=_grad_before_backward, options=STATIC),
    "a pickled wrapper, static graph": Usage(wrap=_pickle_after_a_step, options=STATIC),
    "a hook with strides": Usage(wrap=_register_hook),
    "channels last after wrapping": Usage(_Images, _move_channels),
    "outputs in objects, static graph": Usage(_Objects, step=_step_of_objects, options=STATIC),
    "forward with a backward": Usage(_OwnBackward, step=_only_forward),
}


def _num_wrong(usage: Usage, wrapper: Callable[..., Wrapper]) -> int:
    """The number of gradients that are not the average over ranks. Errors of DDP end the count."""
    torch.manual_seed(0)
    module = usage.build()
    plain = copy.deepcopy(module)
    model = usage.wrap(module, wrapper, usage.options)
    torch.manual_seed(dist.get_rank())
    num_wrong = 0
    for number in range(_NUM_STEPS):
        x = torch.randn(32 if usage.build is _Images else 4, 6)
        model.zero_grad()
        try:
            usage.step(model, x, number)
        except RuntimeError:
            if wrapper is DistributedDataParallel:
                break
            raise
        plain.zero_grad()
        usage.step(plain, x, number)
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            if expected.grad is not None:  # not frozen in this step
                dist.all_reduce(expected.grad)
                average = expected.grad / dist.get_world_size()
                num_wrong += not torch.allclose(ours.grad, average, rtol=1e-4, atol=1e-6)
    return num_wrong


def _check(name: str) -> None:
    num_wrong = torch.tensor(_num_wrong(USAGES[name], DistributedDataParallel))
    dist.all_reduce(num_wrong)
    assert num_wrong > 0, "DDP is right here: the row in docs/divergences.md is out of date"
    assert _num_wrong(USAGES[name], OURS) == 0


@pytest.mark.parametrize("name", USAGES)
def test_only_ours_is_right(ranks, name):
    ranks(2).run(_check, name)


def _penalty_grads(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(7)
    x = torch.randn(3, 6, dtype=torch.float64).requires_grad_()
    model.zero_grad()
    loss = model(x).square().mean() + model(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def _penalty(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    expected = _penalty_grads(copy.deepcopy(module))
    model = OURS(module, **options)
    for _ in range(_NUM_STEPS):
        for found, right in zip(_penalty_grads(model), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("mode", ["find_unused_parameters", "static_graph"])
def test_a_gradient_penalty_has_the_bits_of_the_bare_module(ranks, mode):
    ranks(2).run(_penalty, {mode: True})
