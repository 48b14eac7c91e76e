"""The bars of one row of a picture, and the legend of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddpx.timeline.export.rows import COLORS, LEGEND, NEGLIGIBLE, bucket_bars, compute_bars
from ddpx.timeline.model import Interval, Step

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_MS = 1e6

_DARK, _LIGHT = "#222222", "#ffffff"
# The hatching of an exposed wait contrasts with the bar below it.
_HATCHES = {"held-up": _DARK, "moving": _LIGHT}
_HATCH = "/////"

_FEW_GRADIENTS = 200
_THIN = 0.02  # the least width of a bar, in inches


class Rows:
    """Draws bars into the axes of a picture, and collects the names that the legend needs.

    Positions are in inches from the top of the axes.

    Args:
        begin: The start of the step, in ns.
        length_ms: The length of the time axis.
        width: The width of the axes, in inches.
    """

    def __init__(self, begin: int, length_ms: float, width: float) -> None:
        self._begin = begin
        self._length_ms = length_ms
        self._least_ms = _THIN / width * length_ms
        self._used: set[str] = set()

    def compute(self, axes: Axes, step: Step, rank: int, y: tuple[float, float]) -> None:
        """Draws forwards and backwards. ``y`` is the top and the height of the row."""
        for name, spans in compute_bars(step, rank).items():
            self._bars(axes, y, spans, name, label=LEGEND[name])

    def gradients(self, axes: Axes, step: Step, rank: int, y: tuple[float, float]) -> None:
        """Draws a tick for each arrival of a gradient."""
        arrivals = [(each.at - self._begin) / _MS for each in step.ranks[rank].arrivals]
        width = 0.7 if len(arrivals) <= _FEW_GRADIENTS else 0.25
        top, height = _within(y)
        axes.vlines(arrivals, top, top + height, color=COLORS["gradient"], lw=width)
        if arrivals:
            self._used.add("gradient")

    def buckets(
        self, axes: Axes, step: Step, rank: int, y: tuple[float, float], indices: Sequence[int]
    ) -> None:
        """Draws the states of buckets, which share a row."""
        bars, exposed = bucket_bars(step, rank, indices)
        for state, spans in bars.items():
            self._bars(axes, y, spans, state)
        for state, spans in exposed.items():
            self._hatch(axes, y, spans, _HATCHES[state])

    def legend(self) -> list[Artist]:
        """The entries of the legend for everything that was drawn."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        made: list[Artist] = []
        for name, text in LEGEND.items():
            if name not in self._used:
                continue
            if name == "gradient":
                made.append(Line2D([], [], color=COLORS[name], marker="|", ls="", label=text))
            elif name == "exposed":
                color = COLORS["moving"]
                hatch: dict[str, object] = {"hatch": _HATCH, "edgecolor": _LIGHT, "lw": 0}
                made.append(Patch(facecolor=color, label=text, **hatch))  # type: ignore[arg-type]
            else:
                made.append(Patch(facecolor=COLORS[name], label=text))
        return made

    def _bars(
        self,
        axes: Axes,
        y: tuple[float, float],
        spans: Iterable[Interval],
        name: str,
        label: str = "",
    ) -> None:
        bars = self._visible(spans)
        if not bars:
            return
        self._used.add(name)
        axes.broken_barh(bars, _within(y), color=COLORS[name], lw=0)
        for x, width in bars:
            if label and width > 0.06 * self._length_ms:  # the label fits
                axes.text(
                    x + width / 2,
                    y[0] + y[1] / 2,
                    label,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if name == "backward" else "black",
                )

    def _visible(self, spans: Iterable[Interval]) -> list[tuple[float, float]]:
        least_ns = NEGLIGIBLE * self._length_ms * _MS
        return [self._bar(span) for span in spans if span.ns > least_ns]

    def _bar(self, span: Interval) -> tuple[float, float]:
        """The start and the width in ms. A thin bar is widened, but not beyond the axes."""
        begin, width = (span.begin - self._begin) / _MS, span.ns / _MS
        if width >= self._least_ms:
            return begin, width
        return max(min(begin, self._length_ms - self._least_ms), 0.0), self._least_ms

    def _hatch(
        self, axes: Axes, y: tuple[float, float], spans: Sequence[Interval], color: str
    ) -> None:
        bars = self._visible(spans)
        if not bars:
            return
        self._used.add("exposed")
        axes.broken_barh(
            bars,
            _within(y),
            facecolor="none",
            edgecolor=color,
            hatch=_HATCH,
            lw=0,
        )


def _within(y: tuple[float, float]) -> tuple[float, float]:
    """The top and the height of a bar in a row."""
    return y[0] + 0.1 * y[1], 0.8 * y[1]
