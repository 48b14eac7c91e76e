"""``average=``: weights that are wrong, missing, or 0 on all ranks, and wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import averages
import numpy as np
import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX
from torch import nn

import ddpx
from ddpx import ReducerDDP

WRONG: dict[str, tuple[object, type[Exception]]] = {
    "negative": (-1, ValueError),
    "NaN": (math.nan, ValueError),
    "infinite": (math.inf, ValueError),
    "beyond all floats": (10**400, ValueError),
    "a tensor": (torch.tensor(-2.0), ValueError),
    "two numbers": (torch.ones(2), TypeError),
    "complex": (torch.tensor(1j), TypeError),
    "complex on a device": (torch.tensor(1j, device="meta"), TypeError),
    "a text": ("3", TypeError),
    "None": (None, TypeError),
    "a bool": (True, TypeError),
}
NUMBERS: dict[str, object] = {
    "int": 3,
    "float": 3.0,
    "numpy": np.int64(3),
    "numpy float": np.float32(3),
    "tensor": torch.tensor(3),
    "tensor of one dimension": torch.tensor([3.0]),
    "half": torch.tensor(3, dtype=torch.float16),
}


def _wrong(name: str) -> None:
    """Raises at once, on the rank that has the weight, and changes nothing."""
    model = ReducerDDP(averages.make_module(), average="weights")
    weight, kind = WRONG[name]
    with pytest.raises(kind, match=r"\[ddpx rank \d\] the ReducerDDP of Net got the weight .*Pass"):
        ddpx.set_weight(model, weight)  # type: ignore[arg-type]
    averages.right_step(model, 0)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights(ranks, name):
    ranks(2).run(_wrong, name)


def _numbers(name: str) -> None:
    module = averages.make_module()
    model = ReducerDDP(module, average="weights")
    averages.weighted_step(model, 3)
    expected = averages.gradients(module)
    averages.weighted_step(model, NUMBERS[name])
    averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("name", NUMBERS)
def test_kinds_of_numbers(ranks, name):
    ranks(2).run(_numbers, name)


def _missing() -> None:
    model = ReducerDDP(averages.make_module(), average="weights")
    items = torch.ones(3, 6, dtype=torch.float64)
    text = r"rank \d, step 0.*wrapper of Net .*this forward has no weight. Call ddpx.set_weight\("
    with pytest.raises(RuntimeError, match=text):
        model(items)
    with pytest.raises(RuntimeError, match="no forward since the last averaged backward has a"):
        averages.loss_sum(model.module(items)).backward()
    averages.right_step(model, 0)


def test_missing_weights(ranks):
    ranks(2).run(_missing)


def _zero(**options: object) -> None:
    """All ranks raise in this step. The next step is right."""
    module = averages.make_module()
    model = ReducerDDP(module, average="weights", **options)  # type: ignore[arg-type]
    averages.right_step(model, 0)
    with pytest.raises(RuntimeError, match=r"sum to 0.* of this step are NaN.*set_weight\("):
        averages.weighted_step(model, 0)
    for grad in averages.gradients(module):
        assert grad is not None and grad.isnan().all()
    averages.right_step(model, 1)


@pytest.mark.parametrize("mode", MODES_OF_DDPX)
def test_a_sum_of_zero(ranks, mode):
    ranks(2).run(_zero, **MODES_OF_DDPX[mode])


def _zero_in_join() -> None:
    """The rank without inputs raises, too."""
    model = ReducerDDP(averages.make_module(), average="weights")
    with pytest.raises(RuntimeError, match="sum to 0"), model.join():
        for _ in range(dist.get_rank()):
            averages.weighted_step(model, 0)


def test_a_sum_of_zero_in_join(ranks):
    ranks(2).run(_zero_in_join)


def _backward_of_each_forward() -> None:
    """The first of two averaged backwards would take the weights of both forwards."""
    model = ReducerDDP(averages.make_module(), average="weights")
    losses = []
    for weight in (2, 3):
        ddpx.set_weight(model, weight)
        losses.append(averages.loss_sum(model(torch.ones(weight, 6, dtype=torch.float64))))
    with pytest.raises(RuntimeError, match="no backward has reached an output of one"):
        losses[0].backward()
    averages.right_step(model, 1)


def test_a_backward_of_each_of_two_forwards(ranks):
    ranks(2).run(_backward_of_each_forward)


# ---- gradients that were not cleared -------------------------------------------------------------


def _clear_to_none(module: nn.Module) -> None:
    module.zero_grad()


def _clear_to_zero(module: nn.Module) -> None:
    module.zero_grad(set_to_none=False)


def _clear_data(module: nn.Module) -> None:
    for param in module.parameters():
        assert param.grad is not None
        param.grad.data.zero_()  # torch does not see this change


CLEARED = {"none": _clear_to_none, "zero": _clear_to_zero, "data": _clear_data}


def _cleared(clear: Callable[[nn.Module], None], average: str, **options: object) -> None:
    """The gradients are cleared between forward and backward."""
    module = averages.make_module()
    model = ReducerDDP(module, average=average, **options)  # type: ignore[arg-type]
    for step in range(3):
        ranks = range(dist.get_world_size())
        expected = averages.in_one_process(module, step, ranks, 1, average)
        items = averages.batch(step, dist.get_rank(), 0)
        if average == "weights":
            ddpx.set_weight(model, len(items))
        loss = averages.loss_sum(model(items))
        if step:
            clear(module)
        loss.backward()
        averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("mode", ["default", "view"])
@pytest.mark.parametrize("clear", CLEARED)
def test_cleared_gradients(ranks, clear, mode, average):
    ranks(2).run(_cleared, CLEARED[clear], average, **MODES_OF_DDPX[mode])


def _kept(average: str, **options: object) -> None:
    """A second average on top of the first would be wrong."""
    model = ReducerDDP(averages.make_module(), average=average, **options)  # type: ignore[arg-type]
    weighs = average == "weights"
    averages.train_step(model, 0, 1, weighs)
    with pytest.raises(RuntimeError, match=r"6 parameters still have .*zero_grad"):
        averages.train_step(model, 1, 1, weighs)
    model.zero_grad()
    ranks = range(dist.get_world_size())
    expected = averages.in_one_process(model.module, 2, ranks, 1, average)
    averages.train_step(model, 2, 1, weighs)
    averages.assert_close(averages.gradients(model.module), expected)


@pytest.mark.parametrize("average", ["sum", "weights"])
@pytest.mark.parametrize("mode", [mode for mode in MODES_OF_DDPX if mode != "find unused"])
def test_kept_gradients(ranks, mode, average):
    ranks(2).run(_kept, average, **MODES_OF_DDPX[mode])


def _kept_beside_a_cleared_gradient(**options: object) -> None:
    model = ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), average="sum", **options)
    model(torch.ones(2, 4)).sum().backward()
    model.module[0].weight.grad.zero_()  # in the same bucket
    with pytest.raises(RuntimeError, match=r"3 parameters still have .*'0.bias', '1.weight', '1"):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_is_kept_beside_a_cleared_gradient(ranks, views):
    ranks(2).run(_kept_beside_a_cleared_gradient, gradient_as_bucket_view=views)


def _kept_by_another_method(average: str) -> None:
    """The forward bypasses the wrapper, as another method of the module does."""
    module = averages.make_module()
    model = ReducerDDP(module, average=average)
    items = torch.ones(3, 6, dtype=torch.float64)
    for is_kept in (False, True):
        if average == "weights":
            ddpx.set_weight(model, 3)
        loss = averages.loss_sum(module(items))
        if not is_kept:
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match=r"parameters still have .*zero_grad"):
            loss.backward()
    model.zero_grad()
    ranks = range(dist.get_world_size())
    expected = averages.in_one_process(module, 2, ranks, 1, average)
    averages.train_step(model, 2, 1, average == "weights")
    averages.assert_close(averages.gradients(module), expected)


@pytest.mark.parametrize("average", ["sum", "weights"])
def test_kept_gradients_of_a_forward_that_bypasses_the_wrapper(ranks, average):
    ranks(2).run(_kept_by_another_method, average)


# ---- arguments -----------------------------------------------------------------------------------


def _arguments() -> None:
    for average in ("median", 3, ["mean"]):
        with pytest.raises(ValueError, match="Pass one of 'mean', 'sum', 'weights'"):
            ReducerDDP(nn.Linear(2, 2), average=average)  # type: ignore[arg-type]
    for other in ("mean", "sum"):
        model = ReducerDDP(nn.Linear(2, 2), average=other)
        with pytest.raises(RuntimeError, match=f"average='{other}'.*Pass average=\"weights\""):
            model.set_weight(3)
        assert model._get_ddp_logging_data()["average"] == other
        assert ("average='sum'" in repr(model)) == (other == "sum")
        if other == "sum":
            with pytest.raises(ValueError, match="does not work with average='sum'"):
                model._register_fused_optim(torch.optim.SGD, lr=0.1)


def test_arguments(ranks):
    ranks(1).run(_arguments)


def _different_averages() -> None:
    average = ("mean", "sum")[dist.get_rank()]
    with pytest.raises(RuntimeError, match="option average: 'mean' on rank 0; 'sum' on rank 1"):
        ReducerDDP(nn.Linear(2, 2), average=average)


def test_different_averages(ranks):
    ranks(2).run(_different_averages)
