"""What is shown of a step in full, and the cause of its longest wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import BEGIN_MS, LAYOUT, MS, late_rank, make_recording, many_buckets, rank_step
from synthetic import recording as make

from ddpx.timeline.analyze.figures import Holdup, holdup
from ddpx.timeline.analyze.focus import (
    LongestWait,
    bucket_rows,
    detailed_ranks,
    longest_wait,
    wait_text,
)
from ddpx.timeline.model import BucketLayout, Recording, Step


def _two_ranks(late_by_ms: float, gradient_late_by_ms: float) -> Recording:
    """A bucket on two ranks. Rank 1 begins late, or the bucket's gradient arrives late there."""

    def on(delay: float, gradient_delay: float):
        ready = 20 + delay + gradient_delay
        all_ready = 20 + late_by_ms + gradient_late_by_ms
        end = max(ready + 1, all_ready + 2)
        return rank_step(
            BEGIN_MS[12],
            forward=(delay, 10 + delay),
            backward=(10 + delay, ready + 1),
            end=end + 1,
            arrivals={2: ready},
            buckets=((ready, ready, all_ready + 2, ready + 1, end, end + 0.5),),
        )

    step = Step(12, LAYOUT[1:2], {0: on(0, 0), 1: on(late_by_ms, gradient_late_by_ms)})
    return make((step,), make_recording().param_names, make_recording().param_bytes)


@pytest.mark.parametrize(
    ("recording", "cause"),
    [
        (_two_ranks(20, 0), "because rank 1 begins the step 20.0 ms later."),
        (
            _two_ranks(0, 20),
            "because rank 1 launches it 20.0 ms later, after its gradient of 1.weight.",
        ),
        (_two_ranks(0, 0.5), "mostly for its transfer of 2.0 MiB (1.5 ms)."),
    ],
)
def test_cause_of_the_longest_wait(recording, cause):
    text = wait_text(recording, recording.steps[0])
    assert text.startswith("Longest wait: rank 0 waits ")
    assert text.endswith(f" ms for bucket 0, {cause}")


def test_launch_without_a_gradient():
    recording = _two_ranks(0, 20)
    step = recording.steps[0]
    late = replace(step.ranks[1], arrivals=())
    text = wait_text(recording, replace(step, ranks={0: step.ranks[0], 1: late}))
    assert text.endswith("because rank 1 launches it 20.0 ms later, after its backward.")


def test_a_bucket_may_wait_for_a_gradient_of_an_earlier_bucket():
    """Buckets are launched in order."""

    def on(first: float):
        buckets = [(first, first, 45, 40, 45, 46), (15, first, 46, 45, 46, 47)]
        return rank_step(0, (0, 10), (10, 40), 50, {1: 15, 0: first}, buckets)

    layout = (BucketLayout((0,), 1 << 20), BucketLayout((1,), 1 << 20))
    assert holdup(Step(0, layout, {0: on(20), 1: on(30)}), 1) == Holdup(1, 0, 10 * MS)


def test_longest_wait():
    step = make_recording().steps[1]  # step 13: rank 1 waits for bucket 2 from 31 to 38 ms
    assert longest_wait(step) == LongestWait(rank=1, bucket=2, ns=7 * MS, held_up_ns=1 * MS)
    assert longest_wait(many_buckets(3, 2).steps[0]) is None


def test_straggler_and_victim_of_many_ranks():
    assert detailed_ranks(late_rank(30, 16, late=7).steps[0]) == [0, 7]
    assert detailed_ranks(late_rank(6, 8, late=7).steps[0]) == list(range(8))
    assert detailed_ranks(late_rank(7, 8, late=7).steps[0]) == [0, 7]
    assert detailed_ranks(late_rank(3, 9, late=7).steps[0]) == [0, 7]
    assert detailed_ranks(many_buckets(30, 16).steps[0]) == [0]  # no rank waits


def test_rows_of_many_buckets():
    assert bucket_rows(many_buckets(20, 2).steps[0], [0, 1]) == [(index,) for index in range(20)]
    rows = bucket_rows(late_rank(30, 2, late=1).steps[0], [0, 1])
    assert [index for row in rows for index in row] == list(range(30))
    assert (0,) in rows and (29,) in rows and tuple(range(1, 15)) in rows
    assert len(rows) <= 19
