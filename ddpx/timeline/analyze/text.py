"""Summaries as tables to print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpx.timeline.analyze.summary import BucketSummary, RankSummary, Summary

_MIB = 1 << 20
_BUCKET_HEADERS = (
    *("bucket", "MiB", "params", "ready", "launched", "completed", "written", "exposed"),
    *("GB/s", "waits", "for"),
)
_RANK_HEADERS = (
    *("rank", "host", "step", "compute", "comm.", "overlapped", "exposed"),
    *("transfer", "last", "others wait", "clock ± µs"),
)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned, if tabulate is installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        return "\n".join("\t".join(str(cell) for cell in row) for row in [headers, *rows])
    return tabulate(rows, headers=headers, disable_numparse=True)


def summary_text(summary: Summary) -> str:
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
