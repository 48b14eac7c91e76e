"""Selects the ranks and buckets of a step that are shown in full, and explains its longest wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpx.timeline.analyze.extent import rank_extent
from ddpx.timeline.analyze.figures import (
    common,
    holdup,
    launched_buckets,
    moves_since,
    step_figures,
)
from ddpx.timeline.model import Interval, Recording, Step

_MS = 1e6
_MIB = 1 << 20
_MAX_RANKS = 8  # to show all of them
_MAX_ROWS = 48  # of buckets on all ranks together, to show all of them
_MAX_BUCKETS = 20  # of a rank
_NUM_CHOSEN = 8  # buckets with the longest waits, if there are more


@dataclass(frozen=True)
class LongestWait:
    """The longest exposed wait of a step.

    Attributes:
        rank: The rank that waited at the end of its backward.
        bucket: The index of the bucket that the rank waited for.
        ns: The duration of the wait, in ns.
        held_up_ns: The part of the wait in which another rank had not launched the bucket.
    """

    rank: int
    bucket: int
    ns: int
    held_up_ns: int


def longest_wait(step: Step) -> LongestWait | None:
    """Returns the longest exposed wait for a bucket. None if no rank waited."""
    found: LongestWait | None = None
    for rank, rank_step in step.ranks.items():
        for index, bucket in launched_buckets(rank_step).items():
            flight = Interval(bucket.launched, bucket.completed)
            for span in common([flight], [bucket.wait]):
                if found is None or span.ns > found.ns:
                    held_up = min(moves_since(step, index, bucket), span.end) - span.begin
                    found = LongestWait(rank, index, span.ns, max(held_up, 0))
    return found


def wait_text(recording: Recording, step: Step) -> str:
    """A sentence about the longest wait of a step and its cause."""
    wait = longest_wait(step)
    if wait is None:
        return "No rank waits for a bucket at the end of its backward."
    return (
        f"Longest wait: rank {wait.rank} waits {wait.ns / _MS:.1f} ms for bucket {wait.bucket}"
        f"{_cause(recording, step, wait)}."
    )


def _cause(recording: Recording, step: Step, wait: LongestWait) -> str:
    found = holdup(step, wait.bucket)
    if found is None or wait.held_up_ns < wait.ns / 2:
        num_bytes = step.layout[wait.bucket].num_bytes
        size = f" of {num_bytes / _MIB:.1f} MiB" if num_bytes else ""
        in_flight = (wait.ns - wait.held_up_ns) / _MS
        return f", mostly for its transfer{size} ({in_flight:.1f} ms)"
    late, waiting = step.ranks[found.rank], step.ranks[wait.rank]
    begins_later_ns = rank_extent(late).begin - rank_extent(waiting).begin
    of_late, of_waiting = (launched_buckets(each)[wait.bucket] for each in (late, waiting))
    launches_later_ns = of_late.launched - of_waiting.launched
    if begins_later_ns > launches_later_ns / 2:
        return f", because rank {found.rank} begins the step {begins_later_ns / _MS:.1f} ms later"
    backward_later_ns = late.backward.begin - waiting.backward.begin
    if backward_later_ns > launches_later_ns / 2:
        later_ms = backward_later_ns / _MS
        return f", because rank {found.rank} begins its backward {later_ms:.1f} ms later"
    after = "after its backward"
    if found.param is not None:
        after = f"after its gradient of {recording.param_names[found.param]}"
    return (
        f", because rank {found.rank} launches it {launches_later_ns / _MS:.1f} ms later, {after}"
    )


def why_text(recording: Recording, step: Step, number: int | None) -> str:
    """A sentence that says why a step is shown.

    Args:
        recording: The recording.
        step: The step.
        number: The number of the step that was asked for. None: the step of median duration.
    """
    if number is not None:
        return f"Step {number} was asked for."
    count = len(recording.steps)
    if count == 1:
        return "This is the only recorded step."
    return f"Of {count} recorded steps, this step has the median duration."


def straggler(step: Step) -> int | None:
    """The rank that others waited for longest in this step. None if no rank waited."""
    kept_waiting = dict.fromkeys(step.ranks, 0)
    for index in range(len(step.layout)):
        if (found := holdup(step, index)) is not None:
            kept_waiting[found.rank] += found.waited_ns
    slowest = max(kept_waiting, key=lambda rank: kept_waiting[rank])
    return slowest if kept_waiting[slowest] > 0 else None


def detailed_ranks(step: Step) -> list[int]:
    """The ranks to show in full: all, or if these are too many, the straggler and its victim.

    The victim is the rank with the longest wait.
    """
    ranks = sorted(step.ranks)
    if len(ranks) <= _MAX_RANKS and len(ranks) * len(step.layout) <= _MAX_ROWS:
        return ranks
    wait = longest_wait(step)
    chosen = {straggler(step), wait and wait.rank} - {None}
    return [rank for rank in ranks if rank in chosen] or ranks[:1]


def folded_text(step: Step) -> str:
    """A sentence about the ranks of :func:`detailed_ranks`. Empty if these are all ranks."""
    detailed = detailed_ranks(step)
    if len(detailed) == len(step.ranks):
        return ""
    wait = longest_wait(step)
    roles = {straggler(step): "which others wait for longest"}
    if wait is not None and wait.rank in roles:
        roles[wait.rank] += ", and which has the longest wait"
    elif wait is not None:
        roles[wait.rank] = "which has the longest wait"
    named = "; ".join(", ".join(filter(None, (f"rank {r}", roles.get(r)))) for r in detailed)
    return f"In full: {named}. Other ranks are folded."


def bucket_rows(step: Step, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Assigns buckets to rows: one bucket a row if they are few.

    Otherwise, the first and the last bucket and those with the longest waits on ``ranks`` have a
    row each. The buckets between two such rows share a row.
    """
    count = len(step.layout)
    if count <= _MAX_BUCKETS:
        return [(index,) for index in range(count)]

    def waits(index: int) -> int:
        buckets = [step.ranks[rank].buckets[index] for rank in ranks]
        found = holdup(step, index)
        exposed = max((b.wait.ns for b in buckets if b is not None), default=0)
        return exposed + (found.waited_ns if found is not None else 0)

    by_wait = sorted(range(count), key=waits, reverse=True)
    alone = {0, count - 1, *by_wait[:_NUM_CHOSEN]}
    rows: list[tuple[int, ...]] = []
    for index in range(count):
        if index in alone or not rows or rows[-1][-1] in alone:
            rows.append((index,))
        else:
            rows[-1] = (*rows[-1], index)
    return rows


def by_exposed(step: Step, ranks: Sequence[int]) -> list[int]:
    """Sorts ranks by their exposed communication, the longest first."""
    return sorted(ranks, key=lambda rank: -step_figures(step.ranks[rank]).exposed)
