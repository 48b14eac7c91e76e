"""Sums, averages by weight and ``ddpx.replicate()`` with tensor parallelism.

The tests compare gradients with those of the whole model on each rank.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX
from test_tensor_parallel import SMALL_CAP, Net, _data, _mesh, _wholly_sharded
from torch import nn
from torch.distributed.tensor import DTensor

import ddpx
from ddpx import ReducerDDP


def _clear(model: nn.Module, style: str) -> None:
    for param in model.parameters():
        if style == "none" or param.grad is None:
            param.grad = None
        else:
            param.grad.zero_()


def _check(mode: str, style: str) -> None:
    mesh = _mesh()
    model = ReducerDDP(
        _wholly_sharded(mesh),
        device_mesh=mesh["dp"],
        bucket_cap_mb=SMALL_CAP,
        average="weights",
        **MODES_OF_DDPX[mode],
    )
    torch.manual_seed(0)
    plain = Net()
    weight = 1.0 + 2 * mesh["dp"].get_local_rank()  # 4 on both ranks
    for step in range(3):
        plain.zero_grad()
        _clear(model, style)
        plain(_data(step, mesh)).square().sum().backward()
        ddpx.set_weight(model, weight)
        model(_data(step, mesh)).square().sum().backward()
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert expected.grad is not None and isinstance(param.grad, DTensor), name
            dist.all_reduce(expected.grad, group=mesh["dp"].get_group())
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 4, msg=name)
    ddpx.set_weight(model, weight)
    with pytest.raises(RuntimeError, match="still have the gradient of the last averaged"):
        model(_data(9, mesh)).square().sum().backward()


@pytest.mark.parametrize("style", ["none", "zeros"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_weights(ranks, mode, style):
    ranks(4).run(_check, mode, style)


def _check_form(mode: str, average: str, form: str) -> None:
    mesh = _mesh()
    model: nn.Module = _wholly_sharded(mesh)
    wrap = ReducerDDP if form == "wrapper" else ddpx.replicate
    model = wrap(
        model,
        device_mesh=mesh["dp"],
        bucket_cap_mb=SMALL_CAP,
        average=average,
        **MODES_OF_DDPX[mode],
    )
    torch.manual_seed(0)
    plain = Net()
    divisor = 1 if average == "sum" else 2
    for step in range(3):
        plain.zero_grad()
        model.zero_grad()
        with ddpx.no_sync(model):
            model(_data(step, mesh)).square().sum().backward()
        model(_data(step + 10, mesh)).square().sum().backward()
        for number in (step, step + 10):
            plain(_data(number, mesh)).square().sum().backward()
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert expected.grad is not None and isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name
            dist.all_reduce(expected.grad, group=mesh["dp"].get_group())
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad / divisor, msg=name)


@pytest.mark.parametrize(
    "average, form", [("sum", "wrapper"), ("mean", "replicate"), ("sum", "replicate")]
)
@pytest.mark.parametrize("mode", MODES_OF_DDPX)
def test_sums_and_replicated_modules(ranks, mode, average, form):
    ranks(4).run(_check_form, mode, average, form)
