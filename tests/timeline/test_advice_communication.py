"""When advice about buckets and the link is given. Each simulated recording has one cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import MODEL, USUAL, Model, Rank, Wire, evenly, simulate

from ddpx.timeline.analyze.diagnoses import advise, diagnose
from ddpx.timeline.model import Clock, Recording


def _causes(recording: Recording) -> list[str]:
    return [finding.cause for finding in diagnose(recording)]


def test_the_last_bucket_is_too_large():
    model = Model([2.0] * 9, [[0, 1, 2], [3, 4, 5, 6, 7, 8]])
    assert advise(simulate([USUAL] * 2, model)) == [
        "Bucket 1 of 12 MiB, the last to be launched, is too large to be hidden: rank 0 waits "
        "12.1 ms of a step of 102.1 ms. Try bucket_cap_mb_list=[6, 3]."
    ]


def test_a_middle_bucket_is_too_large():
    """The last bucket queues behind the transfer of the large bucket."""
    model = Model([*[2.0] * 8, 0.1], [[0], [1, 2, 3, 4, 5, 6, 7], [8]])
    (sentence,) = advise(simulate([USUAL] * 2, model, Wire(ms_per_mib=1.5)))
    assert sentence.startswith("Bucket 1 of 14 MiB is too large to be hidden: rank 0 waits 14.7")
    assert sentence.endswith("Try bucket_cap_mb_list=[2, 4, 4, 4, 2, 1].")


@pytest.mark.parametrize("last_buckets", [[[6, 7], [8]], [[6, 7, 8]]])
def test_a_single_gradient_is_not_divided(last_buckets):
    model = Model([*[2.0] * 8, 24.0], [[0, 1], [2, 3], [4, 5], *last_buckets])
    (sentence,) = advise(simulate([USUAL] * 2, model))
    assert sentence.endswith(
        "The gradient of w8 alone has 24 MiB, and a gradient is never divided: send less of it, "
        "with bf16_compress_hook."
    )


def _kinds(*of_buckets: str) -> dict[str, Any]:
    return {"param_kinds": [kind for kind in of_buckets for _ in range(4)]}


@pytest.mark.parametrize(
    ("mib", "kinds", "advised"),
    [
        ([10.39, 24], ("float32 on cpu", "float32 on cpu"), "[10.3, 6]"),
        # The only bucket of its dtype uses the first cap of the list, which also fits the other
        # bucket.
        ([3, 24], ("float32 on cpu", "float64 on cpu"), "[6]"),
        # The cap that splits this bucket would also split the other bucket.
        ([10, 24], ("float32 on cpu", "float64 on cpu"), None),
        # The second bucket of its dtype. The cap of the first bucket may or may not split it.
        ([10, 10, 24], ("float32 on cpu", "float64 on cpu", "float64 on cpu"), "[10, 6]"),
        ([30, 10, 24], ("float32 on cpu", "float64 on cpu", "float64 on cpu"), None),
        # A delayed bucket uses no cap.
        ([10, 30, 24], ("float32 on cpu", "float32 on cpu, delayed", "float32 on cpu"), "[10, 6]"),
        ([10, 24], ("float32 on cpu", "float32 on cpu, delayed"), None),
        ([10, 24], ("float32 on cuda:0", "float32 on cuda:1"), None),
        # A list has 12 caps at most.
        ([10] * 11 + [24], ("float32 on cpu",) * 12, f"[{'10, ' * 11}6]"),
        ([10] * 12 + [24], ("float32 on cpu",) * 13, None),
    ],
)
def test_caps_leave_buckets_of_other_kinds_as_they_are(mib, kinds, advised):
    """Each bucket has four parameters."""
    buckets = [[4 * index + i for i in range(4)] for index in range(len(mib))]
    model = Model([size / 4 for size in mib for _ in range(4)], buckets)
    rank = Rank(evenly(4 * len(mib), 300))
    (sentence,) = advise(simulate([rank] * 2, model, Wire(2), **_kinds(*kinds)))
    assert sentence.startswith(f"Bucket {len(mib) - 1} of 24 MiB")
    if advised is None:
        assert sentence.endswith("Try a smaller bucket_cap_mb.")
    else:
        assert sentence.endswith(f"Try bucket_cap_mb_list={advised}.")


def test_the_first_bucket_is_launched_too_late():
    model = Model([2.0] * 9, [[0, 1, 2, 3, 4, 5, 6], [7], [8]])
    assert advise(simulate([USUAL] * 2, model, Wire(2))) == [
        "Bucket 0 of 14 MiB is launched too late for backward to hide the communication: rank 0 "
        "waits 23.0 ms of a step of 113.0 ms. Try bucket_cap_mb_list=[4, 4, 4, 2, 2, 2]."
    ]


def test_the_first_bucket_waits_for_the_last_gradient():
    model = Model([2.0] * 9, [[8], [0, 1, 2], [3, 4, 5], [6, 7]])
    (finding,) = diagnose(simulate([USUAL] * 2, model, Wire(2)))
    assert finding.cause == "late first bucket"
    assert "the gradient of w8 completes it, and full buckets queue behind it" in finding.sentence
    assert "(leave it out, or register layers in the order of forward)" in finding.sentence
    assert finding.sentence.endswith("DDPX_BUCKET_PLAN (make a new plan).")


def test_slow_link():
    recording = simulate([USUAL] * 2, MODEL, Wire(8))
    (sentence,) = advise(recording)
    assert sentence.startswith(
        "Buckets are moving for 129.3 ms a step (0.131 GB/s), and backward on rank 0 can hide only "
        "53.3 ms of it: rank 0 waits 82.6 ms of a step of 172.6 ms. Send less (bf16_compress_hook"
    )
    assert "shared memory" not in sentence
    over_gloo = replace(recording, backend="gloo")
    assert advise(over_gloo)[0].endswith(
        'or, without a communication hook, through shared memory: transport="shm" of ReducerDDP.'
    )
    (sentence,) = advise(replace(over_gloo, hosts={0: "here", 1: "there"}))
    assert "shared memory" not in sentence
    of_three = simulate([USUAL] * 3, MODEL, Wire(8))
    hosts = {0: "here", 1: "here", 2: "there"}
    (sentence,) = advise(replace(of_three, backend="gloo", hosts=hosts))
    assert "through shared memory within hosts: transport=" in sentence


def test_a_communication_hook_gets_no_advice_to_use_one():
    """A wrapper takes one hook, and a hook does not use shared memory."""
    recording = replace(simulate([USUAL] * 2, MODEL, Wire(8)), backend="gloo", has_hook=True)
    (sentence,) = advise(recording)
    assert sentence.endswith("Send less: several backwards in no_sync() for one that averages.")
    model = Model([*[2.0] * 8, 24.0], [[0, 1], [2, 3], [4, 5], [6, 7, 8]])
    (sentence,) = advise(replace(simulate([USUAL] * 2, model), has_hook=True))
    assert sentence.endswith(
        "never divided: run several backwards in no_sync() for one that averages."
    )


def test_small_buckets():
    num_params = 200
    model = Model([0.02] * num_params, [[param] for param in range(num_params)])
    rank = Rank(evenly(num_params))
    assert advise(simulate([rank] * 2, model, Wire(overhead_ms=0.4))) == [
        "200 of 200 buckets are smaller than 1 MiB, 20 KiB in the median, and take 0.42 ms each on "
        "average: rank 0 waits 24.3 ms of a step of 114.3 ms. Try bucket_cap_mb=1 or more."
    ]


def _many_params(mib: list[float], wire: Wire) -> Recording:
    """Each parameter has its own bucket. Backward takes 60 ms."""
    model = Model(mib, [[param] for param in range(len(mib))])
    return simulate([Rank(evenly(len(mib)))] * 2, model, wire)


def test_small_buckets_on_a_busy_machine():
    """In each step, other calls are delayed, so that no call is slow in the median."""
    mib = [0.005 * (1 + param % 4) for param in range(200)]
    wires = [Wire(1, 0.2, dict.fromkeys(range(first, 200, 8), 4.0)) for first in range(5)]
    busy = [_many_params(mib, wire) for wire in wires]
    steps = tuple(recording.steps[0] for recording in busy)
    (finding,) = diagnose(replace(busy[0], steps=steps))
    assert finding.cause == "small buckets"
    assert "and take 0.71 ms each on average" in finding.sentence


@pytest.mark.parametrize(
    ("overhead_ms", "ms_per_mib", "cause"),
    [(0.8, 0, "small buckets"), (0.8, 16, "small buckets"), (0.2, 40, "slow link")],
)
def test_buckets_of_different_sizes_tell_overhead_from_bandwidth(overhead_ms, ms_per_mib, cause):
    """All have the same mean size of 20 KiB, for which overhead is usually longer."""
    mib = [0.01 if param % 2 else 0.03 for param in range(200)]
    assert _causes(_many_params(mib, Wire(ms_per_mib, overhead_ms))) == [cause]


@pytest.mark.parametrize(
    ("mib", "cause"),
    [([0.01, 0.03, 0.1, 0.2] * 10, "small buckets"), ([0.085] * 40, "slow link")],
)
def test_all_reduces_that_take_long_to_begin(mib, cause):
    """As on a GPU that several ranks share. Only buckets of different sizes tell."""
    assert _causes(_many_params(mib, Wire(1, overhead_ms=13))) == [cause]


def test_small_buckets_beside_large_buckets():
    mib = [*[2.0] * 10, *[0.01] * 190]
    assert _causes(_many_params(mib, Wire(1, overhead_ms=0.5))) == ["small buckets"]
    assert _causes(_many_params(mib, Wire(6, overhead_ms=0.1))) == ["slow link"]


def test_small_buckets_over_a_slow_link():
    """Larger buckets would not help: the link needs the time."""
    num_params = 40
    model = Model([0.25] * num_params, [[param] for param in range(num_params)])
    recording = simulate([Rank(evenly(num_params))] * 2, model, Wire(40))
    assert _causes(recording) == ["slow link"]


def test_waiting_for_a_rank_is_not_communication():
    early, late = Rank(evenly(9, 10), forward=5), Rank(evenly(9, 120))
    assert _causes(simulate([early, late], MODEL)) == ["slow compute"]


def test_a_rank_without_the_data_of_others():
    """As after an exception. Its waits may be for the other rank, or for communication."""
    recording = simulate([USUAL] * 2, MODEL, Wire(8))
    steps = tuple(replace(step, ranks={0: step.ranks[0]}) for step in recording.steps)
    alone = replace(recording, steps=steps, hosts={0: "here"}, clocks={0: Clock(0.0, 0.0)})
    assert advise(alone) == []


def test_copies_back():
    copied = replace(USUAL, copy=1.2)
    assert advise(simulate([USUAL, copied], MODEL)) == [
        "Copying averaged gradients back takes 6.0 ms a step on rank 1: with "
        "gradient_as_bucket_view=True there is nothing to copy."
    ]


# ---- cores ---------------------------------------------------------------------------------------
