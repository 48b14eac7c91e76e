"""The gain of a plan over the default plan, with its error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The standard deviation of a normal distribution, in units of its median absolute deviation.
_SD_PER_MAD = 1.4826
# The standard error of a median, in units of the standard error of a mean.
_MEDIAN_PER_MEAN = math.sqrt(math.pi / 2)
_MOST_ERRORS = 2.0


@dataclass(frozen=True)
class Gain:
    """The time that a plan saves in each step.

    Attributes:
        step_s: The time of a step with the default plan, in seconds.
        saved_s: The time by which a step is shorter. Negative if the step is longer.
        error_s: The standard error of ``saved_s``.
    """

    step_s: float
    saved_s: float
    error_s: float

    @property
    def is_certain(self) -> bool:
        """Whether the gain exceeds twice its error."""
        return self.saved_s > _MOST_ERRORS * self.error_s

    def __str__(self) -> str:
        share, error = (100 * value / self.step_s for value in (self.saved_s, self.error_s))
        return f"{share:.1f} ± {error:.1f} % of a step of {1e3 * self.step_s:.3g} ms"


def gain_of(default_s: Sequence[float], other_s: Sequence[float]) -> Gain | None:
    """Compares pairs of steps that ran one after the other.

    Outliers of a busy machine count little: the gain is the median of the differences, and its
    error follows from their median absolute deviation.

    Args:
        default_s: Times of steps with the default plan. 0: not measured.
        other_s: Times of steps with the other plan, in the same order.

    Returns:
        None if fewer than 3 pairs were measured.
    """
    pairs = [pair for pair in zip(default_s, other_s, strict=True) if min(pair) > 0]
    if len(pairs) < 3:
        return None
    saved = [default - other for default, other in pairs]
    middle = statistics.median(saved)
    deviation = _SD_PER_MAD * statistics.median(abs(each - middle) for each in saved)
    error = _MEDIAN_PER_MEAN * deviation / math.sqrt(len(saved))
    return Gain(statistics.median(default for default, _ in pairs), middle, error)
