"""A few numbers for each bucket and each rank of a recording, and their tables."""

from __future__ import annotations

from dataclasses import dataclass

from ddpx.timeline.tables import table

_MIB = 1 << 20
_BUCKET_HEADERS = (
    *("bucket", "MiB", "params", "ready", "launched", "completed", "written", "exposed"),
    *("GB/s", "waits", "for"),
)
_RANK_HEADERS = (
    *("rank", "host", "step", "compute", "comm.", "overlapped", "exposed"),
    *("transfer", "last", "others wait", "clock ± µs"),
)


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
        return _text(self)


def _text(summary: Summary) -> str:
    first, last = summary.steps[0], summary.steps[-1]
    lines = [
        f"{_count(len(summary.steps), 'step')} ({first} to {last}) of {len(summary.ranks)} of "
        f"{_count(summary.world_size, 'rank')} over {summary.backend}, on {summary.device}. "
        "Times are medians in ms."
    ]
    if summary.num_other_steps:
        number = summary.num_other_steps
        lines.append(
            f"{_count(number, 'more step')} had other buckets and "
            f"{'is' if number == 1 else 'are'} left out."
        )
    if summary.lost_events:
        number = summary.lost_events
        lines.append(
            f"{_count(number, 'older event')} {'was' if number == 1 else 'were'} lost, because the "
            "recording was full."
        )
    lines += ["", "Buckets. Times start at the start of backward.", ""]
    lines.append(table(_BUCKET_HEADERS, [_bucket_row(bucket) for bucket in summary.buckets]))
    lines += ["", "Ranks.", ""]
    lines.append(table(_RANK_HEADERS, [_rank_row(rank) for rank in summary.ranks]))
    if summary.straggler is not None:
        lines += ["", f"Straggler: rank {summary.straggler}."]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bucket_row(bucket: BucketSummary) -> list[str]:
    waited_for = ""
    if bucket.waited_for_rank is not None:
        waited_for = f"rank {bucket.waited_for_rank}, {bucket.waited_for_param or 'no gradient'}"
    times = (bucket.ready_ms, bucket.launched_ms, bucket.completed_ms, bucket.written_back_ms)
    return [
        str(bucket.index),
        f"{bucket.num_bytes / _MIB:.2f}" if bucket.num_bytes else "sparse",
        str(bucket.num_params),
        *(f"{ms:.2f}" for ms in times),
        f"{bucket.exposed_ms:.2f}",
        "" if bucket.gb_per_s is None else f"{bucket.gb_per_s:.2f}",
        f"{bucket.waited_ms:.2f}",
        waited_for,
    ]


def _rank_row(rank: RankSummary) -> list[str]:
    times = (rank.step_ms, rank.compute_ms, rank.communication_ms, rank.overlapped_ms)
    return [
        str(rank.rank),
        rank.host,
        *(f"{ms:.2f}" for ms in times),
        f"{rank.exposed_ms:.2f}",
        f"{rank.transfer_ms:.2f}",
        f"{rank.last_share:.0%}",
        f"{rank.kept_waiting_ms:.2f}",
        f"{rank.clock_error_us:.0f}",
    ]
