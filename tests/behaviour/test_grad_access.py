"""Gradients without a plain ``backward()``: ``autograd.grad``, hooks, switches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP

NAMES = [f"{layer}.{kind}" for layer in ("first", "second", "third") for kind in ("weight", "bias")]


def _params(model: nn.Module, names: Sequence[str] = NAMES) -> list[nn.Parameter]:
    return [ref.bare(model).get_parameter(name) for name in names]


def _local_grads(
    slow: ref.SlowDDP, number: int, names: Sequence[str] = NAMES
) -> list[torch.Tensor]:
    ref.seed(number)
    return list(torch.autograd.grad(ref.loss_of(slow(ref.data())), _params(slow, names)))


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# ---- autograd.grad -----------------------------------------------------------------------------


def _grad_of_inputs(model: nn.Module, number: int) -> torch.Tensor:
    x = ref.data().requires_grad_()
    return torch.autograd.grad(ref.loss_of(model(x)), x)[0]


def _check_inputs(mode: str) -> None:
    """Gradients of inputs are local. They need no communication and leave no step open."""
    ours, slow = ref.make_pair(ref.Net, mode)
    for number in range(3):
        ref.seed(number)
        expected = _grad_of_inputs(slow, number)
        ref.seed(number)
        torch.testing.assert_close(_grad_of_inputs(ours, number), expected)
        if dist.get_rank() == 1:  # other ranks need not take part
            _grad_of_inputs(ours, number)
        assert all(param.grad is None for param in ours.parameters()) or number
        ref.check_steps(ours, slow, ref.plain_step, 1, first=number)


@ref.modes
def test_autograd_grad_of_inputs(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_inputs, mode)


def _gradient_penalty(model: nn.Module, number: int) -> None:
    x = ref.data().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    ref.backward(model, ref.loss_of(output) + (grad.norm(dim=1) - 1).square().mean())


def _gradient_penalty_of_a_second_forward(model: nn.Module, number: int) -> None:
    x = ref.data().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ref.backward(model, ref.loss_of(model(ref.data())) + grad.square().mean())


def _gradient_penalty_alone(model: nn.Module, number: int) -> None:
    """The second of two backwards reaches no bias of the last layer by itself."""
    x = ref.data().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ref.backward(model, grad.square().mean() + 0 * model(ref.data()).sum())


def _gradient_penalty_of_the_bare_module(model: nn.Module, number: int) -> None:
    x = ref.data().requires_grad_()
    (grad,) = torch.autograd.grad(ref.bare(model)(x).sum(), x, create_graph=True)
    ref.backward(model, ref.loss_of(model(ref.data())) + grad.square().mean())


PENALTIES = {
    step.__name__.strip("_"): step
    for step in (
        _gradient_penalty,
        _gradient_penalty_of_a_second_forward,
        _gradient_penalty_alone,
        _gradient_penalty_of_the_bare_module,
    )
}


def _check_penalty(name: str, mode: str) -> None:
    ours, slow = ref.make_pair(ref.Net, mode)
    ref.check_steps(ours, slow, PENALTIES[name])
    ref.check_steps(
        ours, slow, ref.plain_step if "static" not in mode else PENALTIES[name], 2, "zeros"
    )


@ref.modes
@pytest.mark.parametrize("name", PENALTIES)
def test_gradient_penalty(ranks, name, mode, world):
    ref.on_ranks(ranks, world, _check_penalty, name, mode)


# ---- synchronized_grads ------------------------------------------------------------------------


def _check_synchronized_grads(mode: str) -> None:
    """The mean over ranks, for params and for inputs. ``grad`` and the next step do not change."""
    ours, slow = ref.make_pair(ref.Net, mode)
    for number in range(3):
        ref.check_steps(ours, slow, ref.plain_step, 1, first=number)
        held = [param.grad.clone() for param in ours.parameters()]
        for names in (NAMES, ["third.bias", "first.weight"]):
            expected = [_mean(grad) for grad in _local_grads(slow, number, names)]
            ref.seed(number)
            loss = ref.loss_of(ours(ref.data()))
            found = ours.synchronized_grads(loss, _params(ours, names), retain_graph=True)
            torch.testing.assert_close(list(found), expected)
            again = ours.synchronized_grads(loss, _params(ours, names))
            torch.testing.assert_close(again, found, rtol=0, atol=0)
        x = ref.data().requires_grad_()
        (grad,) = ours.synchronized_grads(ref.loss_of(ours(x)), [x])
        torch.testing.assert_close(grad, _mean(_grad_of(slow, x)))
        assert all(
            torch.equal(param.grad, before)
            for param, before in zip(ours.parameters(), held, strict=True)
        )
        assert ours.require_backward_grad_sync
    ref.check_steps(ours, slow, ref.plain_step, 2, "keep")


def _grad_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(ref.loss_of(model(x)), x)[0]


@ref.modes
def test_synchronized_grads(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_synchronized_grads, mode)


class _WithOwnGradient(torch.autograd.Function):
    """A product whose gradient is a parameter itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return (weight * factor).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *ctx.saved_tensors, None


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, scale: float) -> torch.Tensor:
        return _WithOwnGradient.apply(self.weight, self.factor) * scale


