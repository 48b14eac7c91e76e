"""The goals for the figures."""

from __future__ import annotations

from dataclasses import dataclass

PERCENT = " %"  # distances between percentages are in points
_WIDEST = 0.06  # of an interval that supports a verdict


@dataclass(frozen=True)
class Goal:
    """A goal for one figure.

    Attributes:
        what: The name of the figure.
        measured: The figure, in ``unit``.
        limit: The goal, in ``unit``.
        at_least: The figure must reach the limit. Otherwise the figure must not exceed the limit.
        noise: The difference between two copies of the same contender, as a share.
        interval: The interval of the figure. The goal is met if the interval reaches the limit.
        why: The known reason for a miss. Shown only after a miss.
    """

    what: str
    measured: float
    limit: float
    unit: str = "x"
    at_least: bool = False
    noise: float = 0.0
    interval: tuple[float, float] | None = None
    why: str = ""

    @property
    def met(self) -> bool:
        if self.at_least:
            return self._best >= self.limit
        return self._best <= self.limit

    @property
    def demand(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.3g}{self.unit}"

    @property
    def found(self) -> str:
        text = f"{self.measured:.3g}{self.unit}"
        return text + (" ({:.2f} - {:.2f})".format(*self.interval) if self.interval else "")

    @property
    def verdict(self) -> str:
        distance = abs(self._best - self.limit)
        if self.unit == PERCENT:
            return "met" if self.met else f"**missed** by {distance:.1f} points"
        share = distance / self.limit
        text = "met" if self.met else f"**missed** by {share:.1%}"
        if self.interval and self.interval[1] - self.interval[0] > _WIDEST:
            return f"{text}, interval wider than {_WIDEST:.0%}"
        return f"{text}, within the noise of {self.noise:.1%}" if share < self.noise else text

    @property
    def _best(self) -> float:
        """The measured figure, or the end of its interval that is next to the goal."""
        return self.interval[self.at_least] if self.interval else self.measured
