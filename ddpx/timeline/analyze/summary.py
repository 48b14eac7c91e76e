"""A few numbers for each bucket and each rank of a recording, and their tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpx.errors import count
from ddpx.timeline.texts import table

_MIB = 1 << 20
_WIDTH = 100
# The columns of both tables, and what they mean.
_BUCKET_COLUMNS = {
    "bucket": "its index, in the order of launch",
    "MiB": "its size, before a communication hook",
    "params": "their number",
    "ready": "the last gradient is in the bucket",
    "launched": "the all-reduce starts",
    "completed": "the all-reduce has ended",
    "written": "the averages are in param.grad",
    "exposed": "how long the end of backward waits for the bucket",
    "GB/s": "the bandwidth of the buckets that are in flight with it, once all ranks have launched",
    "waits": "from the launch of the first rank to the launch of the last rank",
    "for": "the rank that launches last, if it does so in most steps and by more than noise, and "
    "the gradient that makes it late",
}
_RANK_COLUMNS = {
    "rank": "its number",
    "host": "its machine",
    "not begun": "from the start of the step on the first rank to the start on this rank",
    "step": "from there to the end of the step on this rank",
    "compute": "forward and backward",
    "comm.": "buckets are in flight, or launched while other ranks have not launched them",
    "overlapped": "the part of comm. that computation hides",
    "exposed": "the part of comm. in which the end of backward only waits",
    "transfer": "buckets are in flight, and all ranks have launched them",
    "last": "the share of buckets that this rank is the last to launch",
    "others wait": "from the end of backward on another rank until this rank has launched all "
    "buckets, at most",
    "clock ± µs": "the error bound of its clock",
}


@dataclass(frozen=True)
class BucketSummary:
    """One bucket, as medians over steps.

    Times are in ms, and count from the start of backward on one rank.

    Attributes:
        index: The index of the bucket, in launch order.
        rank: The rank of the times: the rank that waits longest at the end of backward.
        num_params: The number of parameters in the bucket.
        num_bytes: The bytes that an all-reduce of the bucket sends without a communication hook. 0
            for a sparse gradient.
        ready_ms: The time at which the last gradient is packed.
        launched_ms: The time at which the all-reduce starts.
        completed_ms: The time at which the all-reduce ends.
        written_back_ms: The time at which the gradients are in ``param.grad``.
        exposed_ms: The time that the end of backward waits for the bucket.
        gb_per_s: The bandwidth in 1e9 bytes per second. Time counts from the launch of the last
            rank. Buckets that are in flight without a pause between them have one bandwidth, so
            the time in which a bucket queues for others does not lower it. None if the size is
            unknown.
        waited_ms: The time from the launch of the first rank to the launch of the last rank.
        waited_for_rank: The rank that is the last to launch in most steps. None if the wait for
            this rank is not above noise, or with one rank.
        waited_for_param: The parameter whose gradient makes ``waited_for_rank`` launch the bucket
            in most of these steps. None if no gradient does: the rank begins its backward late, or
            the parameters are unused.
    """

    index: int
    rank: int
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
        not_begun_ms: The time from the start of the step on the first rank to the start on this
            rank.
        step_ms: The time from the start of the first forward to the end of the step.
        compute_ms: The time of forwards and backwards, including those in ``no_sync()``.
        communication_ms: The time in which a bucket is in flight, or ranks agree on something.
        overlapped_ms: The part of ``communication_ms`` that is hidden behind other work.
        exposed_ms: The part of ``communication_ms`` in which the end of backward only waits.
        transfer_ms: The time in which data moves, without the wait for other ranks.
        last_share: The share of buckets and steps in which this rank is the last to launch.
        kept_waiting_ms: The longest time in a step from the end of backward on another rank until
            this rank has launched all buckets.
        clock_error_us: The error bound of the rank's clock against the clock of rank 0, in µs.
    """

    rank: int
    host: str
    not_begun_ms: float
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
        left_out: The numbers of recorded steps with other buckets, from before a rebuild.
        asked_steps: The number of steps that were to be recorded. None: no limit was given.
        buckets: The buckets, in launch order, with the times of one rank.
        ranks: The ranks, in order.
        straggler: The rank that keeps other ranks waiting longest. None if the wait is not surely
            (with 95 %) more than 5 % of a step, and more than the error of the clocks.
        shared_cores: For each set of cores with more threads than cores, the numbers as text.
        backend: The transport of buckets: ``"shm"``, or the backend of the process group.
        device: The device of the model.
        world_size: The number of ranks in the process group.
        lost_events: The number of older events for which the ring buffer had no room.
    """

    steps: tuple[int, ...]
    left_out: tuple[int, ...]
    asked_steps: int | None
    buckets: tuple[BucketSummary, ...]
    ranks: tuple[RankSummary, ...]
    straggler: int | None
    shared_cores: tuple[str, ...]
    backend: str
    device: str
    world_size: int
    lost_events: int

    def __str__(self) -> str:
        return _text(self)


def _text(summary: Summary) -> str:
    first, last = summary.steps[0], summary.steps[-1]
    lines = [
        f"{count(len(summary.steps), 'step')} ({first} to {last}) of {len(summary.ranks)} of "
        f"{count(summary.world_size, 'rank')} over {summary.backend}, on {summary.device}. "
        "Times are medians over steps, in ms."
    ]
    lines += _about_steps(summary)
    lines += [f"{text}." for text in summary.shared_cores]
    if summary.buckets:
        rank = summary.buckets[0].rank
        which = ", which waits longest" if len(summary.ranks) > 1 else ""
        lines += ["", f"Buckets of rank {rank}{which}. Times start at its start of backward.", ""]
        lines.append(table(list(_BUCKET_COLUMNS), [_bucket_row(b) for b in summary.buckets]))
        lines += ["", _legend(_BUCKET_COLUMNS)]
    lines += ["", "Ranks.", ""]
    lines.append(table(list(_RANK_COLUMNS), [_rank_row(rank) for rank in summary.ranks]))
    lines += ["", _legend(_RANK_COLUMNS)]
    if summary.straggler is not None:
        lines += ["", f"Straggler: rank {summary.straggler}."]
    return "\n".join(lines)


def _about_steps(summary: Summary) -> Iterator[str]:
    """Sentences about requested steps that are missing, with the reasons."""
    number = len(summary.steps) + len(summary.left_out)
    if summary.asked_steps is not None and number < summary.asked_steps:
        yield (
            f"Only {number} of the {count(summary.asked_steps, 'step')} that were asked for "
            f"{'was' if number == 1 else 'were'} completed while the recording ran."
        )
    if summary.left_out and summary.left_out[-1] > summary.steps[0]:
        yield (
            f"{count(len(summary.left_out), 'step')} from {summary.left_out[0]} to "
            f"{summary.left_out[-1]} left out: they had other buckets than the last step."
        )
    elif len(summary.left_out) == 1:
        yield f"Step {summary.left_out[0]} left out: its buckets were not rebuilt yet."
    elif summary.left_out:
        first, last = summary.left_out[0], summary.left_out[-1]
        yield f"Steps {first} to {last} left out: their buckets were not rebuilt yet."
    if summary.lost_events:
        number = summary.lost_events
        yield (
            f"{count(number, 'older event')} {'was' if number == 1 else 'were'} lost, because "
            "the recording was full."
        )


def _legend(columns: Mapping[str, str]) -> str:
    text = "; ".join(f"{name}: {meaning}" for name, meaning in columns.items())
    return textwrap.fill(f"{text}.", _WIDTH, break_on_hyphens=False)


def _bucket_row(bucket: BucketSummary) -> list[str]:
    waited_for = ""
    if bucket.waited_for_rank is not None:
        waited_for = f"rank {bucket.waited_for_rank}"
        if bucket.waited_for_param is not None:
            waited_for += f", {bucket.waited_for_param}"
    times = (bucket.ready_ms, bucket.launched_ms, bucket.completed_ms, bucket.written_back_ms)
    return [
        str(bucket.index),
        f"{bucket.num_bytes / _MIB:.2f}" if bucket.num_bytes else "sparse",
        str(bucket.num_params),
        *(f"{ms:.2f}" for ms in times),
        f"{bucket.exposed_ms:.2f}",
        "" if bucket.gb_per_s is None else f"{bucket.gb_per_s:.3g}",
        f"{bucket.waited_ms:.2f}",
        waited_for,
    ]


def _rank_row(rank: RankSummary) -> list[str]:
    times = (rank.step_ms, rank.compute_ms, rank.communication_ms, rank.overlapped_ms)
    return [
        str(rank.rank),
        rank.host,
        f"{rank.not_begun_ms:.2f}",
        *(f"{ms:.2f}" for ms in times),
        f"{rank.exposed_ms:.2f}",
        f"{rank.transfer_ms:.2f}",
        f"{rank.last_share:.0%}",
        f"{rank.kept_waiting_ms:.2f}",
        f"{rank.clock_error_us:.0f}",
    ]
