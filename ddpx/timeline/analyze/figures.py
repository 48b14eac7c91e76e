"""What follows from the times of a step: how much overlapped, who was waited for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpx.timeline.model import BucketTimes, Interval, RankStep, Step


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, as intervals that do not touch, in order."""
    joined: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (i.begin, i.end)):
        if joined and interval.begin <= joined[-1].end:
            joined[-1] = Interval(joined[-1].begin, max(joined[-1].end, interval.end))
        else:
            joined.append(interval)
    return joined


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points in time that are in both."""
    found = []
    second = union(b)
    for x in union(a):
        for y in second:
            begin, end = max(x.begin, y.begin), min(x.end, y.end)
            if begin < end:
                found.append(Interval(begin, end))
    return found


def total_ns(intervals: Iterable[Interval]) -> int:
    """How long they last together, each point in time counted once."""
    return sum(interval.ns for interval in union(intervals))


def launched_buckets(rank_step: RankStep) -> list[BucketTimes]:
    return [bucket for bucket in rank_step.buckets if bucket is not None]


def in_flight(rank_step: RankStep) -> list[Interval]:
    """Of each bucket, from its launch to its end."""
    return [Interval(b.launched, b.completed) for b in launched_buckets(rank_step)]


@dataclass(frozen=True)
class StepFigures:
    """A step of one rank, in ns.

    Attributes:
        whole: from the start of its first forward (or of backward, if there was none through the
            wrapper) to its end.
        compute: its forwards and its backwards, also those within ``no_sync()`` before it.
        communication: while any bucket was in flight, or ranks agreed; ``overlapped + exposed``.
        exposed: of it, while the end of backward did nothing but wait.
        overlapped: of it, all else: hidden behind work of this rank.
    """

    whole: int
    compute: int
    communication: int
    overlapped: int
    exposed: int


def computing(rank_step: RankStep) -> list[Interval]:
    """Its forwards and backwards; never empty."""
    return [*rank_step.forwards, *rank_step.local_backwards, rank_step.backward]


def step_figures(rank_step: RankStep) -> StepFigures:
    begin = min(span.begin for span in computing(rank_step))
    flying = [*in_flight(rank_step), rank_step.agreement]
    waits = [*(bucket.wait for bucket in launched_buckets(rank_step)), rank_step.agreement]
    communication = total_ns(flying)
    exposed = total_ns(common(flying, waits))
    return StepFigures(
        whole=rank_step.end - begin,
        compute=total_ns(computing(rank_step)),
        communication=communication,
        overlapped=communication - exposed,
        exposed=exposed,
    )


def transfer_ns(step: Step, rank: int) -> int:
    """How long buckets were in flight on all ranks, as this one saw it: its communication without
    its waits for others to launch.
    """
    spans = []
    for index, bucket in enumerate(step.ranks[rank].buckets):
        if bucket is not None:
            launches = [b.launched for r in step.ranks.values() if (b := r.buckets[index])]
            begin = min(max(launches), bucket.completed)
            spans.append(Interval(begin, bucket.completed))
    return total_ns(spans)


@dataclass(frozen=True)
class Holdup:
    """A bucket whose all-reduce could not begin before one rank had launched it.

    Attributes:
        rank: the last to launch it.
        param: whose gradient it launched on: the last to arrive of the bucket, or of an earlier
            one, since buckets leave in order. None if no gradient arrived: the bucket's params
            were unused, or backward ended.
        waited_ns: from the first rank's launch to the last's.
    """

    rank: int
    param: int | None
    waited_ns: int


def holdup(step: Step, bucket_index: int) -> Holdup | None:
    """None if fewer than two ranks recorded it."""
    launches = {
        rank: bucket.launched
        for rank, rank_step in step.ranks.items()
        if (bucket := rank_step.buckets[bucket_index]) is not None
    }
    if len(launches) < 2:
        return None
    last = max(launches, key=lambda rank: launches[rank])
    return Holdup(
        rank=last,
        param=_launched_on(step, last, bucket_index),
        waited_ns=launches[last] - min(launches.values()),
    )


def _launched_on(step: Step, rank: int, bucket_index: int) -> int | None:
    rank_step = step.ranks[rank]
    ready = {
        index: bucket.ready
        for index, bucket in enumerate(rank_step.buckets[: bucket_index + 1])
        if bucket is not None
    }
    latest = max(ready, key=lambda index: ready[index])
    members = set(step.layout[latest].params)
    arrived = [arrival.param for arrival in rank_step.arrivals if arrival.param in members]
    return arrived[-1] if arrived else None


def bandwidth(step: Step, bucket_index: int) -> float | None:
    """Bytes a second of the bucket's all-reduce, from when the last rank launched it to when the
    last rank had it back. None if nobody launched it, or its size is not known.
    """
    times = [b for r in step.ranks.values() if (b := r.buckets[bucket_index]) is not None]
    num_bytes = step.layout[bucket_index].num_bytes
    if not times or not num_bytes:
        return None
    ns = max(b.completed for b in times) - max(b.launched for b in times)
    return num_bytes / ns * 1e9 if ns > 0 else None
