"""Recorded times against known ones, from a model and a backend that were made for it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
import torch
import torch.distributed as dist
from known_times import DelayedGroup, slow_model

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.figures import holdup, step_figures
from ddpx.timeline.model import RankStep

MS = 1_000_000
# Of the median of several steps: sleeps and threads wake up late by less than this.
TOLERANCE_MS = 3.0

# Forward and backward of three layers, in s. Gradients come from the last layer to the first.
LAYERS = ((0.004, 0.020), (0.006, 0.040), (0.010, 0.060))
FORWARD_MS = 20.0
ARRIVALS_MS = {"2.weight": 60.0, "1.weight": 100.0, "0.weight": 120.0}  # since backward began
# A bucket a layer, in the order of arrival. The first ends within backward, the second is waited
# for, and the third ends while it is.
DELAYS = (0.030, 0.070, 0.035)
LAUNCHED_MS = (60.0, 100.0, 120.0)
COMPLETED_MS = (90.0, 170.0, 155.0)
WAITED_MS = (0.0, 50.0, 0.0)
COMMUNICATION_MS = (90.0 - 60.0) + (170.0 - 100.0)
EXPOSED_MS = 50.0


def _train(model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1)).sum().backward()


def _record_known_times() -> Timeline:
    group = DelayedGroup(DELAYS)
    model = ReducerDDP(
        slow_model(LAYERS), process_group=group, bucket_cap_mb=0.001, init_sync=False
    )
    _train(model, 3)  # from the second on the buckets are those of the arrival order
    group.restart()
    with ddpx.record(model) as timeline:
        _train(model, 5)
    return timeline


@pytest.fixture(scope="module")
def known() -> Timeline:
    with RankPool(1) as pool:
        return pool.run(_record_known_times)[0]


def _middle(timeline: Timeline, figure: Callable[[RankStep], float]) -> float:
    """In ms."""
    return median(figure(step.ranks[0]) for step in timeline.steps) / MS


def _near(ms: float) -> object:
    return pytest.approx(ms, abs=TOLERANCE_MS)


def test_all_steps_are_there(known):
    assert [step.number for step in known.steps] == [3, 4, 5, 6, 7]
    assert known.recording.lost_events == {0: 0}
    assert known.recording.clocks[0].error_ns == 0
    names = known.recording.param_names
    for step in known.steps:
        assert [[names[i] for i in b.params] for b in step.layout] == [
            ["2.weight"],
            ["1.weight"],
            ["0.weight"],
        ]
        assert [b.num_bytes for b in step.layout] == [4000] * 3


def test_forward_and_backward(known):
    assert _middle(known, lambda s: s.forwards[0].ns) == _near(FORWARD_MS)
    assert _middle(known, lambda s: s.backward.ns) == _near(120.0)
    assert all(len(step.ranks[0].forwards) == 1 for step in known.steps)


def test_arrivals(known):
    names = known.recording.param_names
    for position, (name, at_ms) in enumerate(ARRIVALS_MS.items()):
        for step in known.steps:
            assert names[step.ranks[0].arrivals[position].param] == name
        found = _middle(known, lambda s, p=position: s.arrivals[p].at - s.backward.begin)
        assert found == _near(at_ms)


@pytest.mark.parametrize("index", range(3))
def test_buckets(known, index):
    def since_backward(name: str) -> float:
        return _middle(known, lambda s: getattr(s.buckets[index], name) - s.backward.begin)

    assert since_backward("ready") == _near(LAUNCHED_MS[index])
    assert since_backward("launched") == _near(LAUNCHED_MS[index])
    assert since_backward("completed") == _near(COMPLETED_MS[index])
    assert _middle(known, lambda s: s.buckets[index].wait.ns) == _near(WAITED_MS[index])
    # Written back in order, each when it is there.
    assert since_backward("written_back") == _near(max(120.0, *COMPLETED_MS[: index + 1]))


def test_overlap(known):
    assert _middle(known, lambda s: step_figures(s).whole) == _near(FORWARD_MS + 120 + EXPOSED_MS)
    assert _middle(known, lambda s: step_figures(s).compute) == _near(FORWARD_MS + 120)
    communication = _middle(known, lambda s: step_figures(s).communication)
    assert communication == _near(COMMUNICATION_MS)
    assert _middle(known, lambda s: step_figures(s).exposed) == _near(EXPOSED_MS)
    overlapped = _middle(known, lambda s: step_figures(s).overlapped)
    assert overlapped == _near(COMMUNICATION_MS - EXPOSED_MS)


def test_phases(known):
    for step in known.steps:
        rank_step = step.ranks[0]
        assert [span.phase for span in rank_step.phases] == ["collecting", "draining"]
        collecting, draining = (span.span for span in rank_step.phases)
        assert rank_step.backward.begin <= collecting.begin < draining.begin
        assert abs(draining.begin - rank_step.backward.end) < TOLERANCE_MS * MS


def test_summary(known):
    summary = known.summary()
    assert summary.steps == (3, 4, 5, 6, 7)
    assert summary.straggler is None
    assert [bucket.launched_ms for bucket in summary.buckets] == [_near(ms) for ms in LAUNCHED_MS]
    assert [bucket.exposed_ms for bucket in summary.buckets] == [_near(ms) for ms in WAITED_MS]
    rank = summary.ranks[0]
    assert rank.compute_ms == _near(FORWARD_MS + 120)
    assert rank.overlapped_ms == _near(COMMUNICATION_MS - EXPOSED_MS)


# ---- two ranks ---------------------------------------------------------------------------------

SLOWER_S = 0.030


def _record_a_slow_rank() -> Timeline:
    layers = list(LAYERS)
    if dist.get_rank() == 1:
        layers[1] = (layers[1][0], layers[1][1] + SLOWER_S)
    model = ReducerDDP(slow_model(layers), bucket_cap_mb=0.001)
    _train(model, 3)
    with ddpx.record(model) as timeline:
        _train(model, 5)
    return timeline


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_who_is_waited_for(backend):
    with RankPool(2, backend) as pool:
        timelines = pool.run(_record_a_slow_rank)
    for timeline in timelines:  # every rank has everything
        assert [set(step.ranks) for step in timeline.steps] == [{0, 1}] * 5
        names = timeline.recording.param_names
        for index in (1, 2):
            found = [holdup(step, index) for step in timeline.steps]
            assert all(h is not None and h.rank == 1 for h in found)
            assert median(h.waited_ns for h in found if h) / MS == _near(1e3 * SLOWER_S)
        assert {names[h.param] for step in timeline.steps if (h := holdup(step, 1))} == {"1.weight"}
        summary = timeline.summary()
        assert summary.straggler == 1
        assert summary.buckets[1].waited_for_param == "1.weight"
        assert any("rank 1's 1.weight" in sentence for sentence in timeline.advice())
        # Rank 0 waits, rank 1 does not: to its last launch follows a short all-reduce.
        by_rank = {rank.rank: rank for rank in summary.ranks}
        assert by_rank[0].exposed_ms == _near(1e3 * SLOWER_S)
        assert by_rank[1].exposed_ms < TOLERANCE_MS
