"""``average="weights"`` in several usages of forward and backward, and with other options."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import averages
import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX
from torch import nn

import ddpx
from ddpx import ReducerDDP


def _two_forwards() -> None:
    """One backward of two forwards, the second of which uses another branch."""
    module = averages.make_module()
    model = ReducerDDP(
        module, bucket_cap_mb=averages.SMALL_CAP, average="weights", find_unused_parameters=True
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        model.zero_grad()
        parts = [(averages.batch(step, r, m), m == 1) for r in range(world) for m in (0, 1)]
        total = sum(len(items) for items, _ in parts)
        for items, branch in parts:
            (averages.loss_sum(alone(items, branch)) / total).backward()
        loss = torch.zeros((), dtype=torch.float64)
        for micro_step in (0, 1):
            ddpx.set_weight(model, averages.num_items(step, rank, micro_step))
            items = averages.batch(step, rank, micro_step)
            loss = loss + averages.loss_sum(model(items, micro_step == 1))
        loss.backward()
        averages.assert_close(averages.gradients(module), averages.gradients(alone))


def test_two_forwards_and_one_backward(ranks, world):
    ranks(world).run(_two_forwards)


def _penalty() -> None:
    """The loss is a norm of gradients, so backward does not begin at the output of the forward."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights", find_unused_parameters=True)

    def loss_of(wrapper: nn.Module, items: torch.Tensor) -> torch.Tensor:
        inputs = items.clone().requires_grad_()
        (grad,) = torch.autograd.grad(wrapper(inputs).sum(), inputs, create_graph=True)
        return averages.loss_sum(grad)

    for step in range(2):
        model.zero_grad()
        alone = copy.deepcopy(module)
        parts = [averages.batch(step, rank, 0) for rank in range(dist.get_world_size())]
        (loss_of(alone, torch.cat(parts)) / sum(map(len, parts))).backward()
        mine = parts[dist.get_rank()]
        ddpx.set_weight(model, len(mine))
        loss_of(model, mine).backward()
        averages.assert_close(averages.gradients(module), averages.gradients(alone))


def test_a_penalty(ranks):
    ranks(2).run(_penalty)


def _bypass() -> None:
    """A forward of the module itself takes the weight that was set."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    for step in range(3):
        model.zero_grad()
        ranks = range(dist.get_world_size())
        expected = averages.in_one_process(module, step, ranks, 1, "weights")
        items = averages.batch(step, dist.get_rank(), 0)
        ddpx.set_weight(model, len(items))
        averages.loss_sum(module(items)).backward()
        averages.assert_close(averages.gradients(module), expected)


def test_a_forward_that_bypasses_the_wrapper(ranks):
    ranks(2).run(_bypass)


def _bypass_in_micro_steps(by_module: tuple[bool, ...], **options: Any) -> None:
    """A micro-step with the value True calls the module, as another method of the module does."""
    module = averages.make_module()
    model = ReducerDDP(module, bucket_cap_mb=averages.SMALL_CAP, average="weights", **options)
    for step in range(3):
        model.zero_grad()
        ranks = range(dist.get_world_size())
        expected = averages.in_one_process(module, step, ranks, len(by_module), "weights")
        for micro_step, bypasses in enumerate(by_module):
            items = averages.batch(step, dist.get_rank(), micro_step)
            is_last = micro_step == len(by_module) - 1
            with nullcontext() if is_last else model.no_sync():
                ddpx.set_weight(model, len(items))
                averages.loss_sum((module if bypasses else model)(items)).backward()
        averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("mode", MODES_OF_DDPX)
@pytest.mark.parametrize(
    "by_module", [(True, True, True), (True, False), (False, True), (True, False, True)]
)
def test_micro_steps_that_bypass_the_wrapper(ranks, by_module, mode):
    ranks(2).run(_bypass_in_micro_steps, by_module, **MODES_OF_DDPX[mode])


def _bypass_after_cleared_gradients() -> None:
    """The script clears the gradients of a micro-step, whose weight is then forgotten."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    expected = averages.in_one_process(module, 0, range(dist.get_world_size()), 1, "weights")
    with model.no_sync():
        ddpx.set_weight(model, 1000)
        averages.loss_sum(module(torch.ones(3, 6, dtype=torch.float64))).backward()
    model.zero_grad()
    items = averages.batch(0, dist.get_rank(), 0)
    ddpx.set_weight(model, len(items))
    averages.loss_sum(module(items)).backward()
    averages.assert_close(averages.gradients(module), expected)


def test_a_bypass_after_cleared_gradients(ranks):
    ranks(2).run(_bypass_after_cleared_gradients)


