"""Weights that are forgotten, although gradients of their forwards may remain."""

from __future__ import annotations

import averages
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddpx
from ddpx import ReducerDDP

_LOST = r"weights of earlier forwards are forgotten, because .* ddpx\.reset\(model\)"


def _reset_forgets() -> None:
    model = ReducerDDP(averages.make_module(), average="weights")
    with model.no_sync():
        averages.weighted_step(model, 1000)
    ddpx.reset(model)
    averages.right_step(model, 0)


def test_reset_forgets_local_weights(ranks):
    ranks(2).run(_reset_forgets)


def _reset_with_gradients(clears_first: bool) -> None:
    """Gradients of a micro-step must not remain when reset() forgets its weight."""
    model = ReducerDDP(averages.make_module(), average="weights")
    with model.no_sync():
        averages.weighted_step(model, 1000)
    ddpx.reset(model)
    ddpx.set_weight(model, 3)
    loss = averages.loss_sum(model(torch.ones(3, 6, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match=r"weights of earlier forwards .* ddpx\.reset\(model\)"):
        loss.backward()
    calls = [lambda: model.zero_grad(set_to_none=False), lambda: ddpx.reset(model)]
    for call in calls if clears_first else reversed(calls):
        call()
    ranks = range(dist.get_world_size())
    expected = averages.in_one_process(model.module, 0, ranks, 1, "weights")
    averages.train_step(model, 0, 1, weighs=True)
    averages.assert_close(averages.gradients(model.module), expected)


@pytest.mark.parametrize("clears_first", [True, False])
def test_reset_does_not_lose_the_weights_of_gradients(ranks, clears_first):
    ranks(2).run(_reset_with_gradients, clears_first)


def _divide_by_zero(grad: object) -> None:
    raise ZeroDivisionError


def _lost_in_an_averaged_backward() -> None:
    """The gradients of the micro-step remain, without its weight."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights", bucket_cap_mb=averages.SMALL_CAP)
    for _ in range(2):
        with model.no_sync():
            averages.weighted_step(model, 3)
        handle = module.first.weight.register_hook(_divide_by_zero)
        ddpx.set_weight(model, 3)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        handle.remove()
        ddpx.set_weight(model, 3)
        with pytest.raises(
            RuntimeError, match="earlier forwards are forgotten, because a backward raised"
        ):
            model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        model.zero_grad()
        averages.right_step(model, 0)


def test_weights_that_are_lost_in_an_averaged_backward(ranks):
    ranks(2).run(_lost_in_an_averaged_backward)


def _reset_before_finalization() -> None:
    """The step that reset() drops has taken the weights already."""
    model = ReducerDDP(averages.make_module(), average="weights")
    model.require_manual_backward_finalization = True
    with model.no_sync():
        averages.weighted_step(model, 3)
    averages.add_gradients(model, 5)
    ddpx.reset(model)
    with pytest.raises(RuntimeError, match=_LOST):
        averages.add_gradients(model, 4)


def test_reset_before_finalization(ranks):
    ranks(2).run(_reset_before_finalization)


def _failed_hook() -> None:
    """The error comes after the backward, when the step waits for the hook."""
    model = ReducerDDP(averages.make_module(), average="weights")
    fails = [False]

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails[0]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_exception(ValueError("planted"))
            return future
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    averages.right_step(model, 0)
    with model.no_sync():
        averages.weighted_step(model, 3)
    fails[0] = True
    with pytest.raises(ValueError, match="planted"):
        averages.add_gradients(model, 5)
    fails[0] = False
    with pytest.raises(RuntimeError, match=_LOST):
        averages.add_gradients(model, 4)
    averages.right_step(model, 1)


def test_weights_that_are_lost_in_a_failed_hook(ranks):
    ranks(2).run(_failed_hook)


def _cleared_late(bypasses: bool) -> None:
    """Gradients that are cleared after reset(), or after a forward, are cleared as well."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    with model.no_sync():
        averages.weighted_step(model, 1000)
    ddpx.reset(model)
    items = averages.batch(0, dist.get_rank(), 0)
    expected = averages.in_one_process(module, 0, range(dist.get_world_size()), 1, "weights")
    if bypasses:
        model.zero_grad()
    ddpx.set_weight(model, len(items))
    loss = averages.loss_sum((module if bypasses else model)(items))
    if not bypasses:
        model.zero_grad()
    loss.backward()
    averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("bypasses", [False, True])
def test_gradients_that_are_cleared_late(ranks, bypasses):
    ranks(2).run(_cleared_late, bypasses)
