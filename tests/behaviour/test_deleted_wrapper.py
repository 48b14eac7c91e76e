"""A wrapper that is deleted between a forward and its backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx import ReducerDDP

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "sum": {"average": "sum"},
}


def _loss_of_deleted(module: nn.Module, local: bool = False, **options: Any) -> torch.Tensor:
    model = ReducerDDP(module, **options)
    with model.no_sync() if local else nullcontext():
        loss = model(torch.full((1, 1), 1.0 + dist.get_rank())).sum()
    del model
    gc.collect()
    return loss


def _check(mode: str) -> None:
    module = nn.Linear(1, 1, bias=False)
    loss = _loss_of_deleted(module, **MODES[mode])
    torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rank \d.* the wrapper of Linear was deleted"):
            loss.backward(retain_graph=True)
        assert module.weight.grad is None
    _loss_of_deleted(module, local=True, **MODES[mode]).backward()
    assert module.weight.grad.item() == 1.0 + dist.get_rank()


@pytest.mark.parametrize("mode", MODES)
def test_the_backward_raises(ranks, mode):
    """DDP keeps gradients local: in default mode silently."""
    ranks(2).run(_check, mode)


def _check_after_a_backward(mode: str) -> None:
    module = nn.Linear(1, 1, bias=False)
    model = ReducerDDP(module, **MODES[mode])
    inputs = torch.full((1, 1), 1.0 + dist.get_rank())
    first, second = model(inputs).sum(), model(inputs).sum()
    first.backward(retain_graph=True)
    averaged = module.weight.grad.clone()
    del model
    gc.collect()
    for loss in (first, second):
        with pytest.raises(RuntimeError, match=r"rank \d.* the wrapper of Linear was deleted"):
            loss.backward()
    assert torch.equal(module.weight.grad, averaged)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_raises(ranks, mode):
    """One backward has averaged, so no forward waits for its first backward."""
    ranks(2).run(_check_after_a_backward, mode)


class _Hooked(nn.Module):
    """Calls ``hook`` behind its output, before the backward has brought a gradient."""

    hook: Callable[[torch.Tensor], None] | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.hook is not None:
            inputs.register_hook(self.hook)
        return inputs.exp()


def _check_within_its_backward(mode: str, before_grads: bool) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), _Hooked())
    inputs = torch.full((1, 1), 1.0 + dist.get_rank())
    models = [ReducerDDP(module, **MODES[mode])]

    def delete(grad: torch.Tensor) -> None:
        models.clear()
        gc.collect()

    for local in (True, False):
        if before_grads:
            module[2].hook = delete
        else:
            handle = module[0].weight.register_hook(delete)
        with models[0].no_sync() if local else nullcontext():
            loss = models[0](inputs).sum()
        if local:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"rank \d.* wrapper of Sequential was deleted"):
                loss.backward()
        if before_grads:
            module[2].hook = None
        else:
            handle.remove()
        assert not models
        models.append(ReducerDDP(module, **MODES[mode]))
    module.zero_grad()
    models[0](inputs).sum().backward()
    averaged = module[0].weight.grad.clone()
    dist.all_reduce(averaged)
    assert torch.equal(averaged, 2 * module[0].weight.grad)


@pytest.mark.parametrize("before_grads", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_backward_that_deletes_its_wrapper_raises(ranks, mode, before_grads):
    """As a garbage collection may do, if the wrapper is in a cycle."""
    ranks(2).run(_check_within_its_backward, mode, before_grads)


def _check_after_finalization() -> None:
    module = nn.Linear(1, 1, bias=False)
    models = [ReducerDDP(module)]
    inputs = torch.full((1, 1), 1.0 + dist.get_rank(), requires_grad=True)
    models[0].require_manual_backward_finalization = True
    for _ in range(2):
        models[0](inputs).sum().backward()
        models[0].finalize_backward()
        module.zero_grad()

    def finalize(grad: torch.Tensor) -> None:
        models.pop().finalize_backward()
        gc.collect()

    before = inputs * 1
    loss = models[0](before * 1).sum()
    before.register_hook(finalize)
    loss.backward()
    assert module.weight.grad.item() == 1.5


def test_a_backward_that_has_averaged_may_delete_its_wrapper(ranks):
    ranks(2).run(_check_after_finalization)


def _check_where_nothing_is_lost() -> None:
    """Another wrapper averages, no other rank exists, or the script has ended the averages."""
    module = nn.Linear(1, 1, bias=False)
    model = ReducerDDP(module)
    loss = model(torch.full((1, 1), 1.0 + dist.get_rank())).sum()
    model = ReducerDDP(module)
    loss.backward()
    assert module.weight.grad.item() == 1.5
    del model
    gc.collect()
    module.zero_grad()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    _loss_of_deleted(module, process_group=alone).backward()
    assert module.weight.grad.item() == 1.0 + dist.get_rank()
    module.zero_grad()
    loss = ddpx.replicate(module)(torch.full((1, 1), 1.0 + dist.get_rank())).sum()
    ddpx.unreplicate(module)
    gc.collect()
    loss.backward()
    assert module.weight.grad.item() == 1.0 + dist.get_rank()


def test_a_backward_that_loses_nothing(ranks):
    ranks(2).run(_check_where_nothing_is_lost)
