"""A script that changes params before their gradients are averaged gets an error by name.

Under DDP, ranks then have different params, silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

MODES = {**ref.MODES, "batched": {"batched_grad_copy": True}}
modes = pytest.mark.parametrize("mode", MODES)


def _step_in_hooks(module: nn.Module, clear: bool) -> None:
    """An optimizer for each param, as in torch's tutorial on optimizers within a backward."""
    for param in module.parameters():
        optimizer = torch.optim.Adam([param], foreach=False)

        def update(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            if clear:
                param.grad = None

        param.register_post_accumulate_grad_hook(update)


def _differ_between_ranks(module: nn.Module) -> bool:
    flat = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return not torch.equal(highest, lowest)


def _run_step(model: nn.Module, number: int) -> None:
    ref.seed(number)
    ref.loss_of(model(ref.data())).backward()


def _check_hook(mode: str, clear: bool) -> None:
    module = ref.build_same(ref.Net)
    model = ReducerDDP(module, bucket_cap_mb=ref.SMALL_CAP, **MODES[mode])
    _run_step(model, 0)
    _step_in_hooks(module, clear)
    for number in range(1, 4):
        model.zero_grad()
        text = ref.error_of(_run_step, model, number)
        names = [name for name, _ in module.named_parameters()]
        ref.assert_names(text, names, "before the gradients were averaged")
    assert _differ_between_ranks(module)
    with model.no_sync():
        _run_step(model, 4)


@modes
@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "kept"])
def test_optimizer_in_a_hook(ranks, mode, clear):
    ref.on_ranks(ranks, 2, _check_hook, mode, clear)


def _check_ddp() -> None:
    model = DistributedDataParallel(ref.build_same(ref.Net))
    _step_in_hooks(model.module, clear=True)
    _run_step(model, 0)
    assert _differ_between_ranks(model.module)


def test_ddp_is_silent(ranks):
    ref.on_ranks(ranks, 2, _check_ddp)


def _check_alone(mode: str) -> None:
    module = ref.build_same(ref.Net)
    _step_in_hooks(module, clear=True)
    model = ReducerDDP(module, **MODES[mode])
    for number in range(3):
        _run_step(model, number)


@modes
def test_one_rank_may_do_so(ranks, mode):
    ref.on_ranks(ranks, 1, _check_alone, mode)


def _check_manual(mode: str, finalize_first: bool) -> None:
    module = ref.build_same(ref.Net)
    model = ReducerDDP(module, bucket_cap_mb=ref.SMALL_CAP, **MODES[mode])
    model.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        _run_step(model, number)
        calls: list[Callable[[], Any]] = [model.finalize_backward, optimizer.step]
        expects_error = contextlib.nullcontext()
        if not finalize_first:
            calls.reverse()
            expects_error = pytest.raises(RuntimeError, match="before the gradients were averaged")  # type: ignore[assignment]
        with expects_error:
            for call in calls:
                call()
    assert _differ_between_ranks(module) != finalize_first


@modes
@pytest.mark.parametrize("finalize_first", [True, False])
def test_optimizer_before_finalize_backward(ranks, mode, finalize_first):
    ref.on_ranks(ranks, 2, _check_manual, mode, finalize_first)


def _check_each_is_named_once() -> None:
    """A hook changes each param. Then the script changes each param before finalize_backward()."""
    module = ref.build_same(ref.Net)
    model = ReducerDDP(module)
    model.require_manual_backward_finalization = True
    _step_in_hooks(module, clear=False)
    _run_step(model, 0)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
    text = ref.error_of(model.finalize_backward)
    assert f"changed {len(list(module.parameters()))} parameters before" in text, text


def test_each_param_is_named_once(ranks):
    ref.on_ranks(ranks, 2, _check_each_is_named_once)


def _look(_: torch.Tensor) -> None:
    """A hook that changes no param."""


class _Renormalized(nn.Module):
    """The forward changes the weight of the embedding in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.arange(6)).sum() * x.sum()


def _check_changes_of_forward(mode: str) -> None:
    model = ReducerDDP(ref.build_same(_Renormalized), **MODES[mode])
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_look)
    for number in range(3):
        _run_step(model, number)
        with torch.no_grad():
            model.module.embedding.weight.mul_(2.0)


@modes
def test_a_forward_may_change_params(ranks, mode):
    ref.on_ranks(ranks, 2, _check_changes_of_forward, mode)


def _check_changes_between(mode: str) -> None:
    model = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=ref.SMALL_CAP, **MODES[mode])
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_look)
    for number in range(3):
        ref.seed(number)
        loss = ref.loss_of(model(ref.data()))
        with torch.no_grad():
            model.module.first.bias.clamp_(-1.0, 1.0)
        loss.backward()


@modes
def test_a_script_may_change_params_between_forward_and_backward(ranks, mode):
    ref.on_ranks(ranks, 2, _check_changes_between, mode)


def _check_reset(mode: str) -> None:
    """The step that reset() drops is not compared with later steps."""
    model = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=ref.SMALL_CAP, **MODES[mode])
    _run_step(model, 0)
    model.require_manual_backward_finalization = True
    _run_step(model, 1)
    model.reset()
    model.require_manual_backward_finalization = False
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    model.zero_grad()
    _run_step(model, 2)


@modes
def test_reset_ends_the_watch(ranks, mode):
    ref.on_ranks(ranks, 2, _check_reset, mode)
