"""Forwards with other tensors in the places of parameters give DDP's bits: ``functional_call``,
weight drop, fast weights, hypernetworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Normed,
    Wrapper,
    assert_same_on_all_ranks,
    assert_trains_alike,
    mlp_step,
)
from modes import MODES
from torch import nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import parametrize

from ddpx import ReducerDDP


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _scaled(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: 1.5 * param for name, param in model.named_parameters()}


def _functional_loss(model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return _loss(functional_call(model, tensors, (torch.randn(6, 16),)))


@contextmanager
def _in_place(model: nn.Module, drop: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Puts a tensor in the place of one weight by hand, as weight drop does."""
    layer = model.module.mlp.second
    weight = layer._parameters["weight"]
    layer._parameters["weight"] = drop(weight)
    try:
        yield
    finally:
        layer._parameters["weight"] = weight


def _functional(model: Wrapper, number: int) -> None:
    _functional_loss(model, _scaled(model)).backward()


def _in_turn(model: Wrapper, number: int) -> None:
    (_functional if number % 2 else mlp_step)(model, number)


def _on_one_rank(model: Wrapper, number: int) -> None:
    (_functional if number % 2 == dist.get_rank() else mlp_step)(model, number)


def _with_buffers(model: Wrapper, number: int) -> None:
    buffers = {name: buffer.clone() + dist.get_rank() for name, buffer in model.named_buffers()}
    _functional_loss(model, {**_scaled(model), **buffers}).backward()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


def _some(model: Wrapper, number: int) -> None:
    own = dict(model.named_parameters())
    own["module.mlp.first.weight"] = own["module.mlp.first.weight"].relu()
    _functional_loss(model, own).backward()


def _weight_drop(model: Wrapper, number: int) -> None:
    """In every other step, the tensor is still in its place during the backward."""
    with _in_place(model, lambda weight: nn.functional.dropout(weight, 0.3)):
        loss = _loss(model(torch.randn(6, 16)))
        if number % 2:
            loss.backward()
    if number % 2 == 0:
        loss.backward()


def _without_sync_around_forward(model: Wrapper, number: int) -> None:
    with model.no_sync():
        loss = _functional_loss(model, _scaled(model))
    loss.backward()
    if number % 3 == 2:
        _functional(model, number)


def _without_sync(model: Wrapper, number: int) -> None:
    with model.no_sync():
        _functional(model, number)
    _functional(model, number)


def _fast_weights(model: Wrapper, number: int) -> None:
    """Two inner steps of MAML. The outer loss reaches the wrapped parameters."""
    fast = dict(model.named_parameters())
    for _ in range(2):
        with model.no_sync():
            loss = _functional_loss(model, fast)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        pairs = zip(fast.items(), grads, strict=True)
        fast = {name: tensor - 0.1 * grad for (name, tensor), grad in pairs}
    _functional_loss(model, fast).backward()


def _inner_grads_of_fast_weights(model: Wrapper, number: int) -> None:
    """Inner gradients of tensors that are not parameters, outside ``no_sync``."""
    fast = _scaled(model)
    loss = _functional_loss(model, fast)
    grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
    pairs = zip(fast.items(), grads, strict=True)
    fast = {name: tensor - 0.1 * grad for (name, tensor), grad in pairs}
    _functional_loss(model, fast).backward()


def _other_weights(model: Wrapper, number: int) -> None:
    """Every other forward runs with weights of their own, whose gradients nobody averages."""
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = _functional_loss(model, others)
    assert all(param.grad is None for param in model.parameters())
    loss.backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(other.grad is not None for other in others.values())
    _functional_loss(model, {name: p.detach() for name, p in others.items()})
    mlp_step(model)


STEPS = [
    _functional,
    _in_turn,
    _on_one_rank,
    _with_buffers,
    _some,
    _weight_drop,
    _without_sync,
    _without_sync_around_forward,
    _fast_weights,
    _inner_grads_of_fast_weights,
    _other_weights,
]
STEPS_BY_NAME = {step.__name__.strip("_"): step for step in STEPS}


# With a static graph, DDP fails if the first backward is local or reaches no parameter. With two
# ranks, all modes have the same bits.
NOT_STATIC_IN_DDP = (
    "without_sync",
    "without_sync_around_forward",
    "fast_weights",
    "inner_grads_of_fast_weights",
    "other_weights",
)


