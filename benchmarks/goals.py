"""Goals for the measured figures."""

from __future__ import annotations

from dataclasses import dataclass

PERCENT = " %"  # a difference of shares has no relative excess


@dataclass(frozen=True)
class Goal:
    """A limit for one figure.

    Attributes:
        what: The figure, in words. measured, limit: In ``unit``.
        at_least: True if the figure must reach the limit, False if it must not exceed it.
        noise: The difference between two copies of the same contender, as a share.
        why: What is known about a miss. Shown only after a miss.
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