def _set_before_backward(penalty: bool) -> None:
    """The weight of the next forward is set between a forward and its backward."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights", find_unused_parameters=True)
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss_of(wrapper: nn.Module, items: torch.Tensor) -> torch.Tensor:
        if not penalty:
            return averages.loss_sum(wrapper(items))
        inputs = items.clone().requires_grad_()
        (grad,) = torch.autograd.grad(wrapper(inputs).sum(), inputs, create_graph=True)
        return averages.loss_sum(grad)

    ddpx.set_weight(model, averages.num_items(0, rank, 0))
    for step in range(4):
        model.zero_grad()
        alone = copy.deepcopy(module)
        alone.zero_grad()
        parts = [averages.batch(step, r, 0) for r in range(world)]
        (loss_of(alone, torch.cat(parts)) / sum(map(len, parts))).backward()
        loss = loss_of(model, parts[rank])
        ddpx.set_weight(model, averages.num_items(step + 1, rank, 0))
        loss.backward()
        averages.assert_close(averages.gradients(module), averages.gradients(alone))


@pytest.mark.parametrize("penalty", [False, True])
def test_a_weight_that_is_set_before_the_backward_of_another_forward(ranks, penalty):
    ranks(2).run(_set_before_backward, penalty)


def _without_a_graph() -> None:
    """A forward without a graph needs no weight, and takes none."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    expected = averages.in_one_process(module, 0, range(dist.get_world_size()), 1, "weights")
    items = averages.batch(0, dist.get_rank(), 0)
    with torch.no_grad():
        model(items)
    model.set_weight(torch.tensor(len(items)))
    with torch.no_grad():
        model(items)
    averages.loss_sum(model(items)).backward()
    averages.assert_close(averages.gradients(module), expected)


def test_forwards_without_a_graph(ranks):
    ranks(2).run(_without_a_graph)


def _replaced_tensors() -> None:
    """Other tensors stand in the places of the parameters."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    for step in range(3):
        model.zero_grad()
        expected = averages.in_one_process(module, step, range(dist.get_world_size()), 2, "weights")
        for micro_step in range(2):
            items = averages.batch(step, dist.get_rank(), micro_step)
            ddpx.set_weight(model, len(items))
            tensors = {name: 1.0 * param for name, param in model.named_parameters()}
            with model.no_sync() if micro_step == 0 else nullcontext():
                output = torch.func.functional_call(model, tensors, (items,))
                averages.loss_sum(output).backward()
        averages.assert_close(averages.gradients(module), expected)


def test_replaced_tensors(ranks):
    ranks(2).run(_replaced_tensors)


def _beside_another_wrapper() -> None:
    """Each wrapper of a module keeps its own average."""
    module = averages.make_module()
    models = {name: ReducerDDP(module, average=name) for name in ("weights", "mean", "sum")}
    for step, average in enumerate(["weights", "mean", "weights", "sum", "sum", "weights"]):
        module.zero_grad()
        expected = averages.in_one_process(module, step, range(dist.get_world_size()), 2, average)
        averages.train_step(models[average], step, 2, weighs=average == "weights")
        averages.assert_close(averages.gradients(module), expected)


def test_beside_another_wrapper(ranks):
    ranks(2).run(_beside_another_wrapper)


def _manual() -> None:
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    model.require_manual_backward_finalization = True
    for step in range(4):
        model.zero_grad()
        ranks = range(dist.get_world_size())
        expected = averages.in_one_process(module, step, ranks, 2, "weights")
        averages.train_step(model, step, 2, weighs=True)
        model.finalize_backward()
        averages.assert_close(averages.gradients(module), expected)


def test_manual_finalization(ranks):
    ranks(2).run(_manual)


def _recorded() -> None:
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    ranks = range(dist.get_world_size())
    with ddpx.record(model) as timeline:
        for step in range(4):
            model.zero_grad()
            expected = averages.in_one_process(module, step, ranks, 2, "weights")
            averages.train_step(model, step, 2, weighs=True)
            averages.assert_close(averages.gradients(module), expected)
    if dist.get_rank() == 0:
        assert len(timeline.steps) == 4


def test_a_recording(ranks):
    ranks(2).run(_recorded)


def _lazy(**options: Any) -> None:
    averages.compare_steps(2, "weights", lazy_bucket_allocation=True, **options)


@pytest.mark.parametrize("mode", ["default", "view"])
def test_lazy_buckets(ranks, mode):
    ranks(2).run(_lazy, **MODES_OF_DDPX[mode])


def _copied() -> None:
    """A copy has the same average, and no weight."""
    model = copy.deepcopy(ReducerDDP(averages.make_module(), average="weights"))
    for step in range(3):
        model.zero_grad()
        ranks = range(dist.get_world_size())
        expected = averages.in_one_process(model.module, step, ranks, 1, "weights")
        averages.train_step(model, step, 1, weighs=True)
        averages.assert_close(averages.gradients(model.module), expected)


def test_a_copy(ranks):
    ranks(2).run(_copied)
