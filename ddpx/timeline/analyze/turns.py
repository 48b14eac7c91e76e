"""Computes when the reductions of buckets begin on a device, where each one waits for its turn."""

from __future__ import annotations

from dataclasses import replace

from ddpx.timeline.analyze.figures import launched_buckets
from ddpx.timeline.model import RankStep, Recording, Step


def takes_turns(recording: Recording) -> bool:
    """Whether the backend runs reductions one after another, in the order of their launches.

    On a device, a process group such as NCCL runs them in one stream. gloo copies buckets to the
    host. On CPU it is unknown when a backend begins to move a bucket.
    """
    return recording.device != "cpu" and recording.backend != "gloo"


def in_turn(recording: Recording, step: Step) -> Step:
    """Returns the step with the start of its reduction as the launch of each bucket.

    A reduction begins when the device passes the launch, which is behind the gradients of the
    bucket, and the reduction before it has ended. For pictures: a bucket whose reduction waits for
    its turn is not in flight.
    """
    if not takes_turns(recording):
        return step
    return replace(step, ranks={rank: _in_turn(each) for rank, each in step.ranks.items()})


def _in_turn(rank_step: RankStep) -> RankStep:
    buckets = list(rank_step.buckets)
    sent = launched_buckets(rank_step)
    free = 0
    for index in sorted(sent, key=lambda each: (sent[each].launched, each)):
        bucket = sent[index]
        begin = min(max(bucket.launched, free), bucket.completed)
        buckets[index] = replace(bucket, launched=begin)
        free = max(free, bucket.completed)
    return replace(rank_step, buckets=tuple(buckets))
