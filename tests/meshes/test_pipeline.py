"""torch.distributed.pipelining with data parallelism on 2 x 2 ranks, compared with averages
computed here."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ddpx import ReducerDDP

WIDTH = 6
NUM_MICRO_BATCHES = 4
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
}
ZERO_BUBBLE = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)  # the first rank also has the last stage
modes = pytest.mark.parametrize("mode", MODES)


def _parts(
    count: int, last: type[nn.Module] = nn.Identity, dtype: torch.dtype = torch.double
) -> list[nn.Module]:
    """The modules of all stages, the same on every rank."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), last()).to(dtype)
        for _ in range(count)
    ]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(
    step: int, mesh: DeviceMesh, dp_rank: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of this rank's pipeline, or of another pipeline."""
    torch.manual_seed(10 * step + (mesh["dp"].get_local_rank() if dp_rank is None else dp_rank))
    shape = (2 * NUM_MICRO_BATCHES, WIDTH)
    return torch.randn(shape, dtype=torch.double), torch.randn(shape, dtype=torch.double)


def _pipeline(
    schedule: type[Any],
    mesh: DeviceMesh,
    options: dict[str, Any],
    last: type[nn.Module] = nn.Identity,
    dtype: torch.dtype = torch.double,
) -> tuple[Any, dict[int, ReducerDDP]]:
    """The schedule, and the stages of this rank by index."""
    rank = mesh["pp"].get_local_rank()
    several = schedule not in (ScheduleGPipe, Schedule1F1B)
    second = 3 - rank if schedule in V_SHAPED else rank + 2
    indices = (rank, second) if several else (rank,)
    parts = _parts(4 if several else 2, last, dtype)
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
    rank_of_last = 0 if isinstance(schedule, V_SHAPED) else 1
    targets = {"target": target} if mesh["pp"].get_local_rank() == rank_of_last else {}
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


DTYPES: dict[str, dict[str, torch.dtype]] = {
    "reduce": {"reduce_dtype": torch.float32},
    "grad": {"grad_dtype": torch.float32},
}


def _check_dtypes(dtypes: str) -> None:
    """Gradients of bfloat16 stages, compared with float64 sums over micro-batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule, wrapped = _pipeline(
        ScheduleInterleaved1F1B, mesh, DTYPES[dtypes], dtype=torch.bfloat16
    )
    whole = nn.Sequential(*_parts(4, dtype=torch.bfloat16))
    params = list(whole.parameters())
    for step in range(2):
        x, target = (value.bfloat16() for value in _batch(step, mesh))
        totals = [torch.zeros_like(param, dtype=torch.double) for param in params]
        for xs, targets in zip(
            x.chunk(NUM_MICRO_BATCHES), target.chunk(NUM_MICRO_BATCHES), strict=True
        ):
            grads = torch.autograd.grad(_loss(whole(xs), targets), params)
            for total, grad in zip(totals, grads, strict=True):
                # exact, since the divisor is a power of two
                total += grad.double() / NUM_MICRO_BATCHES
        for total in totals:
            dist.all_reduce(total, group=mesh["dp"].get_group())
            total /= 2
        expected = dict(zip((name for name, _ in whole.named_parameters()), totals, strict=True))
        for model in wrapped.values():
            model.zero_grad()
        _run(schedule, mesh, x, target)
        for index, model in wrapped.items():
            for name, param in model.module.named_parameters():
                rounds = dtypes == "reduce"
                assert param.grad.dtype is (torch.bfloat16 if rounds else torch.float32)
                total = expected[f"{index}.{name}"]
                error = (param.grad.double() - total).abs()
                one_rounding = 2.0**-8 * (1 + 2.0**-6) if rounds else 0
                allowed = one_rounding * total.abs() + 2.0**-21 * total.abs().max()
                assert (error <= allowed).all(), (step, index, name, (error - allowed).max())


@pytest.mark.parametrize("dtypes", DTYPES)
def test_sixteen_bits(ranks, dtypes):
    ranks(4).run(_check_dtypes, dtypes, timeout=90.0)


def _check_zero_bubble(kind: type[Any], mode: str, last: type[nn.Module]) -> str:
    """The schedule takes gradients of the inputs of ``last``, and not of the stage's output."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule, wrapped = _pipeline(kind, mesh, MODES[mode], last)
    failure = None
    try:
        _run(schedule, mesh, *_batch(0, mesh))
    except RuntimeError as error:
        # the frames of the traceback keep this rank's sends, which peers may not have received yet
        failure = error
    with contextlib.suppress(RuntimeError):
        dist.monitored_barrier(timeout=None)
    assert all(model.reducer.num_steps <= 1 for model in wrapped.values())
    if failure is None:  # without an error, gradients are correct
        whole = nn.Sequential(*_parts(4, last))
        for dp_rank in range(2):
            x, target = _batch(0, mesh, dp_rank)
            (_loss(whole(x), target) / 2).backward()
        for index, model in wrapped.items():
            expected = whole[index].parameters()
            for param, reference in zip(model.module.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad, reference.grad)
    return f"{failure} {failure.__cause__ or ''}" if failure else ""


@modes
@pytest.mark.parametrize("kind", ZERO_BUBBLE)
@pytest.mark.parametrize("last", [nn.Identity, nn.Tanh])
def test_zero_bubble_ends_with_an_error(ranks, mode, last, kind):
    texts = ranks(4).run(_check_zero_bubble, kind, mode, last, timeout=90.0)
    for first, second in ((0, 1), (2, 3)):  # the two ranks of each pipeline
        raised = [text for text in (texts[first], texts[second]) if text]
        assert raised and (len(raised) == 2 or kind is ScheduleDualPipeV), texts
        for text in raised:
            assert kind.__name__ in text and "parameter" in text, texts
