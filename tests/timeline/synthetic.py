"""Recordings made by hand with round times, for tests of their analysis.

The recording of most tests has steps 12 and 13 of two ranks, with three buckets each. Rank 1 is
late in step 12. Rank 0 is late in step 13, in which bucket 1 is ready before bucket 0 and has to
wait for its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
PARAM_NAMES = ("0.weight", "0.bias", "1.weight", "2.weight", "2.bias")
PARAM_BYTES = (512 << 10, 512 << 10, 2 << 20, 2 << 20, 1 << 20)
LAYOUT = (
    BucketLayout(params=(4, 3), num_bytes=3 << 20),
    BucketLayout(params=(2,), num_bytes=2 << 20),
    BucketLayout(params=(1, 0), num_bytes=1 << 20),
)
BEGIN_MS = {12: 100, 13: 150}
LENGTH_MS = {12: 43, 13: 40}
_LOCAL_MS = ((30, 20), (19, 4))  # before step 12: a local forward with its backward

# Per bucket: ready, launched, completed, begin of wait, end of wait, written back.
Bucket = tuple[float, float, float, float, float, float]


def rank_step(
    begin_ms: float,
    forward: tuple[float, float],
    backward: tuple[float, float],
    end: float,
    arrivals: Mapping[int, float],
    buckets: Sequence[Bucket],
    rebuilding: tuple[float, float] | None = None,
) -> RankStep:
    """One step of one rank.

    All times are in ms after ``begin_ms``. ``arrivals`` are by param, in order.
    """

    def at(ms: float) -> int:
        return round((begin_ms + ms) * MS)

    def between(begin: float, end: float) -> Interval:
        return Interval(at(begin), at(end))

    phases = [PhaseSpan("rebuilding", between(*rebuilding))] if rebuilding else []
    phases.append(PhaseSpan("collecting", between(min(arrivals.values()), backward[1])))
    phases.append(PhaseSpan("finalizing", between(backward[1], end)))
    return RankStep(
        forwards=(between(*forward),),
        backward=between(*backward),
        end=at(end),
        arrivals=tuple(Arrival(param, at(ms)) for param, ms in arrivals.items()),
        buckets=tuple(
            BucketTimes(at(ready), at(launched), at(completed), between(*wait), at(written_back))
            for ready, launched, completed, *wait, written_back in buckets
        ),
        phases=tuple(phases),
    )


def _step_12() -> Step:
    rank_0 = rank_step(
        BEGIN_MS[12],
        forward=(0, 10),
        backward=(12, 32),
        end=43,
        arrivals={4: 16, 3: 18, 2: 24, 1: 28, 0: 30},
        buckets=(
            (18, 18, 26, 32, 32, 33),
            (24, 24, 36, 33, 36, 37),
            (30, 30, 40, 37, 41, 42),
        ),
    )
    rank_1 = rank_step(
        BEGIN_MS[12],
        forward=(2, 14),
        backward=(15, 38),
        end=42,
        arrivals={4: 20, 3: 22, 2: 29, 1: 34, 0: 36},
        buckets=(
            (22, 22, 26, 38, 38, 39),
            (29, 29, 36, 39, 39, 40),
            (36, 36, 41, 40, 41, 42),
        ),
    )
    return Step(12, LAYOUT, {0: rank_0, 1: rank_1})


def _step_13() -> Step:
    rank_0 = rank_step(
        BEGIN_MS[13],
        forward=(0, 12),
        backward=(14, 34),
        end=40,
        arrivals={2: 18, 4: 20, 3: 22, 1: 30, 0: 32},
        buckets=(
            (22, 22, 28, 34, 34, 35),
            (18, 23, 30, 35, 35, 36),
            (32, 32, 38, 36, 38, 39),
        ),
        rebuilding=(1, 4),
    )
    rank_1 = rank_step(
        BEGIN_MS[13],
        forward=(0, 10),
        backward=(11, 29),
        end=39,
        arrivals={2: 14, 4: 15, 3: 17, 1: 26, 0: 27},
        buckets=(
            (17, 17, 28, 29, 29, 30),
            (14, 18, 30, 30, 30, 31),
            (27, 27, 38, 31, 38, 39),
        ),
        rebuilding=(1, 3),
    )
    return Step(13, LAYOUT, {0: rank_0, 1: rank_1})


def make_recording(param_names: tuple[str, ...] = PARAM_NAMES) -> Recording:
    return recording((_step_12(), _step_13()), param_names, PARAM_BYTES)


def accumulated() -> Recording:
    """Step 12, with a forward and a backward in ``no_sync()`` before it on rank 0."""
    step = _step_12()
    rank_0 = step.ranks[0]
    before = [Interval((BEGIN_MS[12] - a) * MS, (BEGIN_MS[12] - b) * MS) for a, b in _LOCAL_MS]
    rank_0 = replace(rank_0, forwards=(before[0], *rank_0.forwards), local_backwards=(before[1],))
    return recording((Step(12, LAYOUT, {**step.ranks, 0: rank_0}),), PARAM_NAMES, PARAM_BYTES)


def with_write_back(ms: float) -> Recording:
    """Step 12, in which the gradients of each bucket are written back in this time."""
    step = _step_12()
    ranks = {
        rank: replace(
            rank_step,
            buckets=tuple(
                bucket and replace(bucket, written_back=bucket.wait.end + round(ms * MS))
                for bucket in rank_step.buckets
            ),
            end=rank_step.end if rank else (BEGIN_MS[12] + 41) * MS + round(ms * MS),
        )
        for rank, rank_step in step.ranks.items()
    }
    return recording((Step(12, LAYOUT, ranks),), PARAM_NAMES, PARAM_BYTES)


def one_rank_alone() -> Recording:
    """Step 12 of rank 0 without other ranks."""
    rank_0 = _step_12().ranks[0]
    alone = RankStep(
        forwards=rank_0.forwards,
        backward=rank_0.backward,
        end=rank_0.backward.end,
        arrivals=rank_0.arrivals,
        buckets=(None, None, None),
        phases=(PhaseSpan("collecting", rank_0.backward),),
    )
    return recording((Step(12, LAYOUT, {0: alone}),), PARAM_NAMES, PARAM_BYTES, world_size=1)


def many_ranks(world_size: int) -> Recording:
    """Step 12 on many ranks.

    The fifth rank from the end is as late as rank 1, the others like rank 0.
    """
    ranks = _step_12().ranks
    steps = {rank: ranks[int(rank == world_size - 5)] for rank in range(world_size)}
    return recording((Step(12, LAYOUT, steps),), PARAM_NAMES, PARAM_BYTES, world_size)


def recording(
    steps: Sequence[Step],
    param_names: Sequence[str],
    param_bytes: Sequence[int],
    world_size: int = 2,
    **others: Any,
) -> Recording:
    """A recording of ranks on one host over gloo, with one clock. ``others`` overrides fields."""
    fields: dict[str, Any] = {
        "clocks": {rank: Clock(0.0, 0.0) for rank in range(world_size)},
        "hosts": {rank: "host" for rank in range(world_size)},
        "backend": "gloo",
        "device": "cpu",
        "lost_events": {rank: 0 for rank in range(world_size)},
        "param_kinds": ("float32 on cpu",) * len(param_names),
        **others,
    }
    return Recording(
        param_names=tuple(param_names),
        param_bytes=tuple(param_bytes),
        steps=tuple(steps),
        world_size=world_size,
        **fields,
    )


def many_buckets(
    num_buckets: int, world_size: int, params_each: int = 1, num_steps: int = 1
) -> Recording:
    """Steps from 12 on, all alike, with buckets that follow each other every ms."""
    num_params = num_buckets * params_each
    names = tuple(f"layers.{index}.weight" for index in range(num_params))
    backward = (12, 14 + num_buckets)
    like_all = rank_step(
        BEGIN_MS[12],
        forward=(0, 10),
        backward=backward,
        end=16 + num_buckets,
        arrivals={param: 13 + param // params_each for param in range(num_params)},
        buckets=tuple(
            (13 + index, 13 + index, 15 + index, backward[1], backward[1] + 1, backward[1] + 1)
            for index in range(num_buckets)
        ),
    )
    layout = tuple(
        BucketLayout(tuple(range(first, first + params_each)), 1 << 20)
        for first in range(0, num_params, params_each)
    )
    ranks = dict.fromkeys(range(world_size), like_all)
    steps = tuple(Step(number, layout, ranks) for number in range(12, 12 + num_steps))
    size = (1 << 20) // params_each
    return recording(steps, names, [size] * num_params, world_size)


def late_rank(num_buckets: int, world_size: int, late: int = 5, late_ms: int = 8) -> Recording:
    """Step 12 with buckets every ms. From the middle bucket on, one rank is late."""
    base = many_buckets(num_buckets, world_size)
    middle = num_buckets // 2

    def make(rank: int) -> RankStep:
        delay = [late_ms if rank == late and index >= middle else 0 for index in range(num_buckets)]
        ready = [13 + index + delay[index] for index in range(num_buckets)]
        completed = [15 + index + late_ms * (index >= middle) for index in range(num_buckets)]
        end = ready[-1] + 1
        buckets = []
        for index in range(num_buckets):
            over = max(end, completed[index])
            buckets.append((ready[index], ready[index], completed[index], end, over, over + 0.2))
            end = over + 0.2
        return rank_step(
            BEGIN_MS[12],
            forward=(0, 10),
            backward=(12, ready[-1] + 1),
            end=end,
            arrivals=dict(enumerate(ready)),
            buckets=tuple(buckets),
        )

    step = Step(12, base.steps[0].layout, {rank: make(rank) for rank in range(world_size)})
    return replace(base, steps=(step,))
