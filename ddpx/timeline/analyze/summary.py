"""The steps of a recording in a few numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddpx.timeline import errors
from ddpx.timeline.analyze.figures import Holdup, bandwidth, holdup, step_figures, transfer_ns
from ddpx.timeline.model import BucketTimes, Recording, Step

_MS = 1e6
_FEWEST = 3  # steps that have a spread
_SIGMAS_A_DEVIATION = 1.4826  # median absolute deviations in a standard deviation


@dataclass(frozen=True)
class BucketSummary:
    """One bucket, as medians over ranks and steps.

    Times are in ms, and count from the start of backward on the rank.

    Attributes:
        index: The index of the bucket, in launch order.
        num_params: The number of parameters in the bucket.
        num_bytes: The size of the bucket. 0 for a sparse gradient.
        ready_ms: The time at which the last gradient is packed.
        launched_ms: The time at which the all-reduce starts.
        completed_ms: The time at which the all-reduce ends.
        written_back_ms: The time at which the gradients are in ``param.grad``.
        exposed_ms: The time that the end of backward waits for the bucket.
        gb_per_s: The size in 1e9 bytes, divided by the seconds from the launch of the last rank to
            the end of the last rank. None if the size is unknown.
        waited_ms: The time from the launch of the first rank to the launch of the last rank.
        waited_for_rank: The rank that is the last to launch in most steps. None with one rank.
        waited_for_param: The parameter whose gradient makes ``waited_for_rank`` launch the bucket
            in most of these steps.
    """

    index: int
    num_params: int
    num_bytes: int
    ready_ms: float
    launched_ms: float
    completed_ms: float
    written_back_ms: float
    exposed_ms: float
    gb_per_s: float | None
    waited_ms: float
    waited_for_rank: int | None
    waited_for_param: str | None


@dataclass(frozen=True)
class RankSummary:
    """One rank, as medians over steps in ms.

    Attributes:
        rank: The rank.
        host: The host of the rank.
        step_ms: The time from the start of the first forward to the end of the step.
        step_error_ms: The standard error of ``step_ms``, from the median absolute deviation of the
            steps, as if their durations were normally distributed. None for fewer than three
            steps.
        compute_ms: The time of forwards and backwards, including those in ``no_sync()``.
        communication_ms: The time in which a bucket is in flight, or ranks agree on something.
        overlapped_ms: The part of ``communication_ms`` that is hidden behind other work.
        exposed_ms: The part of ``communication_ms`` in which the end of backward only waits.
        transfer_ms: The time in which data moves, without the wait for other ranks.
        last_share: The share of buckets and steps in which this rank is the last to launch.
        kept_waiting_ms: The time that the first rank waits for this rank, summed over the buckets
            of a step, as the mean over steps.
        clock_error_us: The error bound of the rank's clock against the clock of rank 0, in µs.
    """

    rank: int
    host: str
    step_ms: float
    step_error_ms: float | None
    compute_ms: float
    communication_ms: float
    overlapped_ms: float
    exposed_ms: float
    transfer_ms: float
    last_share: float
    kept_waiting_ms: float
    clock_error_us: float


@dataclass(frozen=True)
class Summary:
    """Medians over the recorded steps. ``print()`` shows tables.

    Attributes:
        steps: The numbers of the evaluated steps. These steps have the buckets of the last step.
        num_other_steps: The number of recorded steps with other buckets, from before a rebuild.
        buckets: The buckets, in launch order.
        ranks: The ranks, in order.
        straggler: The rank that keeps other ranks waiting longest. None if the wait is less than
            1 % of a step, or less than the error of the clocks.
        backend: The backend of the process group.
        device: The device of the model.
        world_size: The number of ranks in the process group.
        lost_events: The number of older events for which the ring buffer had no room.
    """

    steps: tuple[int, ...]
    num_other_steps: int
    buckets: tuple[BucketSummary, ...]
    ranks: tuple[RankSummary, ...]
    straggler: int | None
    backend: str
    device: str
    world_size: int
    lost_events: int

    def __str__(self) -> str:
        from ddpx.timeline.analyze.text import summary_text

        return summary_text(self)


def summarize(recording: Recording) -> Summary:
    """Raises RuntimeError if no complete step was recorded."""
    if not recording.steps:
        raise errors.no_complete_step()
    layout = recording.steps[-1].layout
    steps = [step for step in recording.steps if step.layout == layout]
    holdups = _holdups(steps)
    ranks = tuple(_rank(recording, rank, steps, holdups) for rank in sorted(recording.hosts))
    slowest = max(ranks, key=lambda rank: rank.kept_waiting_ms)
    noise_ms = max(slowest.step_ms / 100, slowest.clock_error_us / 1e3)
    return Summary(
        steps=tuple(step.number for step in steps),
        num_other_steps=len(recording.steps) - len(steps),
        buckets=tuple(
            bucket
            for index in range(len(layout))
            if (bucket := _bucket(recording, index, steps, holdups)) is not None
        ),
        ranks=ranks,
        straggler=slowest.rank if slowest.kept_waiting_ms > noise_ms else None,
        backend=recording.backend,
        device=recording.device,
        world_size=recording.world_size,
        lost_events=sum(recording.lost_events.values()),
    )


_Holdups = dict[tuple[int, int], Holdup]  # by step and bucket


def _holdups(steps: Sequence[Step]) -> _Holdups:
    return {
        (step.number, index): found
        for step in steps
        for index in range(len(step.layout))
        if (found := holdup(step, index)) is not None
    }


def _bucket(
    recording: Recording, index: int, steps: Sequence[Step], holdups: _Holdups
) -> BucketSummary | None:
    """None if no step communicated it."""
    times: list[tuple[int, BucketTimes]] = [
        (rank_step.backward.begin, bucket)
        for step in steps
        for rank_step in step.ranks.values()
        if (bucket := rank_step.buckets[index]) is not None
    ]
    if not times:
        return None
    found = [h for (_, bucket_index), h in holdups.items() if bucket_index == index]
    rank = _most_common(h.rank for h in found)
    param = _most_common(h.param for h in found if h.rank == rank)
    speeds = [speed for step in steps if (speed := bandwidth(step, index)) is not None]
    layout = steps[-1].layout[index]
    return BucketSummary(
        index=index,
        num_params=len(layout.params),
        num_bytes=layout.num_bytes,
        ready_ms=median(b.ready - begin for begin, b in times) / _MS,
        launched_ms=median(b.launched - begin for begin, b in times) / _MS,
        completed_ms=median(b.completed - begin for begin, b in times) / _MS,
        written_back_ms=median(b.written_back - begin for begin, b in times) / _MS,
        exposed_ms=median(b.wait.ns for _, b in times) / _MS,
        gb_per_s=median(speeds) / 1e9 if speeds else None,
        waited_ms=median(h.waited_ns for h in found) / _MS if found else 0.0,
        waited_for_rank=rank,
        waited_for_param=None if param is None else recording.param_names[param],
    )


def _rank(recording: Recording, rank: int, steps: Sequence[Step], holdups: _Holdups) -> RankSummary:
    figures = [step_figures(step.ranks[rank]) for step in steps if rank in step.ranks]
    transfers = [transfer_ns(step, rank) for step in steps if rank in step.ranks]
    mine = [h for h in holdups.values() if h.rank == rank]

    def middle(name: str) -> float:
        values: list[int] = [getattr(figure, name) for figure in figures]
        return median(values) / _MS if values else 0.0

    return RankSummary(
        rank=rank,
        host=recording.hosts[rank],
        step_ms=middle("whole"),
        step_error_ms=_error_ms([figure.whole for figure in figures]),
        compute_ms=middle("compute"),
        communication_ms=middle("communication"),
        overlapped_ms=middle("overlapped"),
        exposed_ms=middle("exposed"),
        transfer_ms=median(transfers) / _MS if transfers else 0.0,
        last_share=len(mine) / len(holdups) if holdups else 0.0,
        kept_waiting_ms=sum(h.waited_ns for h in mine) / len(steps) / _MS,
        clock_error_us=recording.clocks[rank].error_ns / 1e3,
    )


def _error_ms(values_ns: Sequence[int]) -> float | None:
    if len(values_ns) < _FEWEST:
        return None
    middle = median(values_ns)
    deviation = _SIGMAS_A_DEVIATION * median(abs(value - middle) for value in values_ns)
    return math.sqrt(math.pi / 2 / len(values_ns)) * deviation / _MS


def _most_common(values: Iterable[Any]) -> Any:
    counts = Counter(values)
    return counts.most_common(1)[0][0] if counts else None