def _check(step: str, mode: str) -> None:
    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        fails = mode == "static" and step in NOT_STATIC_IN_DDP and cls is not ReducerDDP
        return cls(module, **({} if fails else MODES[mode]), **SMALL_CAP)

    assert_trains_alike(Normed, wrap, STEPS_BY_NAME[step], num_steps=6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", STEPS_BY_NAME)
def test_step(ranks, step, mode):
    ranks(2).run(_check, step, mode, timeout=60.0)


def _check_some_unused() -> None:
    """Detached tensors in the places of some parameters, which then get no gradient."""

    def step(model: Wrapper, number: int) -> None:
        own = dict(model.named_parameters())
        if number % 2 or dist.get_rank():
            own = {n: p.detach() if ".mlp.first" in n else p for n, p in own.items()}
        _functional_loss(model, own).backward()

    def wrap(cls: Callable[..., Wrapper], module: nn.Module) -> Wrapper:
        return cls(module, find_unused_parameters=True, **SMALL_CAP)

    assert_trains_alike(Normed, wrap, step, num_steps=6)
    model = ReducerDDP(Normed())
    with pytest.raises(RuntimeError, match=r"mlp\.first\.weight"):  # DDP: at the next forward
        step(model, 1)
    mlp_step(model)
    assert_same_on_all_ranks(*(param.grad for param in model.parameters()))


def test_some_unused(ranks):
    ranks(2).run(_check_some_unused)


def _check_hypernetwork(mode: str) -> None:
    """The gradients of the other network are averaged, and those of the wrapper stay None."""
    found = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        model = cls(Normed(), **MODES[mode])
        shapes = {name: param.shape for name, param in model.named_parameters()}
        total = sum(shape.numel() for shape in shapes.values())
        hyper = cls(nn.Linear(3, total))
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            hyper.zero_grad()
            parts = hyper(torch.ones(3)).split([shape.numel() for shape in shapes.values()])
            named = zip(shapes.items(), parts, strict=True)
            tensors = {name: part.view(shape) for (name, shape), part in named}
            _functional_loss(model, tensors).backward()
            assert_same_on_all_ranks(hyper.module.weight.grad)
            assert all(param.grad is None for param in model.parameters())
            found.append([hyper.module.weight.grad, model.module.norm.running_mean.clone()])
    ours, theirs = found[4:], found[:4]
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("mode", ["default", "view", "find unused"])
def test_hypernetwork(ranks, mode):
    ranks(2).run(_check_hypernetwork, mode)


def _train_in_join(model: Wrapper, step: Callable[[Wrapper, int], None]) -> list[torch.Tensor]:
    with model.join():
        for number in range(2 + 2 * dist.get_rank()):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            step(model, number)
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("step", ["functional", "in_turn", "weight_drop", "without_sync"])
def test_join(ranks, step):
    ranks(2).run(_check_join, step)


def _check_join(step: str) -> None:
    states = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        states.append(_train_in_join(cls(Normed(), **SMALL_CAP), STEPS_BY_NAME[step]))
        assert_same_on_all_ranks(*states[-1])
    assert all(map(torch.equal, *states))


def _check_join_without_gradients() -> None:
    """Ranks without inputs expect a step. A backward without gradients must not let them wait."""
    model = ReducerDDP(Normed())
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with model.join():
        for _ in range(1 + dist.get_rank()):
            with pytest.raises(RuntimeError, match=r"mlp\.first\.weight"):
                _functional_loss(model, others).backward()


def test_join_without_gradients(ranks):
    ranks(2).run(_check_join_without_gradients)


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _check_parametrized() -> None:
    """A parametrization before wrapping is as in DDP. After wrapping, DDP loses the parameter."""

    def build() -> nn.Module:
        module = Normed()
        parametrize.register_parametrization(module.mlp.second, "weight", _Doubled())
        return module

    assert_trains_alike(build, lambda cls, module: cls(module, **SMALL_CAP), mlp_step)
    assert_trains_alike(build, lambda cls, module: cls(module, **SMALL_CAP), _functional)
    model = ReducerDDP(Normed())
    parametrize.register_parametrization(model.module.mlp.second, "weight", _Doubled())
    for step in (mlp_step, _functional):
        for number in range(2):
            torch.manual_seed(10 * number + dist.get_rank())
            model.zero_grad()
            step(model, number)
            assert_same_on_all_ranks(*(param.grad for param in model.parameters()))


def test_parametrized(ranks):
    ranks(2).run(_check_parametrized)


def _check_mixed_precision() -> None:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    model = ReducerDDP(Mlp(), mixed_precision=_MixedPrecision(bf16, bf16, bf16))
    twin = ReducerDDP(Mlp(), mixed_precision=_MixedPrecision(bf16, bf16, bf16))
    twin.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    for number in range(3):
        for either in (model, twin):
            torch.manual_seed(10 * number + dist.get_rank())
            either.zero_grad()
            tensors = _scaled(model) if either is model else dict(twin.named_parameters())
            _functional_loss(either, tensors).backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None and mine.grad.dtype is torch.float32
            torch.testing.assert_close(mine.grad, 1.5 * other.grad, rtol=0.02, atol=1e-3)
            assert_same_on_all_ranks(mine.grad)


def test_mixed_precision(ranks):
    ranks(2).run(_check_mixed_precision)
