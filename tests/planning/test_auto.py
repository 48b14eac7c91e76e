"""``bucket_cap_mb="auto"`` end to end: ranks that train measure, agree and rebuild."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from short_search import SHORT, short_search
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx.ddp.search import wrapper_search


class _Layers(nn.Module):
    """Layers of which some may be left out, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, leave_out: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != leave_out:
                x = torch.tanh(layer(x))
        return self.norm(x)


def _train(model: Any, steps: int, **options: Any) -> list[torch.Tensor]:
    """The gradients of all steps."""
    grads = []
    leaves_out = options.get("find_unused_parameters", False)
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        model.zero_grad(set_to_none=step % 3 != 0)
        if step % 4 == 1:
            with model.no_sync():
                model(torch.randn(4, 32, device="cpu")).square().mean().backward()
        leave_out = 2 if leaves_out and step % 5 == 0 else -1
        model(torch.randn(4, 32, device="cpu"), leave_out).square().mean().backward()
        grads += [p.grad.clone() for p in model.module.parameters() if p.grad is not None]
    return grads


def _default_again(model: Any, options: dict[str, Any], steps: int) -> list[torch.Tensor]:
    return _train(ddpx.ReducerDDP(_Layers(), **options), steps, **options)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "lazy": {"lazy_bucket_allocation": True},
    "batched": {"batched_grad_copy": True},
    "reduce_dtype": {"reduce_dtype": torch.float64},
    "mixed precision": {
        "mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    },
}
STEPS = 60


def _measures_and_rebuilds(options: dict[str, Any], transport: str) -> tuple[Any, ...]:
    """At 2 ranks each plan gives the same bits."""
    options = {**options, "transport": transport}
    if options.get("static_graph"):  # each step uses the same params equally often
        with patch.object(ddpx.ReducerDDP, "no_sync", lambda self: _nothing()):
            return _compare(options)
    return _compare(options)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _compare(options: dict[str, Any]) -> tuple[Any, ...]:
    with short_search():
        model = ddpx.ReducerDDP(_Layers(), bucket_cap_mb="auto", **options)
        assert not ddpx.plan_report(model).final and model.bucket_bytes_cap == 25 << 20
        grads = _train(model, STEPS, **options)
    report = model.plan_report()
    assert report.final and report.num_steps <= SHORT.most_steps, report
    assert model._ddpx.search is None and not model.reducer.recorded
    expected = _default_again(model, options, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    plan = ddpx.bucket_plan(model)
    if report.chosen_plan is not None:
        assert model.reducer.plan.buckets == [list(b) for b in report.chosen_plan.buckets]
    return plan, report.chosen, len(report.plans), report.plans[0].measured_end_s is not None


@pytest.mark.parametrize("transport", ["group", "shm"])
@pytest.mark.parametrize("mode", ["default", "view"])
def test_all_ranks_choose_one_plan(ranks, mode, transport):
    one, other = ranks(2).run(_measures_and_rebuilds, MODES[mode], transport)
    assert one == other and one[2] == 3 and one[3]


def _recorded(path: str) -> tuple[ddpx.PlanReport | None, ...]:
    """The reports of a recording that runs when the search ends, of its file, and of the model."""
    with short_search():
        model = ddpx.ReducerDDP(_Layers(), bucket_cap_mb="auto")
        with ddpx.record(model, max_steps=2) as before:
            _train(model, 2)
        with ddpx.record(model, max_steps=2) as timeline:
            _train(model, STEPS)
        other = ddpx.ReducerDDP(_Layers(), bucket_cap_mb="auto")
        with ddpx.record(other, max_steps=1) as until_the_end:
            while not ddpx.plan_report(other).final:
                _train(other, 1)
    assert until_the_end.recording.plan_report == ddpx.plan_report(other)
    own_path = f"{path}-{dist.get_rank()}"
    timeline.export_chrome_trace(own_path)
    of_file = ddpx.Timeline.load(own_path).recording.plan_report
    assert before.recording.plan_report is None
    return timeline.recording.plan_report, of_file, ddpx.plan_report(model)


def test_a_timeline_has_the_plans(ranks, tmp_path):
    for recorded, of_file, report in ranks(2).run(_recorded, str(tmp_path / "steps.json")):
        assert report.final and len(report.plans) == 3
        assert recorded == of_file == report


def _with_default_device(path: str) -> tuple[ddpx.PlanReport, int]:
    """Nothing that ddpx computes with is on the device of the script's new tensors."""
    module = _Layers()
    with short_search(), torch.device("meta"):
        model = ddpx.ReducerDDP(module, bucket_cap_mb="auto")
        with ddpx.record(model, max_steps=2) as timeline:
            _train(model, STEPS)
        own_path = f"{path}-{dist.get_rank()}"
        timeline.export_chrome_trace(own_path)
        num_steps = len(ddpx.Timeline.load(own_path).steps)
    return ddpx.plan_report(model), num_steps


def test_default_device_of_the_script(ranks, tmp_path):
    for report, num_steps in ranks(2).run(_with_default_device, str(tmp_path / "steps.json")):
        assert report.final and len(report.plans) == 3
        assert num_steps == 2


def _three_ranks() -> tuple[Any, ...]:
    """Another plan gives other bits, but the same means. Rank 0 logs the report."""
    with short_search(), patch.object(wrapper_search._logger, "info") as info:
        model = ddpx.ReducerDDP(_Layers(), bucket_cap_mb="auto", transport="group")
        grads = _train(model, STEPS)
    assert info.call_count == (dist.get_rank() == 0)
    training = wrapper_search._Training(model._ddpx)
    rank = dist.get_rank()
    assert training.highest([rank, 5 - rank, 1]) == [2, 5, 1]
    assert training.of_rank_0([rank, 7]) == [0, 7]
    expected = _default_again(model, {"transport": "group"}, STEPS)
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    report = ddpx.plan_report(model)
    return ddpx.bucket_plan(model), report.chosen, report.final


def test_three_ranks_choose_one_plan(ranks):
    first, *others = ranks(3).run(_three_ranks)
    assert others == [first, first] and first[2]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("default", "view")])
def test_all_modes_measure(ranks, mode):
    one, other = ranks(2).run(_measures_and_rebuilds, MODES[mode], "auto")
    assert one == other and one[2] == 3 and one[3]


def _copy_with_a_hook() -> ddpx.PlanReport | None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DDPX_BUCKET_CAP_MB", "auto")
        model = ddpx.ReducerDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.warns(UserWarning, match="has no effect on a wrapper with a communication hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddpx.plan_report(copy.deepcopy(model))


def test_a_copy_with_a_hook_does_not_search(ranks):
    for report in ranks(2).run(_copy_with_a_hook):
        assert report.state == "done"
        assert report.reason == "the wrapper has a communication hook"
