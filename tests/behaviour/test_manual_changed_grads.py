"""A script that changes gradients between backward() and finalize_backward() gets an error by name.

The averages would replace the change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import slow_ddp as ref
import torch
import torch.distributed as dist
from manual_models import modes, run_step, wrap_model
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import ddpx
from ddpx import ReducerDDP


def _divide(model: Any) -> None:
    model.module.second.weight.grad /= 4


def _replace(model: Any) -> None:
    model.module.second.weight.grad = model.module.second.weight.grad / 4


def _clear(model: Any) -> None:
    model.module.second.weight.grad = None


def _divide_foreach(model: Any) -> None:
    torch._foreach_div_([model.module.second.weight.grad], 4.0)


CHANGES = [_divide, _replace, _clear, _divide_foreach]


def _average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    """Divides in a callback, which may run after backward() has returned."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    size = dist.get_world_size()
    return work.get_future().then(lambda future: future.value()[0].div_(size))


_average.__annotations__ = {}  # DDP refuses annotations as text


def _check_change(mode: str, change: Callable[[Any], None], hook: bool) -> None:
    model, plain = (wrap_model(ReducerDDP, mode, manual) for manual in (True, False))
    if hook:
        model.register_comm_hook(None, _average)
    for number in range(4):
        ref.seed(number)
        model.zero_grad()
        run_step(model)
        if number < 2:
            model.finalize_backward()
            continue
        change(model)
        text = ref.error_of(model.finalize_backward)
        assert "the gradient of 1 parameter between backward() and finalize_backward()" in text
        assert "'second.weight'. " in text, text
        assert "scale_grads=False" in text and f"rank {dist.get_rank()}" in text
        if "view" not in mode:
            ref.seed(number)
            plain.zero_grad()
            run_step(plain)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    model.zero_grad()
    run_step(model)
    model.finalize_backward()
    ref.assert_in_step()


@modes
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_gradient_is_an_error_by_name(ranks, mode: str, change: Callable[[Any], None]):
    ref.on_ranks(ranks, 2, _check_change, mode, change, False)


@pytest.mark.parametrize("mode", ["default", "view", "unused view"])
def test_only_the_script_changes_gradients_beside_a_hook(ranks, mode: str):
    ref.on_ranks(ranks, 2, _check_change, mode, _divide, True)


def _check_refused_backward() -> None:
    """The averages replace the gradients of a backward that was an error."""
    model, plain = (wrap_model(ReducerDDP, "default", manual) for manual in (True, False))
    for number in range(3):
        for each in (model, plain):
            ref.seed(number)
            each.zero_grad()
            loss = each(torch.randn(6, 16)).sum()
            loss.backward(retain_graph=True)
            if each is model:
                assert "Expected to have finalized" in ref.error_of(loss.backward)
                model.finalize_backward()
            del loss
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_refused_backward_is_no_change(ranks):
    ref.on_ranks(ranks, 2, _check_refused_backward)


def _check_schedule(scale: bool, views: bool) -> str:
    """A pipeline of one stage on each rank: both ranks have the same stage."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(0)
    part, whole = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    whole.load_state_dict(part.state_dict())
    model = ReducerDDP(part, gradient_as_bucket_view=views)
    ddpx.set_manual_finalization(model, True)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=scale)
    text = ""
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x, target = torch.randn(2, 8, 4, dtype=torch.double)
        model.zero_grad()
        whole.zero_grad()
        schedule.step(x, target=target)
        text = ref.error_of(model.finalize_backward)
        nn.functional.mse_loss(whole(x), target).backward()
        for ours, reference in zip(part.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(reference.grad)
            if not scale:
                torch.testing.assert_close(ours.grad / 4, reference.grad / dist.get_world_size())
    return text


@pytest.mark.parametrize("views", [False, True])
def test_a_pipeline_schedule_that_divides(ranks, views: bool):
    for text in ref.on_ranks(ranks, 2, _check_schedule, True, views):
        assert "the gradients of 2 parameters" in text and "scale_grads=False" in text
    assert not any(ref.on_ranks(ranks, 2, _check_schedule, False, views))
