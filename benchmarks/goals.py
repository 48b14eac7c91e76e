"""What the figures are held against."""

from __future__ import annotations

from dataclasses import dataclass

PERCENT = " %"  # a difference of shares is no share of anything


@dataclass(frozen=True)
class Goal:
    """One demand on one figure.

    Attributes:
        what: which figure, in words.
        measured, limit: in ``unit``.
        at_least: the figure is to reach the limit, rather than stay at or under it.
        noise: how far two copies of the same contender lie apart, as a share.
        why: what is known about a miss; shown only then.
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
