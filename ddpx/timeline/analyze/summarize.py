"""Computes the summary of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddpx.timeline.analyze.cores import shared_cores
from ddpx.timeline.analyze.evidence import Evidence, most_common
from ddpx.timeline.analyze.extent import not_begun
from ddpx.timeline.analyze.figures import Holdups, holdups, step_figures, transfer_ns
from ddpx.timeline.analyze.summary import BucketSummary, RankSummary, Summary
from ddpx.timeline.model import Recording

_MS = 1e6


def summarize(recording: Recording) -> Summary:
    """Returns the summary of a recording.

    Raises:
        RuntimeError: No complete step was recorded.
    """
    evidence = Evidence(recording)
    found = holdups(evidence.steps)
    ranks = tuple(_rank(evidence, rank, found) for rank in sorted(recording.hosts))
    waiting = max(ranks, key=lambda rank: rank.exposed_ms).rank
    counted = [step.number for step in evidence.steps]
    return Summary(
        steps=tuple(counted),
        left_out=tuple(s.number for s in recording.steps if s.number not in counted),
        asked_steps=recording.asked_steps,
        buckets=tuple(
            bucket
            for index in range(len(evidence.layout))
            if (bucket := _bucket(evidence, index, waiting, found)) is not None
        ),
        ranks=ranks,
        straggler=_straggler(evidence, ranks),
        shared_cores=tuple(map(str, shared_cores(recording))),
        backend=recording.backend,
        device=recording.device,
        world_size=recording.world_size,
        lost_events=sum(recording.lost_events.values()),
    )


def _straggler(evidence: Evidence, ranks: Sequence[RankSummary]) -> int | None:
    slowest = max(ranks, key=lambda rank: rank.kept_waiting_ms).rank
    waits = [late.waited for late in evidence.lateness(slowest)]
    return slowest if evidence.is_worth_a_word(waits) else None


def _bucket(evidence: Evidence, index: int, rank: int, by_bucket: Holdups) -> BucketSummary | None:
    """The summary of a bucket on one rank. None if the rank never communicated the bucket."""
    times = [
        (rank_step.backward.begin, bucket)
        for step in evidence.steps
        if (rank_step := step.ranks.get(rank)) and (bucket := rank_step.buckets[index]) is not None
    ]
    if not times:
        return None
    found = [h for (_, bucket_index), h in by_bucket.items() if bucket_index == index]
    last = most_common(h.rank for h in found)
    if not evidence.is_worth_a_word([h.waited_ns if h.rank == last else 0 for h in found]):
        last = None
    param = most_common(h.param for h in found if h.rank == last)
    layout = evidence.layout[index]
    return BucketSummary(
        index=index,
        rank=rank,
        num_params=len(layout.params),
        num_bytes=layout.num_bytes,
        ready_ms=median(b.ready - begin for begin, b in times) / _MS,
        launched_ms=median(b.launched - begin for begin, b in times) / _MS,
        completed_ms=median(b.completed - begin for begin, b in times) / _MS,
        written_back_ms=median(b.written_back - begin for begin, b in times) / _MS,
        exposed_ms=median(b.wait.ns for _, b in times) / _MS,
        gb_per_s=_gb_per_s(evidence, index),
        waited_ms=median(h.waited_ns for h in found) / _MS if found else 0.0,
        waited_for_rank=last,
        waited_for_param=None if param is None else evidence.recording.param_names[param],
    )


def _gb_per_s(evidence: Evidence, index: int) -> float | None:
    known = [found.gb_per_s[index] for found in evidence.transfers if index in found.gb_per_s]
    return median(known) if known else None


def _rank(evidence: Evidence, rank: int, by_bucket: Holdups) -> RankSummary:
    steps = [step for step in evidence.steps if rank in step.ranks]
    figures = [step_figures(step.ranks[rank]) for step in steps]
    mine = [h for h in by_bucket.values() if h.rank == rank]
    return RankSummary(
        rank=rank,
        host=evidence.recording.hosts[rank],
        not_begun_ms=_middle_ms([not_begun(step, rank).ns for step in steps]),
        step_ms=_middle_ms([figure.whole for figure in figures]),
        compute_ms=_middle_ms([figure.compute for figure in figures]),
        communication_ms=_middle_ms([figure.communication for figure in figures]),
        overlapped_ms=_middle_ms([figure.overlapped for figure in figures]),
        exposed_ms=_middle_ms([figure.exposed for figure in figures]),
        transfer_ms=_middle_ms([transfer_ns(step, rank) for step in steps]),
        last_share=len(mine) / len(by_bucket) if by_bucket else 0.0,
        kept_waiting_ms=_middle_ms([late.waited for late in evidence.lateness(rank)]),
        clock_error_us=evidence.recording.clocks[rank].error_ns / 1e3,
    )


def _middle_ms(values_ns: Sequence[int]) -> float:
    return median(values_ns) / _MS if values_ns else 0.0
