"""When each advice is given: each recording here has one problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from synthetic import rank_step, recording

from ddpx.timeline.analyze.advice import advise
from ddpx.timeline.model import BucketLayout, Clock, RankStep, Step

MIB = 1 << 20
PARAMS_EACH = 8  # per bucket


def _rank_step(
    buckets: Sequence[tuple[float, float, float]], compute: float = 100.0, copy: float = 0.0
) -> RankStep:
    """A forward of a third of ``compute`` ms, a backward of the rest, and these buckets.

    Args:
        buckets: Ready, flight and wait in ms, per bucket. A bucket is launched when it is ready.
            The wait for it begins at the end of backward.
    """
    times = []
    for ready, flight, wait in buckets:
        begin = max(compute, ready + flight - wait)
        times.append((ready, ready, ready + flight, begin, begin + wait, begin + wait + copy))
    return rank_step(
        0,
        forward=(0, compute / 3),
        backward=(compute / 3, compute),
        end=max([compute, *(bucket[-1] for bucket in times)]),
        arrivals={i: bucket[0] for i, bucket in enumerate(times)},
        buckets=times,
    )


def _advice(
    ranks: list[RankStep], mib: list[float], error_us: float = 0.0, **others: Any
) -> list[str]:
    """Advice for buckets of eight params. The last to arrive are w0, w1, …"""
    num_buckets = len(mib)
    layout = []
    for i, size in enumerate(mib):
        first = num_buckets + (PARAMS_EACH - 1) * i
        layout.append(BucketLayout((*range(first, first + PARAMS_EACH - 1), i), round(size * MIB)))
    param_bytes = [0] * (num_buckets * PARAMS_EACH)
    for bucket in layout:
        for param in bucket.params:
            param_bytes[param] = bucket.num_bytes // PARAMS_EACH
    defaults = {
        "clocks": {rank: Clock(0.0, 1e3 * error_us * rank) for rank in range(len(ranks))},
        "hosts": dict.fromkeys(range(len(ranks)), "here"),
    }
    return advise(
        recording(
            (Step(5, tuple(layout), dict(enumerate(ranks))),),
            [f"w{i}" for i in range(len(param_bytes))],
            param_bytes,
            len(ranks),
            **{**defaults, **others},
        )
    )


GOOD = [(50.0, 10.0, 0.0), (80.0, 10.0, 0.0)]


def test_nothing_to_say():
    assert _advice([_rank_step(GOOD), _rank_step(GOOD)], [10, 10]) == []


def test_one_rank_computes_longer():
    sentences = _advice([_rank_step(GOOD), _rank_step(GOOD, compute=150)], [10, 10])
    assert sentences == [
        "Rank 1 (host here) computes 150.0 ms a step, the others 100.0 ms: everyone waits for it. "
        "Look at what its inputs and its machine have that the others have not."
    ]


def test_a_late_gradient():
    late = _rank_step([(50, 10, 0), (94, 2, 0)])
    sentences = _advice([_rank_step(GOOD), late], [10, 10])
    assert sentences == [
        "Bucket 1 waits 14.0 ms for rank 1's w1: that much earlier another rank has it ready."
    ]


def test_the_last_bucket_is_exposed():
    exposed = [(50, 10, 0), (100, 20, 20)]
    sentences = _advice([_rank_step(exposed), _rank_step(exposed)], [10.39, 24])
    assert sentences == [
        "The last bucket of 24 MiB is fully exposed: try bucket_cap_mb_list=[10.3, 6]."
    ]
    partly = [(50, 10, 0), (95, 20, 15)]
    sentences = _advice([_rank_step(partly), _rank_step(partly)], [10, 0.5])
    assert sentences == [
        "The last bucket of 0.5 MiB is exposed for 15.0 ms of a step of 115.0 ms. "
        "It is small already."
    ]


def _kinds(*of_buckets: str) -> dict[str, Any]:
    others = [kind for kind in of_buckets for _ in range(PARAMS_EACH - 1)]
    return {"param_kinds": (*of_buckets, *others)}


@pytest.mark.parametrize(
    ("mib", "kinds", "advised"),
    [
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
    early = [(40.0 + i, 2.0, 0.0) for i in range(len(mib) - 1)]
    exposed = _rank_step([*early, (100, 20, 20)])
    sentences = _advice([exposed, exposed], mib, **_kinds(*kinds))
    if advised is None:
        expected = "The last bucket of 24 MiB is fully exposed for 20.0 ms of a step of 120.0 ms."
    else:
        expected = f"The last bucket of 24 MiB is fully exposed: try bucket_cap_mb_list={advised}."
    assert sentences == [expected]


def test_more_communication_than_computation():
    slow = [(50, 10, 0), (80, 120, 100)]
    text = _advice([_rank_step(slow), _rank_step(slow)], [10, 10])[0]
    assert "Communication takes 130.0 ms a step, computation 100.0 ms" in text
    assert text.endswith('or through shared memory: init_process_group("shm").')
    for other in ({"backend": "shm"}, {"hosts": {0: "here", 1: "there"}}):
        text = _advice([_rank_step(slow), _rank_step(slow)], [10, 10], **other)[0]
        assert "shared memory" not in text and "bf16_compress_hook" in text


def test_waiting_for_a_rank_is_not_communication():
    """Rank 0 launches early and waits long.

    On both ranks together, buckets are in flight only briefly.
    """
    early = _rank_step([(10, 149, 140)], compute=20)
    late = _rank_step([(149, 10, 9)], compute=150)
    sentences = _advice([early, late], [10])
    assert not any("Communication takes" in sentence for sentence in sentences)
    assert any("everyone waits for it" in sentence for sentence in sentences)


def test_many_small_buckets():
    small = [(50.0 + i, 60.0, 4.0) for i in range(6)]
    text = " ".join(_advice([_rank_step(small), _rank_step(small)], [0.2] * 6))
    assert "6 of 6 buckets are smaller than 1 MiB" in text


def test_copies_back():
    copied = _rank_step(GOOD, copy=3)
    assert _advice([copied, copied], [10, 10]) == [
        "Copying averaged gradients back takes 6.0 ms a step: with gradient_as_bucket_view=True "
        "there is nothing to copy."
    ]


def test_clocks_that_are_not_known():
    sentences = _advice([_rank_step(GOOD), _rank_step(GOOD)], [10, 10], error_us=20_000)
    assert sentences == [
        "The clock of rank 1 is known to 20000 µs only: who waits for whom is uncertain by as much."
    ]
