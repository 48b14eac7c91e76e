"""Computes when the reductions of buckets begin on a device, where each one waits for its turn."""

from __future__ import annotations

from dataclasses import replace

from ddpx.timeline.analyze.figures import launched_buckets
from ddpx.timeline.model import Interval, RankStep, Recording, Step


def takes_turns(recording: Recording) -> bool:
    """Whether the backend runs reductions one after another, in the order of their launches.

    On a device, a process group such as NCCL runs them in one stream. gloo copies buckets to the
    host. On CPU it is unknown when a backend begins to move a bucket.
    """
    return recording.device != "cpu" and recording.backend != "gloo"


def reductions(recording: Recording, rank_step: RankStep) -> list[Interval | None]:
    """The time of each bucket's reduction, by bucket index. None for a bucket that is not sent.

    A reduction begins when the device passes the launch, which is behind the gradients of the
    bucket, and the reduction before it has ended. Where reductions do not take turns, the time
    begins at the launch.
    """
    found: list[Interval | None] = [None] * len(rank_step.buckets)
    free = 0
    sent = launched_buckets(rank_step).items()
    for index, bucket in sorted(sent, key=lambda each: (each[1].launched, each[0])):
        begin = max(bucket.launched, free) if takes_turns(recording) else bucket.launched
        found[index] = Interval(min(begin, bucket.completed), bucket.completed)
        free = max(free, bucket.completed)
    return found


def in_turn(recording: Recording, step: Step) -> Step:
    """Returns the step with the start of its reduction as the launch of each bucket.

    For pictures: a bucket whose reduction waits for its turn is not in flight.
    """
    if not takes_turns(recording):
        return step
    ranks = {}
    for rank, rank_step in step.ranks.items():
        pairs = zip(rank_step.buckets, reductions(recording, rank_step), strict=True)
        buckets = (
            None if bucket is None or span is None else replace(bucket, launched=span.begin)
            for bucket, span in pairs
        )
        ranks[rank] = replace(rank_step, buckets=tuple(buckets))
    return replace(step, ranks=ranks)
