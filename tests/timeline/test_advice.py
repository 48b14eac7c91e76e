"""When each advice is given: each simulated recording here has one cause of waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import Model, Rank, Wire, evenly, simulate
from synthetic import make_recording

from ddpx.timeline.analyze.diagnoses import advise, diagnose
from ddpx.timeline.analyze.noise import surely_above
from ddpx.timeline.model import Clock, Interval, RankStep, Recording

# Eight parameters of 2 MiB in four buckets, and then a small one. Backward takes 60 ms.
MODEL = Model([*[2.0] * 8, 0.1], [[0, 1], [2, 3], [4, 5], [6, 7], [8]])
USUAL = Rank(evenly(9))


def _causes(recording: Recording) -> list[str]:
    return [finding.cause for finding in diagnose(recording)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_nothing_to_say(num_ranks):
    assert advise(simulate([USUAL] * num_ranks, MODEL)) == []


def test_late_start():
    late = replace(USUAL, begin=20.7)
    assert advise(simulate([USUAL, late], MODEL)) == [
        "Rank 1 begins its step 20.7 ms after the others: rank 0 waits 20.7 ms a step for it. Look "
        "for what rank 1 alone does before forward, such as loading data, logging or saving."
    ]
    (sentence,) = advise(simulate([USUAL, USUAL, late, USUAL], MODEL))
    assert sentence.startswith(
        "Rank 2 begins its step 20.7 ms after the others (median): other ranks wait up to 20.7 ms"
    )


def test_late_start_that_nobody_waits_for():
    """The rank has less to compute."""
    late = replace(USUAL, begin=20, forward=10)
    assert advise(simulate([USUAL, late], MODEL)) == []


def test_a_rank_that_starts_late_and_computes_longer():
    """Each part is said with its own time."""
    late = replace(USUAL, begin=20, forward=60)
    start, compute = advise(simulate([USUAL, late], MODEL))
    assert "begins its step 20.0 ms after the others: rank 0 waits 20.0 ms" in start
    assert "computes 30.0 ms a step longer" in compute and "rank 0 waits 30.0 ms" in compute


def test_slow_compute():
    slow = Rank(evenly(9, 90), forward=45)
    assert advise(simulate([USUAL, slow], MODEL)) == [
        "Rank 1 (host here) computes 45.0 ms a step longer than the others, 30.0 ms of it in "
        "backward: rank 0 waits 45.0 ms a step for it. Compare its inputs (batch size, sequence "
        "length) and its machine with theirs."
    ]


def test_slow_between_forward_and_backward():
    (sentence,) = advise(simulate([USUAL, replace(USUAL, between=20)], MODEL))
    assert "20.0 ms of it in the time between forwards and backwards" in sentence
    assert sentence.endswith(
        "Look for what it alone does there, such as loading data, logging or saving."
    )


def _accumulate(recording: Recording, late_ms: float, local_ms: float) -> Recording:
    """Puts a forward and a backward in no_sync() before each step. Rank 1 is late by the times.

    ``late_ms`` is the time after the local backward, and ``local_ms`` is in the local backward.
    """

    def with_local(step: RankStep, late_ms: float, local_ms: float) -> RankStep:
        def at(ms: float) -> int:
            return step.forwards[0].begin - round((ms + late_ms) * 1e6)

        forward = Interval(at(20 + local_ms), at(10 + local_ms))
        local = Interval(forward.end, at(0))
        return replace(step, forwards=(forward, *step.forwards), local_backwards=(local,))

    steps = [
        replace(
            step,
            ranks={
                0: with_local(step.ranks[0], 0, 0),
                1: with_local(step.ranks[1], late_ms, local_ms),
            },
        )
        for step in recording.steps
    ]
    return replace(recording, steps=tuple(steps))


@pytest.mark.parametrize(
    ("late_ms", "local_ms", "where"),
    [(0.0, 20.0, "backward"), (20.0, 0.0, "the time between forwards and backwards")],
)
def test_slow_micro_steps(late_ms, local_ms, where):
    both_begin = simulate([USUAL, replace(USUAL, begin=late_ms + local_ms)], MODEL)
    (sentence,) = advise(_accumulate(both_begin, late_ms, local_ms))
    assert sentence.startswith(
        "Rank 1 (host here) computes 20.0 ms a step longer than the others, 20.0 ms of it in "
        f"{where}: rank 0 waits 20.0 ms"
    )


def test_two_slow_ranks_of_six():
    slow = Rank(evenly(9, 90), forward=45)
    recording = simulate([USUAL, slow, USUAL, USUAL, slow, USUAL], MODEL)
    assert [sentence[:6] for sentence in advise(recording)] == ["Rank 1", "Rank 4"]


@pytest.mark.parametrize("param", [0, 5, 8])
def test_late_gradient(param):
    late = Rank({**evenly(9), param: evenly(9)[param] + 14})
    (finding,) = diagnose(simulate([USUAL, late], MODEL))
    assert finding.cause == "late gradient"
    assert finding.sentence == (
        f"The gradient of w{param} takes 14.0 ms longer on rank 1 than on the others: rank 0 waits "
        "14.0 ms a step for it. Look for what rank 1 alone does there in backward, such as a hook "
        "or another branch."
    )


def test_unused_parameters():
    unused = {param: gap for param, gap in evenly(9).items() if param not in (2, 3, 4)}
    assert advise(simulate([Rank(unused)] * 2, MODEL)) == [
        "3 parameters (w2, w3, …) got no gradient on any rank in 5 steps, and 6.0 MiB of zeros a "
        "step are sent for them, 37% of all bytes. Call requires_grad_(False) on such parameters "
        "before you wrap the model."
    ]
    # Below 5 % of all bytes.
    almost_all = {param: gap for param, gap in evenly(9).items() if param != 8}
    assert advise(simulate([Rank(almost_all)] * 2, MODEL)) == []
    # One rank used them.
    unused[5] = 4 * evenly(9)[5]
    assert advise(simulate([Rank(unused), USUAL], MODEL)) == []


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
    assert "leave it out, or register layers in the order of forward" in finding.sentence


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


def _with_cores(waits: dict[int, float], **others: Any) -> Recording:
    """Rank 2 computes longer than the other three ranks."""
    ranks = [USUAL, USUAL, Rank(evenly(9, 90)), USUAL]
    return simulate(ranks, MODEL, cores=dict.fromkeys(range(4), (0, 1)), core_waits=waits, **others)


def test_ranks_that_share_cores():
    """All other signs follow from it."""
    assert advise(_with_cores({0: 0.2, 1: 0.43, 2: 0.4, 3: 0.1})) == [
        "4 ranks share 2 cores of host here, and rank 1 is without a core for 43% of the time. "
        "Start at most 2 ranks there, or use more cores."
    ]


def test_ranks_that_share_cores_of_an_unknown_kernel():
    (sentence,) = advise(_with_cores({}))
    assert sentence.startswith("4 ranks share 2 cores of host here. Start at most 2 ranks there")


def test_ranks_that_have_enough_of_their_cores():
    """Ranks that sleep, and ranks that use a GPU."""
    assert _causes(_with_cores(dict.fromkeys(range(4), 0.01))) == ["slow compute"]
    assert _causes(_with_cores({}, device="cuda:0")) == ["slow compute"]


def test_threads_that_share_cores():
    recording = replace(_with_cores({1: 0.3}), cores=dict.fromkeys(range(4), tuple(range(8))))
    assert _causes(recording) == ["slow compute"]
    assert advise(replace(recording, num_threads=dict.fromkeys(range(4), 4))) == [
        "4 ranks with 16 threads in all share 8 cores of host here, and rank 1 is without a core "
        "for 30% of the time. Set OMP_NUM_THREADS=2, or use more cores."
    ]


def test_each_host_has_its_cores():
    two_hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert _causes(_with_cores({}, hosts=two_hosts)) == ["slow compute"]
    pinned = {0: (0,), 1: (0,), 2: (1,), 3: (2,)}
    (sentence,) = advise(replace(_with_cores({}), cores=pinned))
    assert sentence.startswith("2 ranks share 1 core of host here. Start at most 1 rank there")


# ---- noise ---------------------------------------------------------------------------------------


def test_a_rank_that_is_late_in_half_of_the_steps_is_not_named():
    late = simulate([USUAL, replace(USUAL, begin=20)], MODEL, num_steps=12)
    usual = simulate([USUAL, USUAL], MODEL, num_steps=12)
    mixed = (*late.steps[:6], *usual.steps[6:])
    assert advise(replace(usual, steps=mixed)) == []
    mixed = (*late.steps[:10], *usual.steps[10:])
    assert _causes(replace(usual, steps=mixed)) == ["late start"]


def test_the_last_of_alternating_ranks_is_not_named():
    """Rank 1 is late in step 12, rank 0 in step 13."""
    assert not {"late start", "slow compute", "late gradient"} & set(_causes(make_recording()))


def test_bound_of_a_median():
    assert surely_above([3.0]) == 3.0
    assert surely_above([5.0, 3.0, 4.0]) == 3.0
    assert surely_above(list(range(12))) == 2  # P(at most 2 of 12 below the median) = 1.9 %
    assert surely_above(list(range(20))) == 5
    assert surely_above(list(range(20)), one_of=64) == 2  # P(at most 2 of 20 below) = 0.02 %


def test_clocks_that_are_not_known():
    recording = simulate([USUAL, replace(USUAL, begin=15)], MODEL, clock_error_ms=20)
    assert advise(recording) == [
        "The clock of rank 1 is known to 20.00 ms only. Waits for ranks that are not longer are "
        "not reported: record more machines with a quiet network."
    ]
    exact = replace(recording, clocks=dict.fromkeys(range(2), Clock(0.0, 0.0)))
    assert _causes(exact) == ["late start"]
