"""Gradients of shards that arrive in several parts, in 16 bits, are summed in float32."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX as MODES
from test_tensor_parallel import SMALL_CAP, WIDTH, _mesh, modes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ddpx import ReducerDDP
from ddpx.params.dtensors import local_part

DTYPES: dict[str, dict[str, torch.dtype]] = {
    "reduce": {"reduce_dtype": torch.float32},
    "grad": {"grad_dtype": torch.float32},
    "both": {"reduce_dtype": torch.float32, "grad_dtype": torch.float32},
}
FULL_ONLY = pytest.mark.full_only
# Half a unit in the last place of bfloat16, plus a small float32 rounding error.
ONE_ROUNDING = 2.0**-8 * (1 + 2.0**-6)
FLOAT32 = 2.0**-21
NUM_PARTS = 6


class Repeated(nn.Module):
    """A module in which each parameter's gradient arrives in NUM_PARTS parts per backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self, mesh["tp"], plan)

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_PARTS):
            x = checkpoint(self._block, x, use_reentrant=True)
        return x


def _sums_of_parts(plain: nn.Module, xs: torch.Tensor, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The mean of the local shards over data-parallel ranks, over all parts, in float64."""
    params = list(plain.parameters())
    sums = [torch.zeros_like(local_part(param), dtype=torch.float64) for param in params]

    def add(total: torch.Tensor, param: DTensor, grad: DTensor) -> None:
        total += local_part(grad.redistribute(placements=param.placements))

    handles = [
        param.register_hook(partial(add, total, param))
        for total, param in zip(sums, params, strict=True)
    ]
    for x in xs:
        plain(x.requires_grad_()).float().square().sum().backward()
    for handle in handles:
        handle.remove()
    for total in sums:
        dist.all_reduce(total, group=mesh["dp"].get_group())
        total /= 2
    return sums


def _assert_one_rounding(
    model: ReducerDDP, expected: list[torch.Tensor], dtypes: str, step: int
) -> None:
    for (name, param), total in zip(model.module.named_parameters(), expected, strict=True):
        rounds = dtypes == "reduce"
        assert param.grad.dtype is (torch.bfloat16 if rounds else torch.float32), name
        error = (local_part(param.grad).double() - total).abs()
        allowed = (ONE_ROUNDING if rounds else 0) * total.abs() + FLOAT32 * total.abs().max()
        assert (error <= allowed).all(), (step, name, (error / total.abs().max()).max())


def _plain_and_wrapped(mesh: DeviceMesh, mode: str, dtypes: str) -> tuple[nn.Module, ReducerDDP]:
    torch.manual_seed(0)
    module = Repeated(mesh)
    plain = copy.deepcopy(module)
    options = MODES[mode] | DTYPES[dtypes]
    return plain, ReducerDDP(module, device_mesh=mesh["dp"], bucket_cap_mb=SMALL_CAP, **options)


def _check_dtypes(mode: str, dtypes: str, num_micro_steps: int) -> None:
    mesh = _mesh()
    plain, model = _plain_and_wrapped(mesh, mode, dtypes)
    for step in range(3):
        torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
        xs = torch.randn(num_micro_steps, 5, WIDTH, dtype=torch.bfloat16)
        expected = _sums_of_parts(plain, xs.clone(), mesh)
        model.zero_grad()
        for number, x in enumerate(xs):
            model.require_backward_grad_sync = number == num_micro_steps - 1
            model(x.requires_grad_()).float().square().sum().backward()
        _assert_one_rounding(model, expected, dtypes, step)


@modes
@pytest.mark.parametrize(
    "dtypes",
    [*(pytest.param(name, marks=FULL_ONLY) for name in ("reduce", "grad")), "both"],
)
@pytest.mark.parametrize("num_micro_steps", [pytest.param(1, marks=FULL_ONLY), 3])
def test_sums_of_several_parts_are_made_in_float32(ranks, mode, dtypes, num_micro_steps):
    ranks(4).run(_check_dtypes, mode, dtypes, num_micro_steps)


def _check_late_count(mode: str, dtypes: str) -> None:
    """Parts of an output inside no_sync arrive first. They count once backward reaches the other
    output.

    Backward goes through the later forward first.
    """
    mesh = _mesh()
    plain, model = _plain_and_wrapped(mesh, mode, dtypes)
    for step in range(3):
        torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
        xs = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)
        expected = _sums_of_parts(plain, xs.clone(), mesh)
        model.zero_grad()
        outside, inside = (x.clone().requires_grad_() for x in xs)
        loss = model(outside).float().square().sum()
        with model.no_sync():
            loss = loss + model(inside).float().square().sum()
        loss.backward()
        assert model.reducer.num_steps == step + 1
        _assert_one_rounding(model, expected, dtypes, step)


@modes
@pytest.mark.parametrize(
    "dtypes", [*(pytest.param(name, marks=FULL_ONLY) for name in ("reduce", "grad")), "both"]
)
def test_several_parts_that_are_counted_late(ranks, mode, dtypes):
    ranks(4).run(_check_late_count, mode, dtypes)
