"""The time that each bucket needs on the wire, without waits for ranks and for other buckets."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from ddpx.timeline.analyze.figures import all_launched, launched_buckets, total_ns
from ddpx.timeline.model import Interval, RankStep, Step

# The number of all-reduces that a backend moves at the same time. Others: 1.
_STREAMS = {"gloo": 2}


@dataclass(frozen=True)
class Transfers:
    """The transfers of one step.

    Attributes:
        begin: The time at which the last rank launched each communicated bucket.
        ns: The transfer time of each communicated bucket. Buckets that move at the same time share
            that time.
        gb_per_s: The 1e9 bytes per second of each bucket, together with the buckets that were in
            flight without a pause before, during and after it. Without buckets of unknown size.
    """

    begin: dict[int, int]
    ns: dict[int, float]
    gb_per_s: dict[int, float]

    @property
    def total_ns(self) -> float:
        return sum(self.ns.values())


def transfers(step: Step, backend: str) -> Transfers:
    """Returns the time that buckets of a step need, without waits for ranks or for other buckets.

    A bucket is in flight from the launch of the last rank to the end on the last rank. A backend
    serves the buckets in order, and only a few at a time. A bucket does not move while earlier
    buckets occupy the backend.
    """
    launched = {index: all_launched(step, index) for index in range(len(step.layout))}
    begin = {index: at for index, at in launched.items() if at is not None}
    events: list[tuple[int, bool, int]] = []
    for index, at in begin.items():
        ends = [b.completed for r in step.ranks.values() if (b := r.buckets[index]) is not None]
        events += [(at, False, index), (max(ends), True, index)]
    streams = _STREAMS.get(backend, 1)
    ns = dict.fromkeys(begin, 0.0)
    together: list[list[int]] = []  # buckets in flight without a pause
    flying: list[int] = []
    since = 0
    for at, is_end, index in sorted(events):
        for served in flying[:streams]:
            ns[served] += (at - since) / len(flying[:streams])
        since = at
        if is_end:
            flying.remove(index)
        else:
            if not flying:
                together.append([])
            insort(flying, index)
            together[-1].append(index)
    gb_per_s = {}
    for group in together:
        num_bytes = sum(step.layout[index].num_bytes for index in group)
        duration = sum(ns[index] for index in group)
        for index in group:
            if step.layout[index].num_bytes and duration > 0:
                gb_per_s[index] = num_bytes / duration
    return Transfers(begin, ns, gb_per_s)


def ns_per_byte(ns: Mapping[int, float], sizes: Mapping[int, int]) -> float | None:
    """The transfer time that a further byte adds in one step.

    The figure is the median slope over pairs of buckets (Theil's incomplete method: the n-th of the
    smaller half with the n-th of the larger half), so that a few delayed buckets do not change it.

    Args:
        ns: ``Transfers.ns`` of the step.
        sizes: The sizes of the buckets in bytes. 0 if unknown.

    Returns:
        The figure. None if no two buckets have different known sizes.
    """
    in_order = sorted((index for index in ns if sizes[index]), key=lambda index: sizes[index])
    pairs = zip(in_order, in_order[(len(in_order) + 1) // 2 :], strict=False)
    slopes = [
        (ns[large] - ns[small]) / (sizes[large] - sizes[small])
        for small, large in pairs
        if sizes[large] > sizes[small]
    ]
    return median(slopes) if slopes else None


def exposed_transfer_ns(rank_step: RankStep, begin: Mapping[int, int]) -> int:
    """The time in which the end of backward waits for buckets that all ranks have launched.

    Args:
        rank_step: The rank that waits.
        begin: ``Transfers.begin`` of the step.
    """
    waits = [
        Interval(max(bucket.wait.begin, begin[index]), bucket.wait.end)
        for index, bucket in launched_buckets(rank_step).items()
        if begin[index] < bucket.wait.end
    ]
    return total_ns(waits)


def hideable_ns(rank_step: RankStep) -> int:
    """The time that could hide communication: from the first gradient to the end of backward."""
    first = min((a.at for a in rank_step.arrivals), default=rank_step.backward.end)
    return max(rank_step.backward.end - first, 0)


def origin_of_wait(rank_step: RankStep, waited_ns: float) -> int | None:
    """The bucket whose launch makes the end of backward wait.

    The origin is the last bucket, unless the last bucket had to queue for more than half of the
    wait: behind the launch of an earlier bucket, or in the backend behind its transfer.

    Args:
        rank_step: The rank that waits.
        waited_ns: The time that it waits.

    Returns:
        The index. None if the rank communicated no bucket.
    """
    buckets = launched_buckets(rank_step)
    indices = list(buckets)
    while len(indices) > 1:
        bucket, before = buckets[indices[-1]], [buckets[index] for index in indices[:-1]]
        behind_launch = before[-1].launched - bucket.ready
        behind_transfer = max(b.completed for b in before) - bucket.launched
        if max(behind_launch, behind_transfer) <= waited_ns / 2:
            break
        indices.pop()
    return indices[-1] if indices else None


def write_back_ns(rank_step: RankStep) -> int:
    """The time of the copies of averaged gradients to ``param.grad``."""
    return sum(b.written_back - b.wait.end for b in launched_buckets(rank_step).values())
