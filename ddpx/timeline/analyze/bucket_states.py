"""The states of buckets in a step, as intervals."""

from __future__ import annotations

from collections.abc import Iterable

from ddpx.timeline.analyze.extent import all_launched
from ddpx.timeline.analyze.figures import common, union
from ddpx.timeline.model import BucketTimes, Interval, Step

FILLING = "filling"
QUEUED = "queued"
HELD_UP = "held up"
MOVING = "moving"
AVERAGED = "averaged"
WRITTEN = "written"
# The parts of HELD_UP and MOVING in which the end of backward only waits.
EXPOSED_HELD_UP = "exposed, held up"
EXPOSED_MOVING = "exposed, moving"

STATES = (
    *(FILLING, QUEUED, AVERAGED, HELD_UP, MOVING, WRITTEN),
    *(EXPOSED_HELD_UP, EXPOSED_MOVING),
)


def bucket_states(step: Step, rank: int, indices: Iterable[int]) -> dict[str, list[Interval]]:
    """Returns when some buckets were in which state on a rank.

    Returns:
        For each of ``STATES``, the intervals in which at least one of the buckets was in it. They
        are disjoint and in order, and none is empty.
    """
    found: dict[str, list[Interval]] = {state: [] for state in STATES}
    for index in indices:
        bucket = step.ranks[rank].buckets[index]
        if bucket is None:
            continue
        moves = moves_since(step, index, bucket)
        held_up, moving = Interval(bucket.launched, moves), Interval(moves, bucket.completed)
        found[FILLING].append(_filling(step, rank, index, bucket))
        found[QUEUED].append(Interval(bucket.ready, bucket.launched))
        found[HELD_UP].append(held_up)
        found[MOVING].append(moving)
        found[AVERAGED].append(Interval(bucket.completed, bucket.wait.end))
        found[WRITTEN].append(Interval(bucket.wait.end, bucket.written_back))
        found[EXPOSED_HELD_UP] += common([held_up], [bucket.wait])
        found[EXPOSED_MOVING] += common([moving], [bucket.wait])
    return {state: union(span for span in spans if span.ns > 0) for state, spans in found.items()}


def moves_since(step: Step, bucket_index: int, bucket: BucketTimes) -> int:
    """The time from which a bucket was in flight on all ranks.

    Not after its completion: because of clock errors, the last launch may appear to be later.
    """
    launched = all_launched(step, bucket_index)
    return bucket.completed if launched is None else min(launched, bucket.completed)


def _filling(step: Step, rank: int, bucket_index: int, bucket: BucketTimes) -> Interval:
    """The time from the first gradient of a bucket until the bucket was ready."""
    members = set(step.layout[bucket_index].params)
    arrivals = step.ranks[rank].arrivals
    first = min((a.at for a in arrivals if a.param in members), default=bucket.ready)
    return Interval(min(first, bucket.ready), bucket.ready)
