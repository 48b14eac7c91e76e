"""Derives advice from the measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from ddpx.timeline.analyze.caps import caps_that_divide
from ddpx.timeline.analyze.figures import launched_buckets
from ddpx.timeline.analyze.summarize import summarize
from ddpx.timeline.analyze.summary import BucketSummary, RankSummary, Summary
from ddpx.timeline.model import Recording

_MIB = 1 << 20
# Smaller shares of a step are noise, or too small to improve.
_WORTH_A_WORD = 0.03
_MUCH = 0.10


def advise(recording: Recording) -> list[str]:
    """Returns sentences, the most important sentence first. Empty if nothing can be improved.

    Raises:
        RuntimeError: No complete step was recorded.
    """
    summary = summarize(recording)
    step_ms = max(rank.step_ms for rank in summary.ranks)
    return [
        *_stragglers(summary, step_ms),
        *_waits(summary, step_ms),
        *_too_much_communication(summary),
        *_exposed(recording, summary, step_ms),
        *_small_buckets(summary, step_ms),
        *_write_back(recording, step_ms),
        *_clocks(summary, step_ms),
    ]


def _stragglers(summary: Summary, step_ms: float) -> Iterator[str]:
    for rank in summary.ranks:
        others = [other.compute_ms for other in summary.ranks if other is not rank]
        if others and rank.compute_ms - median(others) > _MUCH * step_ms:
            yield (
                f"Rank {rank.rank} (host {rank.host}) computes {rank.compute_ms:.1f} ms a step, "
                f"the others {median(others):.1f} ms: everyone waits for it. Look at what its "
                "inputs and its machine have that the others have not."
            )


def _waits(summary: Summary, step_ms: float) -> Iterator[str]:
    """A sentence for each rank that others wait for, about the first bucket that waits."""
    waiting: dict[int, list[BucketSummary]] = defaultdict(list)
    for bucket in summary.buckets:
        if bucket.waited_for_rank is not None and bucket.waited_ms > _WORTH_A_WORD * step_ms:
            waiting[bucket.waited_for_rank].append(bucket)
    for rank, buckets in waiting.items():
        longest_ms = max(bucket.waited_ms for bucket in buckets)
        first = next(bucket for bucket in buckets if bucket.waited_ms > 0.8 * longest_ms)
        yield (
            f"Bucket {first.index} waits {first.waited_ms:.1f} ms for rank {rank}'s "
            f"{first.waited_for_param or 'end of backward'}: that much earlier another rank has it "
            "ready."
        )


def _too_much_communication(summary: Summary) -> Iterator[str]:
    slowest = max(summary.ranks, key=lambda rank: rank.transfer_ms)
    if slowest.transfer_ms <= slowest.compute_ms:
        return
    advice = (
        f"Communication takes {slowest.transfer_ms:.1f} ms a step, computation "
        f"{slowest.compute_ms:.1f} ms: no order of buckets can hide all of it. Send less "
        "(bf16_compress_hook, or several backwards in no_sync() for one that averages)"
    )
    one_host = len({rank.host for rank in summary.ranks}) == 1
    if summary.backend == "gloo" and summary.device == "cpu" and one_host:
        advice += ', or through shared memory: init_process_group("shm")'
    yield advice + "."


def _exposed(recording: Recording, summary: Summary, step_ms: float) -> Iterator[str]:
    """Advice on the last bucket, which no computation hides. A smaller last bucket costs less."""
    if not summary.buckets:
        return
    last = summary.buckets[-1]
    if last.exposed_ms < _WORTH_A_WORD * step_ms:
        return
    text = f"The last bucket{_size_of(last)} is"
    exposed = f"exposed for {last.exposed_ms:.1f} ms"
    of_step = f"of a step of {step_ms:.1f} ms"
    if last.num_bytes < _MIB:
        yield f"{text} {exposed} {of_step}. It is small already."
        return
    caps = caps_that_divide(recording, last.index)
    if last.exposed_ms > 0.9 * (last.completed_ms - last.launched_ms):
        exposed = f"fully {exposed}" if caps is None else "fully exposed"
    if caps is None:
        yield f"{text} {exposed} {of_step}."
    else:
        yield f"{text} {exposed}: try bucket_cap_mb_list=[{', '.join(f'{c:g}' for c in caps)}]."


def _size_of(bucket: BucketSummary) -> str:
    return f" of {_rounded(bucket.num_bytes / _MIB)} MiB" if bucket.num_bytes else ""


def _rounded(mib: float) -> float:
    return round(mib) if mib >= 10 else round(mib, 1)


def _small_buckets(summary: Summary, step_ms: float) -> Iterator[str]:
    dense = [bucket for bucket in summary.buckets if bucket.num_bytes]
    small = [bucket for bucket in dense if bucket.num_bytes < _MIB]
    exposed_ms = sum(bucket.exposed_ms for bucket in small)
    if len(small) > 4 and exposed_ms > _MUCH * step_ms:
        yield (
            f"{len(small)} of {len(dense)} buckets are smaller than 1 MiB, and are waited for "
            f"{exposed_ms:.1f} ms a step: a larger bucket_cap_mb saves the time that each takes "
            "to begin."
        )


def _write_back(recording: Recording, step_ms: float) -> Iterator[str]:
    spent = [
        sum(bucket.written_back - bucket.wait.end for bucket in launched_buckets(rank_step)) / 1e6
        for step in recording.steps
        for rank_step in step.ranks.values()
    ]
    if median(spent) > _WORTH_A_WORD * step_ms:
        yield (
            f"Copying averaged gradients back takes {median(spent):.1f} ms a step: with "
            "gradient_as_bucket_view=True there is nothing to copy."
        )


def _clocks(summary: Summary, step_ms: float) -> Iterator[str]:
    worst: RankSummary = max(summary.ranks, key=lambda rank: rank.clock_error_us)
    if worst.clock_error_us / 1e3 > _MUCH * step_ms:
        yield (
            f"The clock of rank {worst.rank} is known to {worst.clock_error_us:.0f} µs only: who "
            "waits for whom is uncertain by as much."
        )
