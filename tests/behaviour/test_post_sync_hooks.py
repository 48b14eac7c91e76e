"""What hooks and futures at the end of a step may do, and what remains of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddpx
from ddpx import ReducerDDP


def _check_futures_of_a_buffer_hook() -> None:
    """The end of a step waits for its futures, and keeps none of them."""
    model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    seen = []

    def hook(_: object, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future]:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        seen.append(weakref.ref(future))
        return [future]

    model._register_buffer_comm_hook(None, hook)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
    assert [future() for future in seen] == [None] * 3


def test_futures_of_a_buffer_hook(ranks):
    ranks(2).run(_check_futures_of_a_buffer_hook)


def _check_hook_that_removes_itself() -> None:
    model = ReducerDDP(nn.Linear(4, 4))
    seen = []

    def once(param: torch.Tensor) -> None:
        seen.append("once")
        handle.remove()

    handle = model.register_post_sync_hook(model.module.weight, once)
    model.register_post_sync_hook(model.module.bias, lambda param: seen.append("always"))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert seen == ["once", "always", "always"]


def test_a_post_sync_hook_may_remove_itself(ranks):
    ranks(2).run(_check_hook_that_removes_itself)


def _check_hook_that_holds_its_wrapper() -> None:
    def wrap() -> ReducerDDP:
        model = ReducerDDP(nn.Linear(4, 4))
        model.register_post_sync_hook(model.module.weight, lambda param: model.zero_grad())
        return model

    model = wrap()
    model(torch.ones(1, 4)).sum().backward()
    assert model.module.weight.grad is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_post_sync_hook_may_hold_its_wrapper(ranks):
    ranks(2).run(_check_hook_that_holds_its_wrapper)


def _check_hook_after_a_search() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPX_BUCKET_CAP_MB", "auto")
        model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen = []
    model.register_post_sync_hook(model.module[0].weight, lambda param: seen.append(param.grad))
    assert ddpx.plan_report(model).state != "done"
    with pytest.warns(UserWarning, match="has no effect on a wrapper with a communication hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ddpx.plan_report(model).state == "done"
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 1


def test_hooks_run_after_the_end_of_a_search(ranks):
    ranks(2).run(_check_hook_after_a_search)
