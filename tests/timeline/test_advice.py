"""Which sentence comes when: recordings made up so that one thing is wrong with each."""

from __future__ import annotations

from ddpx.timeline.advice import advise
from ddpx.timeline.model import (
    Arrival,
    BucketLayout,
    BucketTimes,
    Clock,
    Interval,
    PhaseSpan,
    RankStep,
    Recording,
    Step,
)

MS = 1_000_000
MIB = 1 << 20


def _bucket(ready: float, flight: float, wait: float, backward_end: float, copy: float = 0.0):
    """In ms; launched when it is ready, and waited for from the end of backward on."""
    begin = round(max(backward_end, ready + flight - wait) * MS)
    end = begin + round(wait * MS)
    return BucketTimes(
        ready=round(ready * MS),
        launched=round(ready * MS),
        completed=round((ready + flight) * MS),
        wait=Interval(begin, end),
        written_back=end + round(copy * MS),
    )


def _rank_step(buckets, compute: float = 100.0, copy: float = 0.0) -> RankStep:
    """A forward of a third of ``compute`` ms, a backward of the rest, and these buckets.

    Args:
        buckets: of each, ready, flight and wait in ms.
    """
    forward = round(compute / 3 * MS)
    times = [_bucket(ready, flight, wait, compute, copy) for ready, flight, wait in buckets]
    end = max([round(compute * MS), *(bucket.written_back for bucket in times)])
    return RankStep(
        forwards=(Interval(0, forward),),
        backward=Interval(forward, round(compute * MS)),
        end=end,
        arrivals=tuple(Arrival(i, bucket.ready) for i, bucket in enumerate(times)),
        buckets=tuple(times),
        phases=(PhaseSpan("collecting", Interval(forward, end)),),
    )


def _advice(
    ranks: list[RankStep],
    mib: list[float],
    backend: str = "gloo",
    error_us: float = 0.0,
    hosts: tuple[str, ...] = ("here", "here"),
) -> list[str]:
    """Of one param a bucket, named w0, w1, …"""
    layout = tuple(BucketLayout((i,), round(size * MIB)) for i, size in enumerate(mib))
    return advise(
        Recording(
            param_names=tuple(f"w{i}" for i in range(len(mib))),
            steps=(Step(5, layout, dict(enumerate(ranks))),),
            clocks={rank: Clock(0.0, 1e3 * error_us * rank) for rank in range(len(ranks))},
            hosts=dict(enumerate(hosts)),
            backend=backend,
            device="cpu",
            world_size=len(ranks),
            lost_events={},
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


def test_more_communication_than_computation():
    slow = [(50, 10, 0), (80, 120, 100)]
    text = _advice([_rank_step(slow), _rank_step(slow)], [10, 10])[0]
    assert "Communication takes 130.0 ms a step, computation 100.0 ms" in text
    assert text.endswith('or through shared memory: init_process_group("shm").')
    for other in ({"backend": "shm"}, {"hosts": ("here", "there")}):
        text = _advice([_rank_step(slow), _rank_step(slow)], [10, 10], **other)[0]
        assert "shared memory" not in text and "bf16_compress_hook" in text


def test_waiting_for_a_rank_is_not_communication():
    """Rank 0 launches early and waits long; on both ranks together buckets fly for a moment."""
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
