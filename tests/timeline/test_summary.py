"""The figures and texts of a summary, over recordings with exact times."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from simulated import MODEL, USUAL, Model, Rank, Wire, evenly, simulate
from synthetic import LAYOUT, PARAM_NAMES, accumulated, make_recording, rank_step

from ddpx.timeline.analyze.cores import shared_cores
from ddpx.timeline.analyze.extent import not_begun
from ddpx.timeline.analyze.focus import wait_text
from ddpx.timeline.analyze.lateness import lateness
from ddpx.timeline.analyze.summarize import summarize
from ddpx.timeline.analyze.summary import Summary
from ddpx.timeline.analyze.transfers import exposed_transfer_ns, origin_of_wait, transfers
from ddpx.timeline.model import BucketLayout, Recording, Step

MS = 1_000_000


def _late_start(**others: Any) -> Recording:
    return simulate([USUAL, replace(USUAL, begin=20)], MODEL, **others)


def _lines(summary: Summary) -> list[str]:
    return [" ".join(line.split()) for line in str(summary).splitlines()]


# ---- ranks ---------------------------------------------------------------------------------------


def test_time_before_the_first_forward():
    recording = _late_start()
    assert [not_begun(recording.steps[0], rank).ns for rank in (0, 1)] == [0, 20 * MS]
    summary = summarize(recording)
    assert [rank.not_begun_ms for rank in summary.ranks] == [0, 20]
    # The step of a rank starts with its own forward.
    assert summary.ranks[0].step_ms == summary.ranks[1].step_ms + 20
    # Rank 0 has begun a backward in no_sync() long before rank 1 begins.
    assert not_begun(accumulated().steps[0], 1).ns == 32 * MS


def test_others_wait_for_a_rank_once_per_step():
    """Not once for each of five buckets."""
    summary = summarize(_late_start())
    assert [rank.kept_waiting_ms for rank in summary.ranks] == [0, pytest.approx(20)]
    assert summary.straggler == 1
    assert all(rank.kept_waiting_ms <= rank.step_ms for rank in summary.ranks)


def test_a_rank_that_begins_late_is_not_late_by_a_gradient():
    rows = summarize(_late_start()).buckets
    assert [row.waited_for_rank for row in rows] == [1] * 5
    assert [row.waited_for_param for row in rows] == [None] * 5
    late = simulate([USUAL, Rank({**evenly(9), 2: 30.0})], MODEL)
    rows = summarize(late).buckets
    assert [row.waited_for_rank for row in rows] == [None, 1, 1, 1, 1]
    assert [row.waited_for_param for row in rows] == [None, "w3", "w5", "w7", "w8"]


@pytest.mark.parametrize("late", [{"forward": 60.0}, {"between": 30.0}])
def test_a_rank_that_is_late_before_backward_is_not_late_by_a_gradient(late):
    recording = simulate([USUAL, replace(USUAL, **late)], MODEL)
    rows = summarize(recording).buckets
    assert [(row.waited_for_rank, row.waited_for_param) for row in rows] == [(1, None)] * 5
    said = wait_text(recording, recording.steps[0])
    assert said.endswith(", because rank 1 begins its backward 30.0 ms later.")


def test_a_straggler_is_named_beyond_noise_only():
    """Rank 1 is late in step 12, and rank 0 in step 13."""
    assert summarize(make_recording()).straggler is None
    assert all(row.waited_for_rank is None for row in summarize(make_recording()).buckets)
    barely = simulate([USUAL, replace(USUAL, begin=1)], MODEL)
    assert summarize(barely).straggler is None
    unsure = summarize(_late_start(clock_error_ms=25))
    assert unsure.straggler is None
    assert [rank.clock_error_us for rank in unsure.ranks] == [0, 25_000]


def test_lateness():
    step = simulate([USUAL, Rank(evenly(9, 90), begin=5, forward=35, between=2)], MODEL).steps[0]
    early, found = lateness(step)[0], lateness(step)[1]
    assert (found.start, found.waited) == (5 * MS, pytest.approx(42 * MS, abs=10))
    assert list(found.stages.values()) == [5 * MS, 2 * MS, pytest.approx(30 * MS, abs=10)]
    assert (found.from_start, found.from_compute) == (5 * MS, pytest.approx(37 * MS, abs=10))
    assert (early.waited, early.start) == (0, -5 * MS)
    assert lateness(simulate([USUAL], MODEL).steps[0]) == {}


def test_lateness_against_the_median_of_the_others():
    ranks = [replace(USUAL, begin=begin) for begin in (0, 3, 8, 20)]
    found = lateness(simulate(ranks, MODEL).steps[0])
    assert [found[rank].start / MS for rank in range(4)] == [-8, -5, 5, 17]
    assert [found[rank].waited / MS for rank in range(4)] == pytest.approx([0, 3, 8, 20])


def test_a_launch_before_other_backwards_end_lets_nobody_wait():
    """Rank 0 ends its backward first, and launches its bucket while rank 1 computes."""
    steps = [
        rank_step(0, (0, 10), (10, end), 50, {0: 15}, [(end, launched, 45, 40, 45, 46)])
        for end, launched in ((20, 25), (40, 40))
    ]
    step = Step(0, (BucketLayout((0,), 1 << 20),), dict(enumerate(steps)))
    assert [late.waited for late in lateness(step).values()] == [0, 20 * MS]


def test_a_core_for_each_thread_is_enough():
    recording = replace(_late_start(), cores={0: (0, 1), 1: (0, 1)}, num_threads={0: 1, 1: 1})
    assert not shared_cores(recording)
    (found,) = shared_cores(replace(recording, num_threads={0: 2, 1: 1}))
    assert (found.ranks, found.num_threads, found.num_cores) == ((0, 1), 3, 2)
    assert not shared_cores(replace(recording, cores={0: (0,), 1: (1,)}))


# ---- buckets -------------------------------------------------------------------------------------


def test_a_sparse_bucket_has_no_size():
    summary = summarize(_late_start())
    buckets = (replace(summary.buckets[0], num_bytes=0), *summary.buckets[1:])
    starts = [line.split()[:2] for line in _lines(replace(summary, buckets=buckets))]
    assert ["0", "sparse"] in starts and ["1", "4.00"] in starts


def test_times_of_buckets_are_those_of_one_rank():
    """Rank 0 waits longest. Its times are not mixed with the times of rank 1."""
    recording = _late_start()
    summary = summarize(recording)
    assert {row.rank for row in summary.buckets} == {0}
    step = recording.steps[0].ranks[0]
    for row, bucket in zip(summary.buckets, step.buckets, strict=True):
        assert bucket is not None
        assert row.completed_ms == pytest.approx((bucket.completed - step.backward.begin) / MS)
        assert row.exposed_ms == bucket.wait.ns / MS
    assert (
        "Buckets of rank 0, which waits longest. Times start at its start of backward."
        in _lines(summary)
    )


def test_bandwidth_does_not_count_queues():
    """The last bucket queues for 50 ms behind the large bucket."""
    model = Model([20.0, 2.0], [[0], [1]])
    recording = simulate([Rank({0: 30.0, 1: 10.0})] * 2, model, Wire(3, 0))
    found = transfers(recording.steps[0], "shm")
    assert found.ns == pytest.approx({0: 60 * MS, 1: 6 * MS})
    mib_in_3_ms = (1 << 20) / 3e-3 / 1e9
    assert found.gb_per_s == pytest.approx({0: mib_in_3_ms, 1: mib_in_3_ms})
    assert [row.gb_per_s for row in summarize(recording).buckets] == [
        pytest.approx(mib_in_3_ms)
    ] * 2


def test_bandwidth_does_not_count_waits_for_ranks():
    early, late = summarize(simulate([USUAL] * 2, MODEL)), summarize(_late_start())
    assert [row.gb_per_s for row in early.buckets] == pytest.approx(
        [row.gb_per_s for row in late.buckets]
    )


def test_transfers_that_move_at_the_same_time():
    """Gloo moves two buckets at a time. They share that time."""
    model = Model([10.0, 10.0, 10.0], [[0], [1], [2]])
    step = simulate([Rank({0: 1.0, 1: 0.0, 2: 0.0})] * 2, model, Wire(1, 0)).steps[0]
    assert transfers(step, "gloo").ns == pytest.approx({0: 5 * MS, 1: 10 * MS, 2: 15 * MS})
    assert transfers(step, "gloo").total_ns == pytest.approx(30 * MS)


def test_bandwidth_of_sparse_buckets_is_unknown():
    recording = simulate([USUAL] * 2, MODEL)
    layout = (*MODEL.layout[:-1], BucketLayout((8,), 0))
    steps = tuple(Step(step.number, layout, step.ranks) for step in recording.steps)
    rows = summarize(replace(recording, steps=steps)).buckets
    assert [row.gb_per_s is None for row in rows] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("buckets", "origin"),
    [
        ([[0], [1, 2, 3, 4, 5, 6, 7, 8]], 1),  # the last bucket itself
        ([[0], [1, 2, 3, 4, 5, 6, 7], [8]], 1),  # it queues behind a transfer
        ([[8], [0, 1, 2], [3, 4, 5], [6, 7]], 0),  # it queues behind a launch
    ],
)
def test_the_bucket_that_makes_backward_wait(buckets, origin):
    step = simulate([USUAL] * 2, Model([2.0] * 9, buckets), Wire(2)).steps[0]
    exposed = exposed_transfer_ns(step.ranks[0], transfers(step, "shm").begin)
    assert origin_of_wait(step.ranks[0], exposed) == origin


# ---- texts ---------------------------------------------------------------------------------------


def test_text_of_a_recording():
    lines = _lines(summarize(_late_start()))
    assert lines[0] == (
        "5 steps (5 to 9) of 2 of 2 ranks over shm, on cpu. Times are medians over steps, in ms."
    )
    assert "0 here 0.00 110.20 90.00 66.87 46.67 20.20 16.60 0% 0.00 0" in lines
    assert lines[-1] == "Straggler: rank 1."
    assert "Buckets of rank 0, which waits longest. Times start" in "".join(lines)
    alone = summarize(simulate([USUAL], MODEL))
    assert "\nBuckets of rank 0. Times start" in str(alone)


def test_a_legend_explains_each_column():
    lines = str(summarize(_late_start())).splitlines()
    text = " ".join(lines)
    headers = [above for above, line in pairwise(lines) if "-----" in line]
    assert len(headers) == 2
    for header in headers:
        for column in header.split("  "):
            assert not column or f"{column.strip()}: " in text
    assert max(map(len, (line for line in lines if ": " in line))) <= 100


def _with_other_steps(numbers: list[int], **others: Any) -> Recording:
    """A recording of steps 5 to 9 that follow steps with other buckets."""
    recording = simulate([USUAL] * 2, MODEL, **others)
    ranks = recording.steps[0].ranks
    earlier = [Step(number, (MODEL.layout[0], *MODEL.layout[2:]), ranks) for number in numbers]
    return replace(recording, steps=(*earlier, *recording.steps))


def test_steps_before_a_rebuild():
    assert _lines(summarize(_with_other_steps([0])))[1] == (
        "Step 0 left out: its buckets were not rebuilt yet."
    )
    assert _lines(summarize(_with_other_steps([2, 3, 4])))[1] == (
        "Steps 2 to 4 left out: their buckets were not rebuilt yet."
    )


def test_steps_with_other_buckets_between():
    """A search of bucket plans uses several plans in turns."""
    recording = _with_other_steps([2, 3])
    last = recording.steps[-1]
    between = replace(recording.steps[0], number=last.number + 1)
    steps = (*recording.steps, between, replace(last, number=last.number + 2))
    assert _lines(summarize(replace(recording, steps=steps)))[1] == (
        f"3 steps from 2 to {between.number} left out: they had other buckets than the last step."
    )


def test_fewer_steps_than_asked_for():
    assert _lines(summarize(_with_other_steps([0], asked_steps=20)))[1] == (
        "Only 6 of the 20 steps that were asked for were completed while the recording ran."
    )
    assert "Only" not in str(summarize(_with_other_steps([0], asked_steps=6)))


def test_ranks_that_share_cores():
    recording = simulate([USUAL] * 4, MODEL, cores=dict.fromkeys(range(4), (0, 3)))
    assert _lines(summarize(recording))[1] == "4 ranks share 2 cores of host here."
    enough = replace(recording, cores=dict.fromkeys(range(4), (0, 1, 2, 3)))
    assert "ranks share" not in str(summarize(enough))


def test_layout_of_the_recording_made_by_hand():
    rows = summarize(make_recording()).buckets
    assert [row.num_bytes for row in rows] == [bucket.num_bytes for bucket in LAYOUT]
    assert len(PARAM_NAMES) == sum(row.num_params for row in rows)
