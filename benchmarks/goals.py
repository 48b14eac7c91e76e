"""The goals for the figures."""

from __future__ import annotations

from dataclasses import dataclass

PERCENT = " %"  # distances between percentages are in points


@dataclass(frozen=True)
class Goal:
    """A goal for one figure.

    Attributes:
        what: The name of the figure.
        measured: The figure, in ``unit``.
        limit: The goal, in ``unit``.
        at_least: The figure must reach the limit. Otherwise the figure must not exceed the limit.
        noise: The difference between two copies of the same contender, as a share.
        why: The known reason for a miss. Shown only after a miss.
    """

    what: str
    measured: float
    limit: float
    unit: str = "x"
    at_least: bool = False
    noise: float = 0.0
    why: str = ""

    @property
    def met(self) -> bool:
        if self.at_least:
            return self.measured >= self.limit
        return self.measured <= self.limit

    @property
    def demand(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:.3g}{self.unit}"

    @property
    def found(self) -> str:
        return f"{self.measured:.3g}{self.unit}"

    @property
    def verdict(self) -> str:
        distance = abs(self.measured - self.limit)
        if self.unit == PERCENT:
            return "met" if self.met else f"**missed** by {distance:.1f} points"
        share = distance / self.limit
        text = "met" if self.met else f"**missed** by {share:.1%}"
        return f"{text}, within the noise of {self.noise:.1%}" if share < self.noise else text
