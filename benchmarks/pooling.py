"""Figures pooled over launches, which are sets of new processes with the same measurements.

A figure is the median over the rounds of all launches. The lowest and the highest median of a
single launch, and an interval, show the noise between launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypedDict

from interleave import Seconds

# Student's t for two-sided intervals of 95 %, by degrees of freedom from 1 on.
_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Figure(TypedDict):
    """A figure as in the JSON files."""

    median: float
    low: float
    high: float


def figure(launches: Sequence[Sequence[float]]) -> Figure:
    """The figure of values by launch."""
    medians = [statistics.median(values) for values in launches]
    pooled = statistics.median(value for values in launches for value in values)
    return {"median": _short(pooled), "low": _short(min(medians)), "high": _short(max(medians))}


def level(launches: Sequence[Seconds], name: str, scale: float = 1.0) -> Figure:
    """The seconds of a contender, times ``scale``."""
    return figure([[scale * seconds for seconds in times[name]] for times in launches])


def ratio(launches: Sequence[Seconds], name: str, base: str) -> Figure:
    """The ratio to another contender in the same round."""
    return figure(ratios(launches, name, base))


def difference(launches: Sequence[Seconds], name: str, base: str, scale: float = 1.0) -> Figure:
    """The difference in seconds to another contender in the same round, times ``scale``."""
    return figure(
        [
            [scale * (a - b) for a, b in zip(times[name], times[base], strict=True)]
            for times in launches
        ]
    )


def num_rounds(launches: Sequence[Seconds]) -> int:
    return sum(len(next(iter(times.values()))) for times in launches)


def lowest(launches: Sequence[Seconds], prefix: str) -> str:
    """The contender with the lowest median among names with this prefix.

    Second copies, which show the noise, are left out.
    """
    names = [name for name in launches[0] if name.startswith(prefix) and "again" not in name]
    return min(names, key=lambda name: level(launches, name)["median"])


def ratios(launches: Sequence[Seconds], name: str, base: str) -> list[list[float]]:
    """By launch, the ratios to another contender in the same round."""
    return [[a / b for a, b in zip(times[name], times[base], strict=True)] for times in launches]


def ratios_to_lowest(launches: Sequence[Seconds], name: str, prefix: str) -> list[list[float]]:
    """By launch, the ratios to the lowest contender with ``prefix`` in the same round.

    For each launch, that contender is chosen by the measurements of the other launches. The minimum
    of many noisy medians is too low, which would favor this contender.
    """
    values = []
    for index, times in enumerate(launches):
        others = [*launches[:index], *launches[index + 1 :]]
        values += ratios([times], name, lowest(others or launches, prefix))
    return values


def interval(launches: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The interval that contains the figure with a confidence of 95 %.

    It is Student's interval of the mean logarithm of the launches' medians. For a single launch,
    the interval has no width.

    Args:
        launches: Positive values, by launch. At most ten launches.
    """
    logs = [math.log(statistics.median(values)) for values in launches]
    half = 0.0
    if len(logs) > 1:
        half = _T_95[len(logs) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - half), math.exp(middle + half)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
