"""The rows, bars, labels and the legend that the picture and the page draw of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpx.timeline.analyze.extent import not_begun
from ddpx.timeline.analyze.figures import common, moves_since, union
from ddpx.timeline.model import Interval, Step
from ddpx.timeline.texts import size_text

MAX_FOLDED = 16  # ranks with one row for all buckets
NEGLIGIBLE = 1e-4  # the share of a step below which a bar is left out


class Times(NamedTuple):
    """The times of a bucket on a rank, in ns.

    Attributes:
        fills: The first gradient arrives.
        ready: The last gradient is packed.
        begins: The bucket is launched, and has its turn.
        moves: The bucket is in flight on all ranks.
        completed: The all-reduce ends.
        waits: The end of the step begins to wait for the bucket.
        waited: The wait has ended.
        written: The gradients are in ``param.grad``.
    """

    fills: int
    ready: int
    begins: int
    moves: int
    completed: int
    waits: int
    waited: int
    written: int

    def span(self, state: str) -> Interval:
        """The interval in which the bucket was in one of ``STATES``."""
        begin, end = STATES[state]
        return Interval(getattr(self, begin), getattr(self, end))


# The times between which a bucket is in a state. A state is drawn over earlier ones.
STATES = {
    "filling": ("fills", "ready"),
    "queued": ("ready", "begins"),
    "averaged": ("completed", "waited"),
    "held-up": ("begins", "moves"),
    "moving": ("moves", "completed"),
    "written": ("waited", "written"),
}
# The states that have a hatching where the end of backward only waits.
MAY_BE_EXPOSED = ("held-up", "moving")
# The palette of Okabe and Ito, for people with colour blindness. Some colours are lightened.
COLORS = {
    "not-begun": "#d9d9d9",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "gradient": "#333333",
    "filling": "#f5cf80",
    "queued": "#e69f00",
    "held-up": "#a6dccb",
    "moving": "#009e73",
    "averaged": "#ead1de",
    "written": "#cc79a7",
}
LEGEND = {
    "not-begun": "not begun",
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient arrives",
    "filling": "bucket fills",
    "queued": "full, queued",
    "held-up": "launched, other ranks not yet",
    "moving": "in flight on all ranks",
    "averaged": "averaged, not yet written back",
    "written": "written back",
    "exposed": "exposed wait",
}


def bucket_times(step: Step, rank: int, index: int) -> Times | None:
    """The times of a bucket. None if the bucket is not communicated.

    Args:
        step: A step from :func:`~ddpx.timeline.analyze.turns.in_turn`.
        rank: The rank.
        index: The index of the bucket.
    """
    bucket = step.ranks[rank].buckets[index]
    if bucket is None:
        return None
    members = set(step.layout[index].params)
    arrivals = (a.at for a in step.ranks[rank].arrivals if a.param in members)
    return Times(
        *(min(arrivals, default=bucket.ready), bucket.ready, bucket.launched),
        *(moves_since(step, index, bucket), bucket.completed),
        *(bucket.wait.begin, bucket.wait.end, bucket.written_back),
    )


def bucket_bars(
    step: Step, rank: int, indices: Iterable[int]
) -> tuple[dict[str, list[Interval]], dict[str, list[Interval]]]:
    """Returns when at least one of some buckets was in which state on a rank.

    Returns:
        The intervals of each of ``STATES``, and the exposed part of each of ``MAY_BE_EXPOSED``.
        Intervals are disjoint and in order, and none is empty.
    """
    found = [times for i in indices if (times := bucket_times(step, rank, i)) is not None]
    bars = {
        state: union(span for times in found if (span := times.span(state)).ns > 0)
        for state in STATES
    }
    exposed = {
        state: union(
            span
            for times in found
            for span in common([times.span(state)], [Interval(times.waits, times.waited)])
        )
        for state in MAY_BE_EXPOSED
    }
    return bars, exposed


def compute_bars(step: Step, rank: int) -> dict[str, Sequence[Interval]]:
    """The forwards and backwards of a rank, and the time before them."""
    rank_step = step.ranks[rank]
    return {
        "not-begun": [not_begun(step, rank)],
        "forward": rank_step.forwards,
        "backward": (*rank_step.local_backwards, rank_step.backward),
    }


def label(step: Step, group: Sequence[int]) -> str:
    """The label of a row of buckets."""
    if len(group) > 1:
        return f"buckets {group[0]} to {group[-1]}"
    return f"bucket {group[0]}, {size(step.layout[group[0]].num_bytes)}"


def size(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes else "sparse"