def _check_synchronized_grads_are_detached() -> None:
    model = ReducerDDP(_Product())
    tensors = (param for param in [model.module.weight])  # any iterable
    (grad,) = model.synchronized_grads(model(2.0), tensors)
    assert torch.equal(grad, torch.ones(3)) and not grad.requires_grad
    assert torch.equal(model.module.factor, torch.ones(3))


def test_synchronized_grads_are_detached(ranks):
    ranks(2).run(_check_synchronized_grads_are_detached)


def _check_synchronized_grads_of_unused(mode: str) -> None:
    """None if no rank used the param, else zeros count.

    An error unless unused params are allowed.
    """
    ours, slow = ref.make_pair(ref.Net, mode)
    rank, world = dist.get_rank(), dist.get_world_size()
    outside = torch.ones(2, dtype=torch.float64, requires_grad=True)
    here_and_there = torch.ones(2, dtype=torch.float64, requires_grad=True)
    loss = ref.loss_of(ours(ref.data())) + (here_and_there.sum() * 6 if rank == 1 else 0)
    found = ours.synchronized_grads(loss, [outside, here_and_there], allow_unused=True)
    assert found[0] is None
    torch.testing.assert_close(found[1], torch.full_like(here_and_there, 6 / world))
    text = ref.error_of(ours.synchronized_grads, ref.loss_of(ours(ref.data())), [outside])
    assert "unused" in text.lower() or "not have been used" in text, text
    assert ours.require_backward_grad_sync
    ref.check_steps(ours, slow, ref.plain_step)


@ref.modes
def test_synchronized_grads_of_unused(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_synchronized_grads_of_unused, mode)


# ---- backward(inputs=...) ----------------------------------------------------------------------


def _backward_to(names: Sequence[str], model: nn.Module) -> None:
    x = ref.data().requires_grad_()
    loss = ref.loss_of(model(x))
    ref.backward(model, loss, inputs=[x, *_params(model, names)])


def _check_backward_inputs(mode: str) -> None:
    """Params in ``inputs`` are averaged or named by an error. Other params count as unused."""
    for names in (NAMES, ["third.weight"], ["first.bias", "second.bias"]):
        ours, slow = ref.make_pair(ref.Net, mode)
        ref.check_steps(ours, slow, ref.plain_step, 2)
        for number in range(2):
            ref.zero_grads("none", ours, slow)
            ref.seed(number)
            _backward_to(names, slow)
            ref.seed(number)
            text = ref.error_of(_backward_to, names, ours)
            left_out = [name for name in NAMES if name not in names]
            if "unused" in mode or not left_out:
                assert not text, text
                ref.assert_same(ours, slow)
            else:
                ref.assert_names(text, left_out)
                ref.assert_same(ours, slow, left_out)
        ref.assert_in_step()
        ref.check_steps(ours, slow, ref.plain_step, 2)


@ref.modes
def test_backward_with_inputs(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_backward_inputs, mode)


# ---- set_requires_gradient_sync, register_post_sync_hook ----------------------------------------


