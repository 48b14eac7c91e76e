"""One rank without a communication hook: the reducer copies, scales and launches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX as MODES
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddpx import ReducerDDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.BatchNorm1d(8))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        x = self.layers(x)
        return self.unused(x) if use_all else x


def _operators_of_a_step(model: nn.Module, inputs: torch.Tensor) -> list[str]:
    """The operators of a step in order, with their input shapes."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(inputs).square().mean().backward()
    return [
        f"{event.name} {event.input_shapes}"
        for event in profiler.events()
        if event.name.startswith(("aten::", "c10d::", "gloo:"))
    ]


def _check_nothing_is_done(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    bare = Net()
    model = ReducerDDP(Net(), **options)
    model.module.load_state_dict(bare.state_dict())
    for step in range(4):
        inputs = torch.randn(4, 8)
        assert _operators_of_a_step(model, inputs) == _operators_of_a_step(bare, inputs), step
        assert model.reducer.report.step == step
        assert model.reducer.report.num_launches == 0
        for ours, plain in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("mode", MODES)
def test_the_operators_of_a_step_are_those_of_the_module(ranks, mode):
    ranks(1).run(_check_nothing_is_done, MODES[mode])


def _check_forced() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPX_FORCE_COMM", "1")
        model = ReducerDDP(Net())
    inputs = torch.randn(4, 8)
    operators = _operators_of_a_step(model, inputs)
    assert model.reducer.report.num_launches == 1
    assert any("allreduce" in name for name in operators)


def test_the_whole_path_can_be_forced(ranks):
    ranks(1).run(_check_forced)


def _check_hook() -> None:
    model = ReducerDDP(Net())
    sizes: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7))
        return future

    names: list[str] = []
    model._register_buffer_comm_hook(None, lambda _, named: names.extend(named))
    model(torch.randn(4, 8)).sum().backward()
    assert len(names) == 3
    assert model._get_ddp_logging_data()["backward_comm_time_start"] == 0

    model.register_comm_hook(None, hook)
    model.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    assert sum(sizes) == sum(param.numel() for param in model.parameters())
    assert all((param.grad == 7).all() for param in model.parameters())


def test_hooks_are_called(ranks):
    ranks(1).run(_check_hook)


def _check_unused() -> None:
    model = ReducerDDP(Net())
    with pytest.raises(RuntimeError, match=r"unused\.weight"):
        model(torch.randn(4, 8), use_all=False).sum().backward()
    model(torch.randn(4, 8)).sum().backward()
    finding = ReducerDDP(Net(), find_unused_parameters=True)
    for use_all in (False, True, False, False):
        finding.zero_grad()
        finding(torch.randn(4, 8), use_all=use_all).sum().backward()
        assert (finding.module.unused.weight.grad is not None) == use_all
        assert finding.reducer._get_local_used_map().tolist()[-1] == use_all


def test_unused_params_are_reported_all_the_same(ranks):
    ranks(1).run(_check_unused)


def _check_no_sync_and_join() -> None:
    model = ReducerDDP(Net())
    with model.no_sync():
        model(torch.randn(4, 8)).sum().backward()
    with model.join():
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_no_sync_and_join_work(ranks):
    ranks(1).run(_check_no_sync_and_join)
