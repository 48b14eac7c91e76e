"""Tells a figure of several steps from noise."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

_ERROR = 0.05


def surely_above(values: Sequence[float], one_of: int = 1) -> float:
    """Returns a bound that the median exceeds with a probability of 95 %.

    The bound is an order statistic, so it holds for any distribution of independent values (the
    sign test). With fewer than five values, it is the smallest value, and less certain.

    Args:
        values: The figure in each step. At least one.
        one_of: The number of ranks whose figures are tested. The probability is that all bounds
            hold. Default 1.
    """
    number = len(values)
    index, at_most = 0, 1 / 2**number  # the probability that at most `index` values are below
    while (at_most := at_most + comb(number, index + 1) / 2**number) <= _ERROR / one_of:
        index += 1
    return sorted(values)[index]


def surely_below(values: Sequence[float]) -> float:
    """Returns a bound that exceeds the median, as :func:`surely_above`."""
    return -surely_above([-value for value in values])
