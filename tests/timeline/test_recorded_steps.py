"""Recorded steps: in each mode, with accumulated gradients, and on ranks that differ."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_models import check_order, record_mode, small_model, train_step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.figures import step_figures

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "batched copy": {"batched_grad_copy": True},
    "many buckets": {"bucket_cap_mb": 0.0001},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_every_mode(ranks, options):
    for timeline in ranks(2).run(record_mode, options):
        assert [step.number for step in timeline.steps] == [0, 1, 2, 3]
        for step in timeline.steps:
            assert set(step.ranks) == {0, 1}
            check_order(step)
            assert sorted(i for b in step.layout for i in b.params) == [0, 1, 2, 3]
            for rank_step in step.ranks.values():
                assert sorted(a.param for a in rank_step.arrivals) == [0, 1, 2, 3]
        assert timeline.recording.param_names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert not timeline.recording.has_hook
        assert str(timeline.summary()).startswith("3 steps (1 to 3)") or options
        timeline.advice()


def _record_uneven_inputs() -> Timeline:
    model = small_model()
    with ddpx.record(model) as timeline:
        for _ in range(2):
            with model.join():
                for _ in range(2 + dist.get_rank()):
                    train_step(model)
    return timeline


def test_uneven_inputs(ranks):
    """Shadow steps count, so that step numbers of all ranks stay equal."""
    timeline = ranks(2).run(_record_uneven_inputs)[0]
    assert {step.number: set(step.ranks) for step in timeline.steps} == {
        0: {0, 1},
        1: {0, 1},
        2: {1},
        3: {0, 1},
        4: {0, 1},
        5: {1},
    }


def _record_an_abort() -> Timeline:
    """Rank 1 raises after all buckets have been launched, so rank 0 finishes that step."""
    model = small_model()

    def explode(grad: torch.Tensor) -> None:
        raise ArithmeticError

    with ddpx.record(model) as timeline:
        for number in range(5):
            x = torch.ones(2, 8, requires_grad=True)
            if number == 2 and dist.get_rank() == 1:
                x.register_hook(explode)
            try:
                model(2 * x).sum().backward()  # the hook runs after the whole model
            except ArithmeticError:
                assert number == 2
    return timeline


def test_steps_stay_together_after_an_abort(ranks):
    timeline = ranks(2).run(_record_an_abort)[0]
    assert {step.number: set(step.ranks) for step in timeline.steps} == {
        0: {0, 1},
        1: {0, 1},
        2: {0},
        3: {0, 1},
        4: {0, 1},
    }
    timeline.summary()
    timeline.advice()


def _record_with_hook() -> Timeline:
    model = small_model()
    model.register_comm_hook(None, allreduce_hook)
    with ddpx.record(model) as timeline:
        for _ in range(3):
            train_step(model)
    return timeline


def test_communication_hook(ranks):
    timeline = ranks(2).run(_record_with_hook)[1]
    assert timeline.recording.has_hook
    assert len(timeline.steps) == 3
    for step in timeline.steps:
        check_order(step)


def _record_alone() -> Timeline:
    model = small_model()
    with ddpx.record(model) as timeline:
        for _ in range(3):
            train_step(model)
    assert "2 steps (1 to 2) of 1 of 1 rank " in str(timeline.summary())
    return timeline


def test_one_rank_alone_has_arrivals_and_no_buckets():
    with RankPool(1) as pool:
        timeline = pool.run(_record_alone)[0]
    for step in timeline.steps:
        assert len(step.ranks[0].arrivals) == 4
        assert all(bucket is None for bucket in step.ranks[0].buckets)
        assert step_figures(step.ranks[0]).communication == 0
    assert timeline.summary().buckets == ()
    assert timeline.advice() == []


class _Alternating(nn.Module):
    """Uses one of two layers on each rank, alternating."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.branches[2](self.branches[self.calls % 2](x))