def _check_switch(mode: str) -> None:
    """The switch has the effect of no_sync(), without a block."""
    ours, slow = ref.make_pair(ref.Net, mode)

    def step(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
        if isinstance(model, ReducerDDP):
            model.set_requires_gradient_sync(False)
            assert not model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        ref.plain_step(model, number)
        if isinstance(model, ReducerDDP):
            local = [param.grad.clone() for param in model.parameters()]
            assert any(not torch.equal(grad, _mean(grad)) for grad in local)
            model.set_requires_gradient_sync(True)
            assert model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        ref.plain_step(model, number)

    for zero_style in ("none", "zeros", "keep"):
        ref.check_steps(ours, slow, step, 2, zero_style)
        ref.check_steps(ours, slow, ref.plain_step, 1, zero_style)


@ref.modes
def test_set_requires_gradient_sync(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_switch, mode)


def _check_post_sync_hooks(mode: str) -> None:
    """Each hook sees the averaged ``grad`` once per synchronized backward, until it is removed."""
    ours, slow = ref.make_pair(ref.Net, mode)
    module = ours.module
    names = {id(param): name for name, param in module.named_parameters()}
    seen: dict[str, dict[str, torch.Tensor]] = {"param": {}, "layer": {}, "wrapper": {}}

    def record(what: str, param: torch.Tensor) -> None:
        assert names[id(param)] not in seen[what], "called twice"
        seen[what][names[id(param)]] = param.grad.clone()

    handles = [
        ours.register_post_sync_hook(module.first.weight, lambda p: record("param", p)),
        ours.register_post_sync_hook(module.second, lambda p: record("layer", p)),
        ours.register_post_sync_hook(ours, lambda p: record("wrapper", p)),
    ]

    def check(layer: Sequence[str] = ("second.weight", "second.bias")) -> None:
        expected = dict(slow.module.named_parameters())
        wanted = {"param": {"first.weight"}, "layer": set(layer), "wrapper": set(NAMES)}
        assert {what: set(found) for what, found in seen.items()} == wanted
        for found in seen.values():
            for name, grad in found.items():
                torch.testing.assert_close(grad, expected[name].grad, msg=name)
            found.clear()

    for number in range(3):
        ref.zero_grads("none", ours, slow)
        for model in (slow, ours):
            ref.seed(number)
            with model.no_sync():
                ref.plain_step(model, number)
        assert not any(seen.values())
        ref.run_both(ours, slow, ref.plain_step, number)
        check()
    handles[1].remove()
    ref.zero_grads("none", ours, slow)
    ref.run_both(ours, slow, ref.plain_step, 7)
    check(layer=())
    for handle in handles:
        handle.remove()
    ref.check_steps(ours, slow, ref.plain_step)
    assert not any(seen.values())


@ref.modes
def test_post_sync_hooks(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_post_sync_hooks, mode)


def _check_post_sync_hook_steps(mode: str) -> None:
    """A hook may change ``grad``, release it, or raise. The next step is not affected."""
    ours, slow = ref.make_pair(ref.Net, mode)

    def halve_and_raise(param: torch.Tensor) -> None:
        param.grad.mul_(0.5)
        raise ValueError("my own check failed")

    def let_go(param: torch.Tensor) -> None:
        param.grad = None

    for number in range(3):
        handle = ours.register_post_sync_hook(ours.module.first.bias, halve_and_raise)
        ref.zero_grads("none", ours, slow)
        ref.seed(number)
        ref.plain_step(slow, number)
        ref.seed(number)
        with pytest.raises(ValueError, match="my own check failed"):
            ref.plain_step(ours, number)
        slow.module.first.bias.grad.mul_(0.5)
        ref.assert_same(ours, slow)
        handle.remove()
        handle = ours.register_post_sync_hook(ours, let_go)
        ref.run_both(ours, slow, ref.plain_step, number)
        assert all(param.grad is None for param in ours.parameters())
        handle.remove()
        ref.check_steps(ours, slow, ref.plain_step, 1, first=number)
    with pytest.raises(ValueError, match="register_post_sync_hook"):
        ours.register_post_sync_hook(nn.Linear(2, 2), let_go)


@ref.modes
def test_post_sync_hooks_that_interfere(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_post_sync_hook_steps, mode)


def _check_callback_of_a_script(mode: str) -> None:
    """A callback that the first gradient's hook queues runs after the averages are written."""
    ours, slow = ref.make_pair(ref.Net, mode)
    param = ours.module.third.bias
    seen: list[torch.Tensor] = []

    def queue(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(param.grad.clone())
        )

    param.register_post_accumulate_grad_hook(queue)
    for number in range(3):
        ref.check_steps(ours, slow, ref.plain_step, 1, first=number)
        assert torch.equal(seen[number], param.grad)


@ref.modes
def test_callbacks_of_a_script_see_averages(ranks, mode, world):
    ref.on_ranks(ranks, world, _check_callback_of_a_script, mode)
