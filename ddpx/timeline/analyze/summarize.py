"""Computes the summary of a recording."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from ddpx.timeline import errors
from ddpx.timeline.analyze.figures import Holdup, bandwidth, holdup, step_figures, transfer_ns
from ddpx.timeline.analyze.summary import BucketSummary, RankSummary, Summary
from ddpx.timeline.model import BucketTimes, Recording, Step

_MS = 1e6


def summarize(recording: Recording) -> Summary:
    """Returns the summary of a recording.

    Raises:
        RuntimeError: No complete step was recorded.
    """
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
    """The summary of a bucket. None if no step communicated the bucket."""
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
        compute_ms=middle("compute"),
        communication_ms=middle("communication"),
        overlapped_ms=middle("overlapped"),
        exposed_ms=middle("exposed"),
        transfer_ms=median(transfers) / _MS if transfers else 0.0,
        last_share=len(mine) / len(holdups) if holdups else 0.0,
        kept_waiting_ms=sum(h.waited_ns for h in mine) / len(steps) / _MS,
        clock_error_us=recording.clocks[rank].error_ns / 1e3,
    )


def _most_common(values: Iterable[Any]) -> Any:
    counts = Counter(values)
    return counts.most_common(1)[0][0] if counts else None
