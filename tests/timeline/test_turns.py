"""Reductions of a device take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import MS, rank_step, recording

from ddpx.timeline.analyze.turns import in_turn
from ddpx.timeline.export.page import page_data
from ddpx.timeline.export.rows import bucket_bars
from ddpx.timeline.model import BucketLayout, Interval, Recording, Step


def _recording(device: str, backend: str) -> Recording:
    """Two buckets that are launched together, and one that is launched later."""
    rank = rank_step(
        0,
        forward=(0, 10),
        backward=(10, 20),
        end=41,
        arrivals={0: 12, 1: 12, 2: 19},
        buckets=((12, 12, 18, 20, 20, 20), (12, 12, 22, 20, 22, 22), (19, 30, 40, 22, 40, 41)),
    )
    layout = tuple(BucketLayout((param,), 1 << 20) for param in range(3))
    step = Step(1, layout, {0: rank, 1: rank})
    return recording([step], "abc", [1 << 20] * 3, device=device, backend=backend)


def _ms(spans: list[Interval]) -> list[tuple[float, float]]:
    return [(span.begin / MS, span.end / MS) for span in spans]


def _reductions(made: Recording, step: Step) -> list[tuple[float, float] | None]:
    buckets = in_turn(made, step).ranks[0].buckets
    return [each and (each.launched / MS, each.completed / MS) for each in buckets]


@pytest.mark.parametrize(
    ("device", "backend", "second"),
    [
        ("cuda:0", "nccl", (18, 22)),
        ("cuda:0", "gloo", (12, 22)),
        ("cpu", "shm", (12, 22)),
        ("cpu", "gloo", (12, 22)),
    ],
)
def test_a_reduction_begins_after_the_one_before_it(device, backend, second):
    made = _recording(device, backend)
    assert _reductions(made, made.steps[0]) == [(12, 18), second, (30, 40)]


def test_buckets_that_are_not_sent_are_left_out():
    made = _recording("cuda:0", "nccl")
    step = made.steps[0]
    rank = step.ranks[0]
    without = replace(step, ranks={0: replace(rank, buckets=(None, *rank.buckets[1:]))})
    assert _reductions(made, without) == [None, (12, 22), (30, 40)]


def test_a_picture_shows_the_turn_as_a_queue():
    made = _recording("cuda:0", "nccl")
    bars, _ = bucket_bars(in_turn(made, made.steps[0]), 0, [1])
    assert _ms([*bars["queued"], *bars["moving"]]) == [(12, 18), (18, 22)]
    on_cpu = _recording("cpu", "shm")
    assert in_turn(on_cpu, on_cpu.steps[0]) is on_cpu.steps[0]


def test_the_page_has_the_start_of_a_reduction_that_waits_for_its_turn():
    names = page_data(_recording("cpu", "shm"))["times"]
    begins, launched = names.index("begins"), names.index("launched")
    for device, backend, waited in (("cuda:0", "nccl", 6_000), ("cpu", "shm", 0)):
        buckets = page_data(_recording(device, backend))["steps"][0]["ranks"][0]["buckets"]
        assert [bucket[begins] - bucket[launched] for bucket in buckets] == [0, waited, 0]
