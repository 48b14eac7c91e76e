"""Usages beside the plain step, compared with the bare module's averaged gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from reference import assert_grads_averaged, copy_from_rank_0
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP

Run = Callable[[nn.Module], None]
MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class CheckpointedNet(Net):
    """Part or all of it is recomputed in backward."""

    def __init__(self, use_reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recompute = functools.partial(checkpoint, use_reentrant=self.use_reentrant)
        if self.whole:
            x = recompute(self.first, x.requires_grad_())
            return recompute(self.third, torch.tanh(recompute(self.second, torch.tanh(x))))
        x = recompute(self.second, torch.tanh(self.first(x)))
        return self.third(torch.tanh(x))


def _input() -> torch.Tensor:
    return torch.randn(5, 8)


def _forward_forward_backward_backward(model: nn.Module) -> None:
    losses = [model(_input()).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()


def _one_forward_two_backwards(model: nn.Module) -> None:
    loss = model(_input()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _forward_in_eval_between(model: nn.Module) -> None:
    loss = model(_input()).square().mean()
    with torch.no_grad():
        model(_input())
    loss.backward()


def _no_grad_module_call(model: nn.Module) -> None:
    """The wrapped module, without the wrapper."""
    inner = model.module if isinstance(model, ReducerDDP) else model
    inner(_input()).square().mean().backward()


def _gradient_penalty(model: nn.Module) -> None:
    """autograd.grad with respect to inputs must not count as a backward."""
    x = _input().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(_input()).square().mean() + grad.square().mean()).backward()


def _two_losses_over_two_outputs(model: nn.Module) -> None:
    first, second = model(_input()), model(_input())
    (first.square().mean() + second.abs().mean()).backward()


USAGES: dict[str, Run] = {
    run.__name__.strip("_"): run
    for run in (
        _forward_forward_backward_backward,
        _one_forward_two_backwards,
        _forward_in_eval_between,
        _no_grad_module_call,
        _gradient_penalty,
        _two_losses_over_two_outputs,
    )
}


def _check(build: Callable[[], nn.Module], run: Run, options: dict, num_steps: int = 4) -> None:
    module = build()
    plain = copy_from_rank_0(module)
    ours = ReducerDDP(module, **options)
    for step in range(num_steps):
        seed = 1000 * dist.get_rank() + step
        for model in (ours, plain):
            model.zero_grad()
        torch.manual_seed(seed)
        run(ours)
        torch.manual_seed(seed)
        assert_grads_averaged(ours, plain, run)


def _check_usage(usage: str, mode: str) -> None:
    _check(Net, USAGES[usage], MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("usage", USAGES)
def test_usage(ranks, usage, mode):
    ranks(2).run(_check_usage, usage, mode)


def _check_checkpointed(use_reentrant: bool, whole: bool, bypass: bool, mode: str) -> None:
    def run(model: nn.Module) -> None:
        if bypass and isinstance(model, ReducerDDP):
            model = model.module
        model(_input()).square().mean().backward()

    _check(lambda: CheckpointedNet(use_reentrant, whole), run, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bypass", [False, True], ids=["wrapper", "module"])
@pytest.mark.parametrize("whole", [False, True], ids=["middle", "whole"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing(ranks, use_reentrant, whole, bypass, mode):
    ranks(2).run(_check_checkpointed, use_reentrant, whole, bypass, mode)


def _no_sync_accumulates_locally() -> None:
    ours = ReducerDDP(Net())
    torch.manual_seed(dist.get_rank())
    with ours.no_sync():
        assert not ours.require_backward_grad_sync
        ours(_input()).square().mean().backward()
    assert ours.require_backward_grad_sync
    grad = ours.module.first.weight.grad
    other = grad.clone()
    dist.broadcast(other, 0)
    assert torch.equal(grad, other) == (dist.get_rank() == 0)


def test_no_sync_accumulates_locally(ranks):
    ranks(2).run(_no_sync_accumulates_locally)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(8, 4)
        self.critic = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)


def _backward_per_output(model: nn.Module) -> None:
    actions, value = model(_input())
    actions.square().mean().backward()
    value.square().mean().backward()


def _check_disjoint_outputs(options: dict) -> None:
    _check(TwoOutputs, _backward_per_output, {"find_unused_parameters": True, **options})


@pytest.mark.parametrize("mode", ["default", "view"])
def test_disjoint_outputs_with_a_backward_each(ranks, mode):
    """The remedy of the README for default mode, which raises."""
    ranks(2).run(_check_disjoint_outputs, MODES[mode])


class _Scaled(nn.Module):
    """Autograd saves the buffer for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0 + dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def _check_saved_buffer() -> None:
    """The second forward broadcasts a buffer that autograd has saved in the first."""
    model = ReducerDDP(_Scaled())
    x = torch.ones(2, 4)
    (model(x) + model(x)).sum().backward()
    assert torch.equal(model.module.layer.bias.grad, torch.full((4,), 8.0))


def test_backward_after_two_forwards_with_buffers(ranks):
    ranks(2).run(_check_saved_buffer)


class _WithBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))


def _synchronized(wrapper: type[nn.Module]) -> list[bool]:
    """Whether each forward gives the buffer of rank 0 to rank 1."""
    model = wrapper(_WithBuffer())
    found = []
    for grad, sync in product((True, False), (True, False)):
        for _ in range(2):
            model.module.number.fill_(dist.get_rank())
            with nullcontext() if sync else model.no_sync(), torch.set_grad_enabled(grad):
                model(_input())
            found.append(not model.module.number.item())
    return found


def _check_synchronized_buffers() -> None:
    found = _synchronized(ReducerDDP)
    assert found == _synchronized(DistributedDataParallel)
    assert dist.get_rank() == 0 or len(set(found)) == 2


def test_a_local_forward_lets_the_next_one_keep_its_buffers(ranks):
    """A forward in no_sync(), or without gradients, does so."""
    ranks(2).run(_check_synchronized_buffers)


def _check_calls_without_effect() -> None:
    """DDP ignores a group that the rank is no member of."""
    for cls in (DistributedDataParallel, ReducerDDP):
        model = cls(Net())
        model._update_process_group(dist.GroupMember.NON_GROUP_MEMBER)
        assert model.process_group is dist.group.WORLD
        model = cls(Net(), find_unused_parameters=True)
        with pytest.warns(UserWarning, match="detect unused parameters automatically"):
            model._set_static_graph()


def test_calls_without_effect(ranks):
    ranks(2).run(_check_calls_without_effect)
