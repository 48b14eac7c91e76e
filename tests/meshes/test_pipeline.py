"""torch.distributed.pipelining x data parallel on 2 x 2 ranks, against averages made by hand."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ddpx import ReducerDDP

WIDTH = 6
NUM_MICRO_BATCHES = 4
MODES: dict[str, dict[str, bool]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
}
modes = pytest.mark.parametrize("mode", MODES)


def _parts(count: int, last: type[nn.Module] = nn.Identity) -> list[nn.Module]:
    """One for each stage, the same on every rank."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), last()).double()
        for _ in range(count)
    ]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(step: int, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
    shape = (2 * NUM_MICRO_BATCHES, WIDTH)
    return torch.randn(shape, dtype=torch.double), torch.randn(shape, dtype=torch.double)


def _pipeline(
    schedule: type[Any],
    mesh: DeviceMesh,
    options: dict[str, bool],
    last: type[nn.Module] = nn.Identity,
) -> tuple[Any, dict[int, ReducerDDP]]:
    """The schedule, and this rank's stages by their index."""
    rank = mesh["pp"].get_local_rank()
    several = schedule not in (ScheduleGPipe, Schedule1F1B)
    indices = (rank, rank + 2) if several else (rank,)
    parts = _parts(4 if several else 2, last)
    wrapped = {
        index: ReducerDDP(parts[index], device_mesh=mesh["dp"], bucket_cap_mb=0.0001, **options)
        for index in indices
    }
    stages = [
        PipelineStage(module, index, len(parts), torch.device("cpu"), group=mesh["pp"].get_group())
        for index, module in wrapped.items()
    ]
    of_rank = stages if several else stages[0]
    return schedule(of_rank, n_microbatches=NUM_MICRO_BATCHES, loss_fn=_loss), wrapped


def _run(schedule: Any, mesh: DeviceMesh, x: torch.Tensor, target: torch.Tensor) -> None:
    inputs = (x,) if mesh["pp"].get_local_rank() == 0 else ()
    targets = {"target": target} if mesh["pp"].get_local_rank() == 1 else {}
    schedule.step(*inputs, **targets)


def _check_schedule(name: str, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule, wrapped = _pipeline(SCHEDULES[name], mesh, MODES[mode])
    whole = nn.Sequential(*_parts(4 if len(wrapped) == 2 else 2))
    for step in range(3):
        x, target = _batch(step, mesh)
        for model in (whole, *wrapped.values()):
            model.zero_grad()
        _loss(whole(x), target).backward()
        _run(schedule, mesh, x, target)
        for param in whole.parameters():
            dist.all_reduce(param.grad, group=mesh["dp"].get_group())
            param.grad /= 2
        for index, model in wrapped.items():
            assert model.reducer.num_steps == step + 1, "one all-reduce of each bucket a step"
            expected = whole[index].parameters()
            for param, reference in zip(model.module.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad, reference.grad)
        with torch.no_grad():
            for model in (whole, *wrapped.values()):
                for param in model.parameters():
                    param -= 0.1 * param.grad


@modes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(ranks, schedule, mode):
    ranks(4).run(_check_schedule, schedule, mode, timeout=90.0)


def _check_zero_bubble(mode: str, last: type[nn.Module]) -> str:
    """The schedule takes gradients of what is in front of ``last``, not of the stage's output."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule, wrapped = _pipeline(ScheduleInterleavedZeroBubble, mesh, MODES[mode], last)
    failure = None
    try:
        _run(schedule, mesh, *_batch(0, mesh))
    except RuntimeError as error:
        failure = error  # its frames keep this rank's sends, which peers may not have received yet
    with contextlib.suppress(RuntimeError):
        dist.monitored_barrier(timeout=None)
    assert all(model.reducer.num_steps <= 1 for model in wrapped.values())
    return f"{failure} {failure.__cause__ or ''}" if failure else ""


@modes
@pytest.mark.parametrize("last", [nn.Identity, nn.Tanh])
def test_zero_bubble_ends_with_an_error(ranks, mode, last):
    texts = ranks(4).run(_check_zero_bubble, mode, last, timeout=90.0)
    for text in texts:
        assert "ScheduleInterleavedZeroBubble" in text and "parameter" in text, texts
