"""``torch.autograd.grad`` of wrapped parameters: local gradients, with DDP's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, Wrapper, mlp_step
from modes import MODES
from slow_ddp import assert_in_step, assert_names, error_of
from torch import nn
from torch.func import functional_call

from ddpx import ReducerDDP
from ddpx.testing import compare_traces, record_training

ALL_MODES = MODES | {
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "find unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
NAMES = [f"{layer}.{kind}" for layer in ("first", "second", "third") for kind in ("weight", "bias")]


def _params(model: Wrapper, *names: str) -> list[nn.Parameter]:
    return [model.module.get_parameter(name) for name in names or NAMES]


def _output(model: Wrapper) -> torch.Tensor:
    return model(torch.randn(6, 16))


def _grad(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor], **options: Any
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, list(tensors), **options)


# ---- steps that train with DDP -------------------------------------------------------------------


def _adaptive_weight(model: Wrapper, number: int) -> None:
    """The weight of a loss comes from norms of local gradients of the last layer."""
    output = _output(model)
    first, second = output.abs().mean(), -output.square().mean()
    last = _params(model, "third.weight")
    (a,) = _grad(first, last, retain_graph=True)
    (b,) = _grad(second, last, retain_graph=True)
    (first + (a.norm() / (b.norm() + 1e-4)).detach() * second).backward()


def _before_backward(model: Wrapper, number: int) -> None:
    loss = _output(model).square().mean()
    grads = _grad(loss, _params(model), retain_graph=True)
    (loss * (1 + sum(grad.norm() for grad in grads)).detach()).backward()


def _after_backward(model: Wrapper, number: int) -> None:
    loss = _output(model).square().mean()
    loss.backward(retain_graph=True)
    _grad(loss, _params(model))


def _of_another_forward_after_backward(model: Wrapper, number: int) -> None:
    mlp_step(model)
    _grad(_output(model).sum(), _params(model))


def _of_one_output_of_two(model: Wrapper, number: int) -> None:
    """The output of autograd.grad has its backward later."""
    first, second = _output(model), _output(model)
    _grad(first.sum(), _params(model), retain_graph=True)
    (first.square().mean() + second.square().mean()).backward()


def _penalty_of_inputs(model: Wrapper, number: int) -> None:
    x = torch.randn(6, 16, requires_grad=True)
    output = model(x)
    (grad,) = _grad(output.sum(), [x], create_graph=True)
    (output.square().mean() + (grad.norm(dim=1) - 1).square().mean()).backward()


def _penalty_of_params(model: Wrapper, number: int) -> None:
    """The penalty is a function of local gradients. Its gradients are averaged."""
    output = _output(model)
    grads = _grad(output.square().sum(), _params(model), create_graph=True)
    (output.mean() + sum(grad.square().mean() for grad in grads)).backward()


def _penalty_alone(model: Wrapper, number: int) -> None:
    """The backward reaches the output through the graph of the gradients."""
    grads = _grad(_output(model).pow(3).sum(), _params(model), create_graph=True)
    (1e-3 * sum(grad.square().mean() for grad in grads)).backward()


def _inner_loop(model: Wrapper, number: int) -> None:
    """Inner steps of MAML, with new tensors. The first one asks for wrapped parameters."""
    fast = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, fast, torch.randn(6, 16)).square().mean()
        grads = _grad(loss, fast.values(), create_graph=True)
        fast = {n: t - 0.1 * g for (n, t), g in zip(fast.items(), grads, strict=True)}
    functional_call(model, fast, torch.randn(6, 16)).square().mean().backward()


def _batched(model: Wrapper, number: int) -> None:
    output = _output(model)
    rows = torch.eye(4).unsqueeze(1).expand(4, 6, 4)
    (jacobian,) = torch.autograd.grad(
        output, _params(model, "third.bias"), rows, is_grads_batched=True, retain_graph=True
    )
    (output.square().mean() * jacobian.norm().detach()).backward()


STEPS = [
    _adaptive_weight,
    _before_backward,
    _after_backward,
    _of_another_forward_after_backward,
    _of_one_output_of_two,
    _penalty_of_inputs,
    _penalty_of_params,
    _penalty_alone,
    _inner_loop,
    _batched,
]
STEPS_BY_NAME = {step.__name__.strip("_"): step for step in STEPS}


def _wrap(cls: Callable[..., Wrapper], module: nn.Module, mode: str) -> Wrapper:
    """With a static graph, DDP leaves the gradients of a backward behind autograd.grad local.

    With two ranks, the other modes have the same bits.
    """
    fails = "static" in mode and cls is not ReducerDDP
    return cls(module, **({} if fails else ALL_MODES[mode]), **SMALL_CAP)


def _check_step(step: Callable[[Wrapper, int], None], mode: str) -> None:
    for set_to_none in (True, False):
        traces = [
            record_training(
                Mlp,
                lambda module, cls=cls: _wrap(cls, module, mode),  # type: ignore[misc]
                step,
                set_to_none=set_to_none,
            )
            for cls in WRAPPERS
        ]
        compare_traces(*traces).raise_if_different()
    assert_in_step()


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("step", STEPS_BY_NAME)
def test_trains_as_with_ddp(ranks, step, mode, world):
    if "static" in mode and world > 2:
        pytest.skip("the bits of DDP depend on the mode, and its static graph is wrong here")
    ranks(world).run(_check_step, STEPS_BY_NAME[step], mode, timeout=60.0)


def _check_local(mode: str) -> None:
    """The gradients are those of the bare module, and ``grad`` does not change."""
    torch.manual_seed(0)
    model = ReducerDDP(Mlp(), **ALL_MODES[mode], **SMALL_CAP)
    for _ in range(3):
        x = torch.randn(6, 16)
        loss = model(x).square().sum()
        held = [param.grad for param in model.parameters()]
        found = _grad(loss, _params(model))
        expected = _grad(model.module(x).square().sum(), _params(model))
        assert all(map(torch.equal, found, expected))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        if dist.get_rank() == 1:  # other ranks need not take part
            _grad(_output(model).sum(), _params(model))
        model.zero_grad()
        mlp_step(model)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_gradients_are_local(ranks, mode, world):
    ranks(world).run(_check_local, mode)


# ---- local gradients that change parameters ------------------------------------------------------


def _step_with(
    model: Wrapper, grads: Sequence[torch.Tensor], *names: str, fused: bool = False
) -> None:
    """An optimizer applies the gradients."""
    params = _params(model, *names)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    torch.optim.SGD(params, 0.1, fused=fused).step()
    model.zero_grad()


def _step_fused(model: Wrapper, grads: Sequence[torch.Tensor], *names: str) -> None:
    """A fused optimizer does not change the versions of parameters."""
    _step_with(model, grads, *names, fused=True)


def _change_data(model: Wrapper, grads: Sequence[torch.Tensor], *names: str) -> None:
    for param, grad in zip(_params(model, *names), grads, strict=True):
        param.data.sub_(grad, alpha=0.1)


def _change_in_place(model: Wrapper, grads: Sequence[torch.Tensor], *names: str) -> None:
    with torch.no_grad():
        for param, grad in zip(_params(model, *names), grads, strict=True):
            param -= 0.1 * grad


def _check_applied(apply: Callable[..., None], mode: str) -> None:
    """The next forward raises on every rank, names the parameters, and has the remedies.

    It raises once. No later step raises without another such call.
    """
    model = ReducerDDP(Mlp(), **ALL_MODES[mode], **SMALL_CAP)
    for names in (["second.bias"], NAMES):
        for _ in range(2):
            model.zero_grad()
            apply(model, _grad(_output(model).square().sum(), _params(model, *names)), *names)
            text = error_of(_output, model)
            assert_names(text, names, "synchronized_grads", "no_sync()", "torch.autograd.grad()")
            assert "first.weight" in names or "first.weight" not in text
        mlp_step(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        mlp_step(model)
    assert_in_step()


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("apply", [_step_with, _step_fused, _change_data, _change_in_place])
def test_applied_local_gradients_are_an_error(ranks, apply, mode):
    ranks(2).run(_check_applied, apply, mode)


def _check_loop_of_local_steps(num_averaged: int, set_to_none: bool) -> None:
    """Training by autograd.grad alone raises soon, also after steps that averaged."""
    model = ReducerDDP(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(num_averaged):
        optimizer.zero_grad()
        mlp_step(model)
        optimizer.step()

    def train() -> None:
        for _ in range(3):
            grads = _grad(_output(model).square().sum(), _params(model))
            optimizer.zero_grad(set_to_none=set_to_none)
            for param, grad in zip(_params(model), grads, strict=True):
                param.grad = grad
            optimizer.step()

    assert_names(error_of(train), NAMES, "synchronized_grads")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_averaged", [0, 3])
def test_training_by_local_gradients_is_an_error(ranks, num_averaged, set_to_none):
    ranks(2).run(_check_loop_of_local_steps, num_averaged, set_to_none)


def _in_no_sync(model: ReducerDDP) -> None:
    with model.no_sync():
        grads = _grad(_output(model).square().sum(), _params(model))
    _change_in_place(model, grads)


def _backward_part_in_no_sync(model: ReducerDDP) -> None:
    loss = _output(model).square().sum()
    with model.no_sync():
        grads = _grad(loss, _params(model))
    _change_in_place(model, grads)


def _averaged_by_ddpx(model: ReducerDDP) -> None:
    grads = model.synchronized_grads(_output(model).square().sum(), _params(model))
    _change_in_place(model, [grad for grad in grads if grad is not None])


def _reset(model: ReducerDDP) -> None:
    """For a script that averages the gradients itself, or loads a checkpoint."""
    grads = _grad(_output(model).square().sum(), _params(model))
    for grad in grads:
        dist.all_reduce(grad)
    _change_in_place(model, grads)
    model.reset()


def _changed_by_an_average(model: ReducerDDP) -> None:
    """The optimizer applies the average of an earlier backward."""
    mlp_step(model)
    _grad(_output(model).sum(), _params(model))
    torch.optim.SGD(model.parameters(), 0.1).step()


def _changed_by_a_fused_average(model: ReducerDDP) -> None:
    """The step of the fused optimizer applies the average, and comes before autograd.grad."""
    _grad(_output(model).sum(), _params(model))
    mlp_step(model)
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()
    _grad(_output(model).sum(), _params(model))


def _averaged_later(model: ReducerDDP) -> None:
    output = _output(model)
    _grad(output.sum(), _params(model))
    mlp_step(model)
    torch.optim.SGD(model.parameters(), 0.1).step()


def _of_another_tensor(model: ReducerDDP) -> None:
    x = torch.randn(6, 16, requires_grad=True)
    _grad(model(x).sum(), [x])
    _change_in_place(model, [torch.zeros_like(param) for param in _params(model)])


HARMLESS = [
    _in_no_sync,
    _backward_part_in_no_sync,
    _averaged_by_ddpx,
    _reset,
    _changed_by_an_average,
    _changed_by_a_fused_average,
    _averaged_later,
    _of_another_tensor,
]


def _check_harmless(change: Callable[[ReducerDDP], None], mode: str) -> None:
    model = ReducerDDP(Mlp(), **ALL_MODES[mode], **SMALL_CAP)
    for _ in range(4):
        change(model)
        mlp_step(model)
        model.zero_grad()
    assert_in_step()


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("change", HARMLESS)
def test_no_error(ranks, change, mode):
    ranks(2).run(_check_harmless, change, mode)


class _Gated(nn.Module):
    """Rank 1 leaves the gate out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.gate(x)


def _check_averaged_by_peers() -> None:
    """A gradient that only peers contributed to is an average, too."""
    model = ReducerDDP(_Gated(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        body, gate = model(torch.randn(3, 4))
        torch.autograd.grad(gate.sum(), model.module.gate.weight, retain_graph=True)
        (body.sum() + (gate.sum() if dist.get_rank() == 0 else 0)).backward()
        assert model.module.gate.weight.grad is not None
        optimizer.step()


def test_average_of_peers_alone(ranks):
    ranks(2).run(_check_averaged_by_peers)


def _check_alone() -> None:
    """One rank has nobody to diverge from."""
    model = ReducerDDP(Mlp())
    for _ in range(3):
        _change_in_place(model, _grad(_output(model).square().sum(), _params(model)))


def test_one_rank(ranks):
    ranks(1).run(_check_alone)
