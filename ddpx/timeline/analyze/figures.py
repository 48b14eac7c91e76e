"""Figures of a step: overlap, exposed communication, and ranks that others wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpx.timeline.analyze.extent import computing, rank_extent
from ddpx.timeline.model import BucketTimes, Interval, RankStep, Step


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, as disjoint intervals in order."""
    joined: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (i.begin, i.end)):
        if joined and interval.begin <= joined[-1].end:
            joined[-1] = Interval(joined[-1].begin, max(joined[-1].end, interval.end))
        else:
            joined.append(interval)
    return joined


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the intersection of two unions of intervals."""
    found = []
    second = union(b)
    for x in union(a):
        for y in second:
            begin, end = max(x.begin, y.begin), min(x.end, y.end)
            if begin < end:
                found.append(Interval(begin, end))
    return found


def total_ns(intervals: Iterable[Interval]) -> int:
    """The length of the union of intervals, in ns."""
    return sum(interval.ns for interval in union(intervals))


def launched_buckets(rank_step: RankStep) -> dict[int, BucketTimes]:
    """The buckets that the rank communicated, by index."""
    return {index: b for index, b in enumerate(rank_step.buckets) if b is not None}


@dataclass(frozen=True)
class StepFigures:
    """A step of one rank, in ns.

    Attributes:
        whole: The time from the first forward through the wrapper to the end of the step. Without
            such a forward, the time from the start of backward.
        compute: The time of forwards and backwards, including earlier ones in ``no_sync()``.
        communication: The time in which a bucket was in flight, or ranks agreed on something.
        exposed: The part of ``communication`` in which the end of backward only waited.
        overlapped: The part of ``communication`` that was hidden behind other work.
    """

    whole: int
    compute: int
    communication: int
    overlapped: int
    exposed: int


def step_figures(rank_step: RankStep) -> StepFigures:
    launched = launched_buckets(rank_step).values()
    flying = [*(Interval(b.launched, b.completed) for b in launched), rank_step.agreement]
    waits = [*(bucket.wait for bucket in launched), rank_step.agreement]
    communication = total_ns(flying)
    exposed = total_ns(common(flying, waits))
    return StepFigures(
        whole=rank_extent(rank_step).ns,
        compute=total_ns(computing(rank_step)),
        communication=communication,
        overlapped=communication - exposed,
        exposed=exposed,
    )


def all_launched(step: Step, bucket_index: int) -> int | None:
    """The time at which the last rank launched a bucket. None if no rank launched the bucket."""
    buckets = [rank_step.buckets[bucket_index] for rank_step in step.ranks.values()]
    return max((bucket.launched for bucket in buckets if bucket is not None), default=None)


def moves_since(step: Step, bucket_index: int, bucket: BucketTimes) -> int:
    """The time from which a bucket was in flight on all ranks.

    Not after its completion: because of clock errors, the last launch may appear to be later.
    """
    launched = all_launched(step, bucket_index)
    return bucket.completed if launched is None else min(launched, bucket.completed)


def transfer_ns(step: Step, rank: int) -> int:
    """The time in which buckets were in flight on all ranks, as seen by this rank.

    The time does not contain waits for other ranks to launch a bucket.
    """
    return total_ns(
        Interval(moves_since(step, index, bucket), bucket.completed)
        for index, bucket in launched_buckets(step.ranks[rank]).items()
    )


@dataclass(frozen=True)
class Holdup:
    """A bucket whose all-reduce waited for one rank.

    Attributes:
        rank: The last rank to launch the bucket.
        param: The parameter whose gradient made the rank launch the bucket. The parameter is in
            this bucket or in an earlier bucket, because buckets are launched in order. None if no
            gradient did: the rank began its backward late, parameters were unused, or backward
            ended.
        waited_ns: The time from the first rank's launch to the last rank's launch.
    """

    rank: int
    param: int | None
    waited_ns: int


Holdups = dict[tuple[int, int], Holdup]  # by step and bucket


def holdup(step: Step, bucket_index: int) -> Holdup | None:
    """Returns the rank that a bucket waited for. None if fewer than two ranks recorded it."""
    launches = {
        rank: bucket.launched
        for rank, rank_step in step.ranks.items()
        if (bucket := rank_step.buckets[bucket_index]) is not None
    }
    if len(launches) < 2:
        return None
    last = max(launches, key=lambda rank: launches[rank])
    first = min(launches, key=lambda rank: launches[rank])
    waited_ns = launches[last] - launches[first]
    late_ns = step.ranks[last].backward.begin - step.ranks[first].backward.begin
    return Holdup(
        rank=last,
        param=None if late_ns > waited_ns / 2 else _launched_on(step, last, bucket_index),
        waited_ns=waited_ns,
    )


def holdups(steps: Iterable[Step]) -> Holdups:
    """The holdups of all buckets that at least two ranks recorded."""
    return {
        (step.number, index): found
        for step in steps
        for index in range(len(step.layout))
        if (found := holdup(step, index)) is not None
    }


def _launched_on(step: Step, rank: int, bucket_index: int) -> int | None:
    rank_step = step.ranks[rank]
    buckets = launched_buckets(rank_step)
    up_to_it = [index for index in buckets if index <= bucket_index]
    latest = max(up_to_it, key=lambda index: buckets[index].ready)
    members = set(step.layout[latest].params)
    arrived = [arrival.param for arrival in rank_step.arrivals if arrival.param in members]
    return arrived[-1] if arrived else None
