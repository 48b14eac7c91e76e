"""Decides whether two recordings differ by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean, median, variance

# Student's t for two-sided intervals of 99 %, by degrees of freedom from 1 on.
_T_99 = (
    *(63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
)
_NUM_BLOCKS = 5
_FEWEST_IN_BLOCK = 3
_FEWEST_LAUNCHES = 4  # of both recordings together, so that their noise can be estimated
# The standard deviation between launches that is assumed if it is unknown. These values keep false
# verdicts rare on a busy machine of 2 cores (scripts/identical_pairs.py).
_LAUNCHES_TO_BLOCKS = 1.5  # in standard deviations between blocks
_LEAST_LAUNCH_NOISE = 0.08

Launch = Sequence[float]  # the step times of one launch, in ms


@dataclass(frozen=True)
class Verdict:
    """The ratio of the step times of two recordings, with its interval.

    Attributes:
        before_ms: The median step of the base, as the median over its launches.
        after_ms: The same of the other recording.
        low: The lower end of the interval of 99 % of the ratio.
        high: The upper end.
        basis: The values whose spread gives the interval, in words.
    """

    before_ms: float
    after_ms: float
    low: float
    high: float
    basis: str

    @property
    def ratio(self) -> float:
        return self.after_ms / self.before_ms

    @property
    def is_slower(self) -> bool:
        return self.low > 1

    @property
    def is_faster(self) -> bool:
        return self.high < 1


def compare_steps(new: Sequence[Launch], base: Sequence[Launch]) -> Verdict | None:
    """Compares the step times of two recordings.

    With at least four launches in total, the interval of the ratio is Student's interval of the
    difference of the mean logarithms of the launches' medians. With fewer launches, blocks of
    steps take the place of launches. The noise between launches is unknown then. It is assumed to
    be 1.5 times the noise between blocks, and at least 8 %.

    Args:
        new: The launches of a recording. Each has the times of its steps.
        base: The launches of the recording to compare with.

    Returns:
        The verdict. None if there are too few launches, and too few steps for blocks.
    """
    by_launch = len(new) + len(base) >= _FEWEST_LAUNCHES
    if by_launch:
        values = [[math.log(median(launch)) for launch in side] for side in (new, base)]
        basis = f"{len(new)} and {len(base)} launches"
    else:
        values = [[math.log(ms) for ms in chain(*map(_blocks, side))] for side in (new, base)]
        basis = f"{len(values[0])} and {len(values[1])} blocks of steps"
    degrees = len(values[0]) + len(values[1]) - 2
    if not values[0] or not values[1] or degrees < 1:
        return None
    pooled = sum((len(v) - 1) * variance(v) for v in values if len(v) > 1) / degrees
    spread = pooled * sum(1 / len(v) for v in values)
    if not by_launch:
        of_launches = max(_LAUNCHES_TO_BLOCKS**2 * pooled, _LEAST_LAUNCH_NOISE**2)
        spread += of_launches * sum(1 / len(side) for side in (new, base))
    middle = fmean(values[0]) - fmean(values[1])
    half = _T_99[min(degrees, len(_T_99)) - 1] * math.sqrt(spread)
    return Verdict(
        before_ms=median(map(median, base)),
        after_ms=median(map(median, new)),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        basis=basis,
    )


def _blocks(launch: Launch) -> list[float]:
    """The medians of blocks of successive steps. Empty if there are too few steps."""
    if len(launch) < _NUM_BLOCKS * _FEWEST_IN_BLOCK:
        return []
    ends = [len(launch) * number // _NUM_BLOCKS for number in range(_NUM_BLOCKS + 1)]
    return [median(launch[a:b]) for a, b in pairwise(ends)]
