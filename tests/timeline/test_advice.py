"""When each advice is given: each simulated recording here has one cause of waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated import MODEL, USUAL, Rank, evenly, simulate
from synthetic import make_recording

from ddpx.timeline.analyze.diagnoses import advise, diagnose
from ddpx.timeline.analyze.noise import surely_above
from ddpx.timeline.model import Clock, Interval, RankStep, Recording


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


def test_zeros_have_the_size_that_is_sent():
    """Gradients of 2 MiB in bfloat16 are sent as float32. Bucket 0 is sent as it is."""
    unused = {param: gap for param, gap in evenly(9).items() if param not in (2, 3)}
    recording = simulate([Rank(unused)] * 2, MODEL)
    sent = [
        replace(bucket, num_bytes=bucket.num_bytes * (2 if index else 1))
        for index, bucket in enumerate(MODEL.layout)
    ]
    steps = [replace(step, layout=tuple(sent)) for step in recording.steps]
    (sentence,) = advise(replace(recording, steps=tuple(steps)))
    assert "8.0 MiB of zeros a step are sent for them, 28% of all bytes" in sentence


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
