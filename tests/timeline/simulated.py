"""Recordings that a simulation computes, with exact times and one cause of waiting each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from synthetic import Bucket, rank_step, recording

from ddpx.timeline.model import BucketLayout, Clock, Recording, Step

MIB = 1 << 20


@dataclass(frozen=True)
class Rank:
    """What one rank does in each step. Times are in ms.

    Attributes:
        begin: The start of forward.
        forward: The time of forward.
        between: The time from forward to backward.
        gaps: For each parameter in order of arrival, the time from the gradient before it. Without
            the parameters that the rank does not use.
        copy: The time to copy a bucket back.
    """

    gaps: dict[int, float]
    begin: float = 0.0
    forward: float = 30.0
    between: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True)
class Wire:
    """Moves one bucket at a time: ``overhead_ms`` for each, and ``ms_per_mib``.

    ``delays_ms`` delay the buckets with these indices.
    """

    ms_per_mib: float = 1.0
    overhead_ms: float = 0.1
    delays_ms: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """Sizes of parameters in MiB, and the parameters of each bucket."""

    mib: list[float]
    buckets: list[list[int]]
    names: list[str] = field(default_factory=list)

    @property
    def layout(self) -> tuple[BucketLayout, ...]:
        return tuple(
            BucketLayout(tuple(params), sum(round(self.mib[p] * MIB) for p in params))
            for params in self.buckets
        )


def evenly(num_params: int, backward: float = 60.0) -> dict[int, float]:
    """Gaps of parameters that arrive evenly in a backward."""
    return dict.fromkeys(range(num_params), backward / num_params)


# Eight parameters of 2 MiB in four buckets, and then a small one. Backward takes 60 ms.
MODEL = Model([*[2.0] * 8, 0.1], [[0, 1], [2, 3], [4, 5], [6, 7], [8]])
USUAL = Rank(evenly(9))


def simulate(
    ranks: Sequence[Rank],
    model: Model,
    wire: Wire | None = None,
    num_steps: int = 5,
    clock_error_ms: float = 0.0,
    **others: Any,
) -> Recording:
    """The recording of steps that are all alike, over shm. ``others`` overrides fields."""
    ranks_steps = _rank_steps(ranks, model, wire or Wire())
    fields: dict[str, Any] = {
        "backend": "shm",
        "clocks": {r: Clock(0.0, 1e6 * clock_error_ms * (r > 0)) for r in range(len(ranks))},
        "hosts": dict.fromkeys(range(len(ranks)), "here"),
    }
    return recording(
        [Step(5 + number, model.layout, ranks_steps) for number in range(num_steps)],
        model.names or [f"w{param}" for param in range(len(model.mib))],
        [round(mib * MIB) for mib in model.mib],
        len(ranks),
        **{**fields, **others},
    )


def _rank_steps(ranks: Sequence[Rank], model: Model, wire: Wire) -> dict[int, Any]:
    arrivals = [_arrivals(rank) for rank in ranks]
    ready = [
        [
            max((at[p] for p in params if p in at), default=_backward(rank))
            for params in model.buckets
        ]
        for rank, at in zip(ranks, arrivals, strict=True)
    ]
    launched = [[max(times[: i + 1]) for i in range(len(times))] for times in ready]
    ends: list[float] = []
    for index, params in enumerate(model.buckets):
        begin = max(ends[-1:] + [times[index] for times in launched])
        size = sum(model.mib[param] for param in params)
        delay = wire.delays_ms.get(index, 0.0)
        ends.append(begin + wire.overhead_ms + delay + size * wire.ms_per_mib)
    steps = {}
    for number, rank in enumerate(ranks):
        backward_end = now = max(arrivals[number].values())
        buckets: list[Bucket] = []
        for times in zip(ready[number], launched[number], ends, strict=True):
            wait_end = max(now, times[2])
            buckets.append((*times, now, wait_end, wait_end + rank.copy))
            now = wait_end + rank.copy
        steps[number] = rank_step(
            0.0,
            forward=(rank.begin, rank.begin + rank.forward),
            backward=(_backward(rank), backward_end),
            end=now,
            arrivals=arrivals[number],
            buckets=buckets,
        )
    return steps


def _backward(rank: Rank) -> float:
    return rank.begin + rank.forward + rank.between


def _arrivals(rank: Rank) -> dict[int, float]:
    now, found = _backward(rank), {}
    for param, gap in rank.gaps.items():
        now += gap
        found[param] = now
    return found
