"""Draws two bucket plans over the time of a backward: the default plan and the chosen plan.

If the default plan was kept, the fastest other plan stands beside it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ddpx.errors import count
from ddpx.planning import MeasuredPlan, PlanReport, ReduceCost
from ddpx.planning.candidates import predicted_spans_s
from ddpx.timeline.export.rows import COLORS
from ddpx.timeline.texts import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MS = 1e3
_WIDTH, _HEIGHT = 11.0, 2.2  # inches, of one plan
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
    if Path(path).suffix != ".html":
        figure.savefig(path, dpi=150)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    _, begin, drawing = picture.getvalue().partition("<svg")
    page = f'<!doctype html>\n<meta charset="utf-8">\n<title>{escape(_title(report))}</title>\n'
    Path(path).write_text(f"{page}{begin}{drawing}", encoding="utf-8")


def make_figure(report: PlanReport) -> Figure:
    """Returns the figure that :func:`draw` writes."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, needs no display
    except ImportError as cause:
        raise ImportError(
            "the picture needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from cause
    plans = _shown(report)
    figure = Figure(figsize=(_WIDTH, 1.0 + _HEIGHT * max(len(plans), 1)), layout="constrained")
    figure.suptitle(_title(report), fontsize=11, weight="bold", x=0.01, ha="left")
    rows = figure.subplots(max(len(plans), 1), 1, sharex=True, squeeze=False)
    for number, plan in enumerate(plans):
        _draw_plan(rows[number][0], report, plan)
    rows[-1][0].set_xlabel("ms since the begin of the backward")
    return figure


def _shown(report: PlanReport) -> list[MeasuredPlan]:
    if not report.plans:
        return []
    default, *others = report.plans
    chosen = [plan for plan in others if plan.name == report.chosen]
    measured = [(plan.step_s, number) for number, plan in enumerate(others) if plan.step_s]
    fastest = [others[min(measured)[1]]] if measured else others[:1]
    return [default, *(chosen or fastest)]


def _title(report: PlanReport) -> str:
    return f"{str(report)[0].upper()}{str(report)[1:]}"


def _draw_plan(axes: Axes, report: PlanReport, plan: MeasuredPlan) -> None:
    """A row of gradients, and a row of all-reduces as the model predicts them."""
    ready = [gradient.ready_s * _MS for gradient in report.gradients]
    spans = predicted_spans_s(report.gradients, plan.buckets, ReduceCost(report.costs))
    axes.broken_barh([(0, max(ready))], (1.05, 0.3), color=COLORS["backward"])
    axes.vlines(ready, 0.65, 1.0, color=COLORS["gradient"], lw=0.7)
    bars = [(begin * _MS, (end - begin) * _MS) for begin, end in spans]
    axes.broken_barh(bars, (0.1, 0.5), color=COLORS["moving"], edgecolor="white", lw=0.6)
    _label(axes, report, plan, bars)
    predicted_ms = plan.predicted_end_s * _MS
    axes.axvline(
        predicted_ms, color=COLORS["queued"], ls="--", label=f"predicted {predicted_ms:.1f} ms"
    )
    if plan.measured_end_s is not None:
        measured_ms = plan.measured_end_s * _MS
        axes.axvline(measured_ms, color=COLORS["written"], label=f"measured {measured_ms:.1f} ms")
    step = "" if plan.step_s is None else f", step {plan.step_s * _MS:.1f} ms"
    axes.set_title(
        f"{plan.name}: {count(len(plan.buckets), 'bucket')}{step}", loc="left", fontsize=9
    )
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


def _label(
    axes: Axes, report: PlanReport, plan: MeasuredPlan, bars: Sequence[tuple[float, float]]
) -> None:
    """The size of each bucket, if its bar is wide enough."""
    length = max(begin + width for begin, width in bars)
    for bucket, (begin, width) in list(zip(plan.buckets, bars, strict=True))[:_MOST_LABELS]:
        if width > 0.06 * length:
            num_bytes = sum(report.gradients[index].num_bytes for index in bucket)
            axes.text(
                begin + width / 2,
                0.35,
                size_text(num_bytes),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
