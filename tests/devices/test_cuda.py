"""On an accelerator: parity with DDP, and no device synchronisation in a step.

Skipped with the reason where there is none. `make gpu` builds and runs these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from parity_cases import CASES, MODES, compare_case
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.testing.compare import summarize
from ddpx.timeline import Timeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

PAIRS = [(case.name, mode) for case in CASES for mode in case.modes]


@pytest.fixture(scope="module")
def pools():
    made: dict[tuple[str, int], RankPool] = {}

    def get(backend: str, world_size: int) -> RankPool:
        if (backend, world_size) not in made:
            made[backend, world_size] = RankPool(world_size, backend)
        return made[backend, world_size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPX_FORCE_COMM", "1")  # NCCL has one rank here, and is to be used
        yield get
    for pool in made.values():
        pool.close()


# NCCL refuses two ranks on one GPU; gloo takes CUDA tensors, so several ranks can share one.
@pytest.mark.parametrize(
    "backend, world_size", [("nccl", 1), ("gloo", 2), ("gloo", 3)], scope="module"
)
@pytest.mark.parametrize("case_name, mode", PAIRS, ids=lambda value: value.replace(" ", "-"))
def test_bits_match(pools, backend, world_size, case_name, mode):
    per_rank = pools(backend, world_size).run(compare_case, case_name, mode, device="cuda")
    for caps in per_rank[0]:
        total = summarize([comparisons[caps] for comparisons in per_rank])
        assert total.identical, f"with {caps}:\n" + "\n".join(total.differences[:20])


def _steps_without_synchronisation(options: dict) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
    ours = ReducerDDP(model, device_ids=[torch.cuda.current_device()], **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, foreach=True)
    x = torch.randn(16, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        ours(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):  # agreeing on buckets may synchronise
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
def test_no_device_synchronisation_in_a_step(pools, mode):
    pools("nccl", 1).run(_steps_without_synchronisation, MODES[mode])


def _gradients_made_on_a_side_stream() -> None:
    """The launch must wait for packs that ran on another stream than its own."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    ours = ReducerDDP(model, bucket_cap_mb=1000)
    side = torch.cuda.Stream()
    x = torch.randn(64, 1024, device="cuda")
    for _ in range(5):
        ours.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        h = ours.module[:2](x)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            loss = ours.module[2:](h).square().mean()
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        got = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        with ours.no_sync():
            model(x).square().mean().backward()
        for actual, expected in zip(got, (p.grad for p in model.parameters()), strict=True):
            torch.testing.assert_close(actual, expected)


def test_gradients_made_on_a_side_stream(pools):
    pools("nccl", 1).run(_gradients_made_on_a_side_stream)


class _Busy(torch.autograd.Function):
    """Keeps the device busy in backward, for so many of its clock cycles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        torch.cuda._sleep(ctx.cycles)
        return grads[0], None


class _BusyLayer(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Busy.apply(x, self.cycles))


def _record_busy_layers(cycles: int) -> tuple[Timeline, float]:
    """And how many ns the device takes for so many cycles."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    module = nn.Sequential(*(_BusyLayer(cycles) for _ in range(4))).cuda()
    model = ReducerDDP(module, bucket_cap_mb=0.0001)
    x = torch.randn(16, 256, device="cuda", requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    with ddpx.record(model) as timeline:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            model(x).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    return timeline, 1e6 * begin.elapsed_time(end)


def test_times_are_the_devices(pools):
    """The host is done long before the device has come to the last layer."""
    timeline, busy_ns = pools("nccl", 1).run(_record_busy_layers, 20_000_000)[0]
    assert len(timeline.steps) == 4
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            # Of the weights: each one's comes before its layer's sleep, after those behind it.
            weights = [a for a in rank_step.arrivals if "weight" in _name(timeline, a.param)]
            between = [b.at - a.at for a, b in pairwise(weights)]
            assert between == pytest.approx([busy_ns] * 3, rel=0.3)
            for bucket in rank_step.buckets:
                assert bucket is not None
                assert bucket.ready <= bucket.launched <= bucket.completed <= bucket.written_back


def _name(timeline: Timeline, param: int) -> str:
    return timeline.recording.param_names[param]
