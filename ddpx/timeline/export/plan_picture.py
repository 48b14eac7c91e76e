"""Draws two bucket plans over the time of a backward; see :mod:`.plan_rows`."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from ddpx.planning import PlanReport
from ddpx.timeline.export.plan_rows import PlanRow, arrivals_ms, plan_rows, title
from ddpx.timeline.export.rows import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 11.0, 2.2  # inches, of one plan
_TITLE_WIDTH = 110  # characters a line
_MOST_LABELS = 40


def draw(report: PlanReport, path: str | Path) -> None:
    """Writes the picture.

    Args:
        report: The report of a search that has measured plans, or has ended before.
        path: The picture. The suffix selects the format: .html, or a format of matplotlib.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = make_figure(report)
    if Path(path).suffix.lower() != ".html":
        figure.savefig(path, dpi=150)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    _, begin, drawing = picture.getvalue().partition("<svg")
    page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{escape(title(report))}</title>\n'
    Path(path).write_text(f"{page}{begin}{drawing}", encoding="utf-8")


def make_figure(report: PlanReport) -> Figure:
    """Returns the figure that :func:`draw` writes."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, needs no display
    except ImportError as cause:
        raise ImportError(
            "the picture needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from cause
    plans = plan_rows(report)
    figure = Figure(figsize=(_WIDTH, 1.0 + _HEIGHT * max(len(plans), 1)), layout="constrained")
    text = fill(title(report), _TITLE_WIDTH)
    figure.suptitle(text, fontsize=11, weight="bold", x=0.01, ha="left")
    rows = figure.subplots(max(len(plans), 1), 1, sharex=True, squeeze=False)
    for number, plan in enumerate(plans):
        _draw_plan(rows[number][0], arrivals_ms(report), plan)
    rows[-1][0].set_xlabel("ms since the start of the backward")
    return figure


def _draw_plan(axes: Axes, ready: list[float], plan: PlanRow) -> None:
    """A row of gradients, and a row of all-reduces as the model predicts them."""
    axes.broken_barh([(0, max(ready))], (1.05, 0.3), color=COLORS["backward"])
    axes.vlines(ready, 0.65, 1.0, color=COLORS["gradient"], lw=0.7)
    bars = [(begin, end - begin) for begin, end in plan.spans_ms]
    # White edges separate neighbours, and would hide a narrow bar.
    edges = ["white" if width > 0.01 * max(ready) else COLORS["moving"] for _, width in bars]
    axes.broken_barh(bars, (0.1, 0.5), facecolor=COLORS["moving"], edgecolor=edges, lw=0.6)
    _label(axes, plan)
    predicted = f"predicted {plan.predicted_end_ms:.1f} ms"
    axes.axvline(plan.predicted_end_ms, color=COLORS["queued"], ls="--", label=predicted)
    if plan.measured_end_ms is not None:
        measured = f"measured {plan.measured_end_ms:.1f} ms"
        axes.axvline(plan.measured_end_ms, color=COLORS["written"], label=measured)
    axes.set_title(plan.title, loc="left", fontsize=9)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1, 1),
        fontsize=8,
        frameon=False,
        title="end of communication",
        title_fontsize=8,
    )
    axes.set_yticks([0.35, 0.82, 1.2], ["all-reduces", "gradients", "backward"], fontsize=8)
    axes.set_ylim(0, 1.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(axes: Axes, plan: PlanRow) -> None:
    """The size of each bucket, if its bar is wide enough."""
    length = plan.spans_ms[-1][1]
    for (begin, end), size in list(zip(plan.spans_ms, plan.sizes, strict=True))[:_MOST_LABELS]:
        if end - begin > 0.06 * length:
            center = (begin + end) / 2
            axes.text(center, 0.35, size, ha="center", va="center", fontsize=7, color="white")
