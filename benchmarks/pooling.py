"""Figures pooled over launches, which are sets of new processes with the same measurements.

A figure is the median over the rounds of all launches. The lowest and the highest median of a
single launch show the noise between launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypedDict

from interleave import Seconds


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
    return _paired(launches, name, base, lambda a, b: a / b)


def difference(launches: Sequence[Seconds], name: str, base: str, scale: float = 1.0) -> Figure:
    """The difference in seconds to another contender in the same round, times ``scale``."""
    return _paired(launches, name, base, lambda a, b: scale * (a - b))


def num_rounds(launches: Sequence[Seconds]) -> int:
    return sum(len(next(iter(times.values()))) for times in launches)


def lowest(launches: Sequence[Seconds], prefix: str) -> str:
    """The contender with the lowest median among names with this prefix.

    Second copies, which show the noise, are left out.
    """
    names = [name for name in launches[0] if name.startswith(prefix) and "again" not in name]
    return min(names, key=lambda name: level(launches, name)["median"])


def ratio_to_lowest(launches: Sequence[Seconds], name: str, prefix: str) -> Figure:
    """The ratio to the lowest contender with ``prefix``.

    For each launch, that contender is chosen by the measurements of the other launches. The minimum
    of many noisy medians is too low, which would favor this contender.
    """
    values = []
    for index, times in enumerate(launches):
        others = [*launches[:index], *launches[index + 1 :]]
        base = lowest(others or launches, prefix)
        values.append([a / b for a, b in zip(times[name], times[base], strict=True)])
    return figure(values)


def _paired(
    launches: Sequence[Seconds], name: str, base: str, of: Callable[[float, float], float]
) -> Figure:
    return figure(
        [[of(a, b) for a, b in zip(times[name], times[base], strict=True)] for times in launches]
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")