def _record_alternating_use() -> Timeline:
    model = ReducerDDP(_Alternating(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    model.set_check_finite()
    with ddpx.record(model) as timeline:
        for _ in range(6):
            train_step(model)
    return timeline


def test_the_agreement_comes_after_the_buckets(ranks):
    timeline = ranks(2).run(_record_alternating_use)[0]
    assert len(timeline.steps) == 6
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            for bucket in rank_step.buckets:
                if bucket is not None:
                    assert bucket.ready <= bucket.launched <= bucket.completed
                    assert bucket.completed <= bucket.wait.end <= bucket.written_back
                    assert bucket.written_back <= rank_step.agreement.begin
            assert rank_step.agreement.ns > 0
            assert rank_step.agreement.end <= rank_step.end
            assert step_figures(rank_step).exposed >= rank_step.agreement.ns


def _record_with_buffers() -> Timeline:
    torch.manual_seed(0)
    model = ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    with ddpx.record(model) as timeline:
        for _ in range(4):
            time.sleep(0.1 * (dist.get_rank() == 0))  # its buffers are broadcast
            model(torch.randn(4, 8)).sum().backward()
    return timeline


def test_waiting_for_buffers_is_not_computing(ranks):
    for timeline in ranks(2).run(_record_with_buffers):
        forwards = [step.ranks[1].forwards[0].ns for step in timeline.steps]
        assert sorted(forwards)[1] < 50e6


def _record_accumulation() -> Timeline:
    model = small_model()
    with ddpx.record(model) as timeline:
        for _ in range(2):
            with model.no_sync():
                train_step(model)
                train_step(model)
            train_step(model)
    return timeline


def test_accumulated_gradients(ranks):
    timeline = ranks(2).run(_record_accumulation)[0]
    assert len(timeline.steps) == 2
    for step in timeline.steps:
        check_order(step)
        for rank_step in step.ranks.values():
            assert len(rank_step.forwards) == 3
            spans = zip(rank_step.forwards[:2], rank_step.local_backwards, strict=True)
            assert all(forward.end <= backward.begin for forward, backward in spans)


LOCAL_BACKWARD_S = 0.02


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(LOCAL_BACKWARD_S)
        return grads[0]


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SlowBackward.apply(self.layer(x))


def _explode(grad: torch.Tensor) -> None:
    raise ArithmeticError


def _record_local_backwards() -> Timeline:
    """Before each synchronized backward: one backward that raises, and two that do not."""
    model = ReducerDDP(_Slow())
    with ddpx.record(model) as timeline:
        for _ in range(3):
            with model.no_sync():
                x = torch.ones(2, 8, requires_grad=True)
                x.register_hook(_explode)
                with pytest.raises(ArithmeticError):
                    model(2 * x).sum().backward()
                train_step(model)
                first, second = model(torch.ones(2, 8)).sum(), model(torch.ones(2, 8)).sum()
                first.backward()
                del second
            train_step(model)
    return timeline


def test_backwards_in_no_sync_are_computation(ranks):
    timeline = ranks(2).run(_record_local_backwards)[0]
    assert [step.number for step in timeline.steps] == [0, 1, 2]
    seconds = []  # durations of the backwards in each rank's step
    for step in timeline.steps:
        check_order(step)
        for rank_step in step.ranks.values():
            assert len(rank_step.local_backwards) == 2
            backwards = (*rank_step.local_backwards, rank_step.backward)
            seconds.append([backward.ns / 1e9 for backward in backwards])
            assert min(seconds[-1]) >= LOCAL_BACKWARD_S
            assert rank_step.local_backwards[0].end <= rank_step.local_backwards[1].begin
            assert rank_step.local_backwards[1].end <= rank_step.forwards[-1].begin
            figures = step_figures(rank_step)
            assert 3e9 * LOCAL_BACKWARD_S <= figures.compute <= figures.whole
    # The machine may delay some of them.
    assert all(median(kind) < 10 * LOCAL_BACKWARD_S for kind in zip(*seconds, strict=True)), seconds


def _record_shards() -> Timeline:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(nn.Linear(8, 8, bias=False), mesh["tp"], ColwiseParallel())
    model = ReducerDDP(module, device_mesh=mesh["dp"])
    with ddpx.record(model) as timeline:
        train_step(model)
    return timeline


def test_the_size_of_a_shard_is_that_of_the_local_part(ranks):
    recording = ranks(2).run(_record_shards)[0].recording
    assert recording.param_bytes == (4 * 8 * 8 // 2,)
    assert recording.steps[0].layout[0].num_bytes == 4 * 8 * 8 // 2


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({"reduce_dtype": torch.float64}, 8),
        ({"mixed_precision": _MixedPrecision(torch.bfloat16, torch.bfloat16)}, 2),
        ({"mixed_precision": _MixedPrecision(torch.bfloat16)}, 2),
    ],
    ids=["reduce_dtype", "mixed precision", "param_dtype"],
)
def test_the_size_of_a_bucket_is_what_is_sent(ranks, options, bytes_each):
    """Bucket caps apply to the sizes of parameters. Bandwidths are those of sent bytes."""
    recording = ranks(2).run(record_mode, options)[0].recording
    assert recording.param_bytes == tuple(4 * size for size in (64, 8, 64, 8))
    assert recording.steps[-1].layout[0].num_bytes == 144 * bytes_each


def _record_two_backwards_of_a_forward() -> Timeline:
    """The first backward is local."""
    model = small_model()
    train_step(model)
    with ddpx.record(model) as timeline:
        loss = model(torch.randn(4, 8)).sum()
        with model.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
    return timeline


def test_a_local_backward_is_no_part_of_the_next_backward(ranks):
    for timeline in ranks(2).run(_record_two_backwards_of_a_forward):
        for rank_step in timeline.steps[0].ranks.values():
            (local,) = rank_step.local_backwards
            assert local.end <= rank_step.backward.begin


def _raise(*_: object) -> None:
    raise ValueError("a mistake of the script")


def _raise_with_output(layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def _record_a_step_that_is_repeated(before_a_gradient: bool) -> Timeline:
    """A local backward, and then a backward that raises. The script runs the step again."""
    model = ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    train_step(model)
    with ddpx.record(model) as timeline:
        with model.no_sync():
            train_step(model)
        layer = model.module[0]
        if before_a_gradient:
            handle = layer.register_forward_hook(_raise_with_output)
        else:
            handle = layer.weight.register_hook(_raise)
        with pytest.raises(ValueError, match="mistake"):
            train_step(model)
        handle.remove()
        model.zero_grad()
        train_step(model)
    return timeline


@pytest.mark.parametrize("before_a_gradient", [True, False])
def test_a_repeated_step_has_no_spans_of_the_attempt_before(ranks, before_a_gradient):
    for timeline in ranks(2).run(_record_a_step_that_is_repeated, before_a_gradient):
        for rank_step in timeline.steps[0].ranks.values():
            assert rank_step.forwards[-1].end <= rank_step.backward.begin
            if not before_a_gradient:
                assert not rank_step.local_backwards
                assert len(rank_step.forwards) == 1


def test_a_step_that_may_lack_lost_events_is_left_out(ranks):
    timeline = ranks(2).run(record_mode, {})[0]
    data = [replace(of_rank, num_lost=7) for of_rank in timeline._ranks]
    assert [step.number for step in Timeline(None, data).steps] == [1, 2, 3]


def _record_with_threads() -> dict[int, int]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 + dist.get_rank())
    try:
        model = small_model()
        with ddpx.record(model) as timeline:
            train_step(model)
    finally:
        torch.set_num_threads(before)
    return timeline.recording.num_threads


def test_each_rank_has_its_number_of_threads(ranks):
    assert ranks(2).run(_record_with_threads) == [{0: 1, 1: 2}] * 2
