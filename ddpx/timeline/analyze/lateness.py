"""Ranks that others wait for: how late they are, and since when in the step."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ddpx.timeline.analyze.extent import rank_extent
from ddpx.timeline.analyze.figures import total_ns
from ddpx.timeline.model import Interval, RankStep, Step

# The stages of a step.
FORWARD, BETWEEN, BACKWARD = "forward", "the time between forwards and backwards", "backward"


@dataclass(frozen=True)
class Lateness:
    """One rank in one step, compared with the median of the other ranks.

    Times are in ns, and negative if the rank is earlier.

    Attributes:
        waited: The longest time from the end of backward on another rank until this rank has
            launched all buckets.
        start: How much later the rank begins its step.
        stages: How much longer the rank needs for forwards, between forwards and backwards, and for
            backwards, by name. Local micro-steps count.
        gradient: The parameter whose gradient takes the longest additional time, counted from the
            gradient before it. None if the ranks have no gradient in common.
        gradient_ns: That additional time.
    """

    waited: int
    start: float
    stages: dict[str, float]
    gradient: int | None
    gradient_ns: float

    @property
    def from_start(self) -> float:
        """The part of ``waited`` that a step would not have if the rank began with the others."""
        return min(max(self.start, 0.0), self.waited)

    @property
    def from_compute(self) -> float:
        """The other part of ``waited``."""
        return self.waited - self.from_start


def lateness(step: Step) -> dict[int, Lateness]:
    """Compares each rank with the others. Empty if only one rank recorded the step."""
    if len(step.ranks) < 2:
        return {}
    start = _above_others({rank: rank_extent(r).begin for rank, r in step.ranks.items()})
    stages = {rank: _stages(rank_step) for rank, rank_step in step.ranks.items()}
    names = next(iter(stages.values()))
    more = {name: _above_others({rank: t[name] for rank, t in stages.items()}) for name in names}
    gradients = _slowest_gradients(step)
    waits = _waits(step)
    return {
        rank: Lateness(
            waited=waits[rank],
            start=start[rank],
            stages={name: more[name][rank] for name in names},
            gradient=gradients[rank][1],
            gradient_ns=gradients[rank][0],
        )
        for rank in step.ranks
    }


def _waits(step: Step) -> dict[int, int]:
    ends = {rank: rank_step.backward.end for rank, rank_step in step.ranks.items()}
    in_order = sorted(ends, key=lambda rank: ends[rank])
    waits = {}
    for rank, rank_step in step.ranks.items():
        earliest = in_order[1] if rank == in_order[0] else in_order[0]
        pairs = zip(rank_step.buckets, step.ranks[earliest].buckets, strict=True)
        launches = [own.launched for own, other in pairs if own is not None and other is not None]
        waits[rank] = max(max(launches, default=0) - ends[earliest], 0)
    return waits


def _slowest_gradients(step: Step) -> dict[int, tuple[float, int | None]]:
    by_param: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, rank_step in step.ranks.items():
        for param, gap in _gaps(rank_step).items():
            by_param[param][rank] = gap
    slowest: dict[int, tuple[float, int | None]] = dict.fromkeys(step.ranks, (0.0, None))
    for param, gaps in by_param.items():
        for rank, more in _above_others(gaps).items():
            if slowest[rank][1] is None or more > slowest[rank][0]:
                slowest[rank] = (more, param)
    return slowest


def _gaps(rank_step: RankStep) -> dict[int, int]:
    """By parameter, the time from the gradient before it, or from the start of backward."""
    gaps, before = {}, rank_step.backward.begin
    for arrival in rank_step.arrivals:
        gaps[arrival.param] = arrival.at - before
        before = arrival.at
    return gaps


def _stages(rank_step: RankStep) -> dict[str, int]:
    """The times of the stages of a step, whose sum is the time until the end of backward."""
    backward = rank_step.backward
    forward_ns = total_ns(
        Interval(span.begin, max(min(span.end, backward.begin), span.begin))
        for span in rank_step.forwards
    )
    backward_ns = backward.ns + total_ns(rank_step.local_backwards)
    whole_ns = backward.end - rank_extent(rank_step).begin
    return {
        FORWARD: forward_ns,
        BETWEEN: whole_ns - forward_ns - backward_ns,
        BACKWARD: backward_ns,
    }


def _above_others(values: Mapping[int, int]) -> dict[int, float]:
    """For each rank, its value minus the median of the other ranks. Empty for one rank."""
    in_order = sorted(values.values())
    num_others = len(in_order) - 1
    if num_others < 1:
        return {}
    above = {}
    for rank, value in values.items():
        own = bisect_left(in_order, value)
        middle = [(num_others - 1) // 2, num_others // 2]  # among the others
        others = [in_order[index + (index >= own)] for index in middle]
        above[rank] = value - sum(others) / 2
    return above
