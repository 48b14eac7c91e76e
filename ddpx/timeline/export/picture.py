"""Draws one step of all ranks: computation, and the state of every bucket over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from ddpx.timeline.analyze.extent import (
    all_launched,
    filling,
    find_step,
    not_begun,
    step_extent,
    straggler,
)
from ddpx.timeline.analyze.figures import common, step_figures
from ddpx.timeline.model import Interval, Recording, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MS = 1e6
_KIB, _MIB = 1 << 10, 1 << 20

# The palette of Okabe and Ito, for people with colour blindness. Two colours are lightened.
_FORWARD, _BACKWARD, _GRADIENT = "#56b4e9", "#0072b2", "#333333"
_FILLING, _QUEUED, _HELD_UP, _MOVING = "#f5cf80", "#e69f00", "#a6dccb", "#009e73"
_WRITING, _EXPOSED, _AXIS = "#cc79a7", "#222222", "#999999"
_NOT_BEGUN = "#d9d9d9"
_HATCH = "/////"
_LEGEND = (
    ("not begun", _NOT_BEGUN),
    ("forward", _FORWARD),
    ("backward", _BACKWARD),
    ("bucket fills", _FILLING),
    ("full, queued", _QUEUED),
    ("launched, other ranks not yet", _HELD_UP),
    ("in flight on all ranks", _MOVING),
    ("written back", _WRITING),
)

# Lengths in inches.
_WIDTH, _LEFT, _RIGHT = 11.0, 1.25, 0.2
_HEADER, _LINE, _FOOTER, _RANK_TITLE = 0.88, 0.17, 0.5, 0.34
_ROW, _BUCKETS_AT_MOST = 0.17, 24.0
_LABEL = 0.125  # the height of a line of a label
_MAX_RANKS = 8


def draw(recording: Recording, path: str | Path, step: int | None) -> None:
    """Writes a picture of a step.

    Args:
        recording: The recording.
        path: The picture. The suffix selects the format (.png, .svg, .pdf).
        step: The number of the step. None: the step of median duration.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: No complete step was recorded.
        ValueError: The recording has no such step.
    """
    make_figure(recording, step).savefig(path, dpi=150)


def make_figure(recording: Recording, step: int | None) -> Figure:
    """Returns the figure that :func:`draw` writes. Raises the same errors."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, needs no display
    except ImportError as cause:
        raise _tool_missing("plot()", "matplotlib") from cause
    chosen = find_step(recording, step)
    ranks = shown_ranks(chosen)
    num_buckets = [_num_buckets(chosen, rank) for rank in ranks]
    row = min(_ROW, _BUCKETS_AT_MOST / max(sum(num_buckets), 1))
    heights = [2 * _ROW + count * row for count in num_buckets]
    subtitle = _subtitle(chosen, ranks)
    header = _HEADER + _LINE * len(subtitle)
    total = header + _FOOTER + sum(heights) + _RANK_TITLE * len(ranks)
    figure = Figure(figsize=(_WIDTH, total))
    _write_header(figure, recording, chosen, subtitle, total)
    top = total - header
    for rank, height in zip(ranks, heights, strict=True):
        top -= _RANK_TITLE + height
        axes = figure.add_axes(
            (_LEFT / _WIDTH, top / total, 1 - (_LEFT + _RIGHT) / _WIDTH, height / total)
        )
        _draw_rank(axes, recording, chosen, rank, row, is_last=rank == ranks[-1])
    return figure


def shown_ranks(step: Step) -> list[int]:
    """All ranks if they fit. Otherwise the first four ranks, the straggler and the last ranks."""
    ranks = sorted(step.ranks)
    if len(ranks) <= _MAX_RANKS:
        return ranks
    chosen = set(ranks[:4])
    if (slowest := straggler(step)) is not None:
        chosen.add(slowest)
    for rank in reversed(ranks):
        if len(chosen) < _MAX_RANKS:
            chosen.add(rank)
    return sorted(chosen)


def _num_buckets(step: Step, rank: int) -> int:
    """The number of rows for buckets. 0 if no bucket was communicated, as with a single rank."""
    buckets = step.ranks[rank].buckets
    return 0 if all(bucket is None for bucket in buckets) else len(buckets)


def _write_header(
    figure: Figure, recording: Recording, step: Step, subtitle: Sequence[str], total: float
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    left = 0.15 / _WIDTH
    noun = "rank" if recording.world_size == 1 else "ranks"
    title = (
        f"Step {step.number}: {step_extent(step).ns / _MS:.1f} ms on {recording.world_size} "
        f"{noun} over {recording.backend}, on {recording.device}"
    )
    figure.text(left, 1 - 0.13 / total, title, fontsize=13, weight="bold", va="top")
    for number, line in enumerate(subtitle):
        figure.text(left, 1 - (0.4 + _LINE * number) / total, line, fontsize=9, va="top")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=color, label=label) for label, color in _LEGEND
    ]
    handles.insert(3, Line2D([], [], color=_GRADIENT, marker="|", ls="", label="gradient arrives"))
    handles.append(
        Patch(facecolor="none", edgecolor=_EXPOSED, hatch=_HATCH, label="exposed wait", lw=0.6)
    )
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left - 0.04 / _WIDTH, 1 - (0.4 + _LINE * len(subtitle)) / total),
        borderaxespad=0.3,
        borderpad=0,
        ncols=5,
        fontsize=8,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _subtitle(step: Step, ranks: Sequence[int]) -> list[str]:
    """The lines of the subtitle."""
    figures = {rank: step_figures(rank_step) for rank, rank_step in step.ranks.items()}
    most = max(figures, key=lambda rank: figures[rank].exposed)
    if figures[most].communication == 0:
        text = "nothing was communicated"
    else:
        text = (
            f"rank {most} waits longest: of {figures[most].communication / _MS:.1f} ms of "
            f"communication, {figures[most].overlapped / _MS:.1f} ms overlapped and "
            f"{figures[most].exposed / _MS:.1f} ms exposed"
        )
    if (slowest := straggler(step)) is not None:
        text += f"; rank {slowest} keeps others waiting longest"
    if len(ranks) == len(step.ranks):
        return [text]
    kept = "the first, the last and that one" if slowest is not None else "the first and the last"
    return [text, f"{len(ranks)} of {len(step.ranks)} ranks are drawn: {kept}"]


def _draw_rank(
    axes: Axes, recording: Recording, step: Step, rank: int, row: float, *, is_last: bool
) -> None:
    rank_step = step.ranks[rank]
    begin = step_extent(step).begin
    num_buckets = _num_buckets(step, rank)
    _style(axes, 2 * _ROW + num_buckets * row, step_extent(step).ns / _MS, is_last)
    _label_rows(axes, step, num_buckets, row)
    draw = _Rows(axes, begin, row)
    draw.bar(None, not_begun(step, rank), _NOT_BEGUN, "not begun")
    for forward in rank_step.forwards:
        draw.bar(None, forward, _FORWARD, "forward")
    for backward in (*rank_step.local_backwards, rank_step.backward):
        draw.bar(None, backward, _BACKWARD, "backward")
    arrivals = [(arrival.at - begin) / _MS for arrival in rank_step.arrivals]
    width = 0.7 if len(arrivals) <= 200 else 0.25
    axes.vlines(arrivals, 1.1 * _ROW, 1.9 * _ROW, color=_GRADIENT, lw=width)
    for index in range(num_buckets):
        _draw_bucket(draw, step, rank, index)
    figures = step_figures(rank_step)
    text = f"compute {figures.compute / _MS:.1f} ms"
    late_ms = not_begun(step, rank).ns / _MS
    if late_ms >= 0.05:  # shown as 0.1
        text = f"not begun {late_ms:.1f} ms, {text}"
    if figures.communication:
        text += (
            f", communication {figures.communication / _MS:.1f} ms: "
            f"{figures.overlapped / _MS:.1f} overlapped, {figures.exposed / _MS:.1f} exposed"
        )
    name = f"rank {rank} ({recording.hosts[rank]})"
    axes.set_title(name, loc="left", fontsize=9, weight="bold", pad=4)
    axes.set_title(text, loc="right", fontsize=8, pad=4)


def _draw_bucket(draw: _Rows, step: Step, rank: int, index: int) -> None:
    bucket = step.ranks[rank].buckets[index]
    fills, moves = filling(step, rank, index), all_launched(step, index)
    if bucket is None or fills is None or moves is None:
        return
    flight = Interval(bucket.launched, bucket.completed)
    # Because of clock errors, the last rank's launch may appear to be after the end.
    moves = min(moves, bucket.completed)
    draw.bar(index, fills, _FILLING)
    draw.bar(index, Interval(bucket.ready, bucket.launched), _QUEUED)
    draw.bar(index, Interval(bucket.launched, moves), _HELD_UP)
    draw.bar(index, Interval(moves, bucket.completed), _MOVING)
    for exposed in common([flight], [bucket.wait]):
        draw.hatch(index, exposed)
    draw.bar(index, Interval(bucket.wait.end, bucket.written_back), _WRITING)


class _Rows:
    """Draws bars in the rows of one rank.

    A row shows a bucket, or the computation (None). The unit of y is inches from the top.
    """

    def __init__(self, axes: Axes, begin: int, row: float) -> None:
        self._axes = axes
        self._begin = begin
        self._row = row

    def _x(self, span: Interval) -> tuple[float, float]:
        return (span.begin - self._begin) / _MS, span.ns / _MS

    def _y(self, bucket: int | None) -> tuple[float, float]:
        if bucket is None:
            return 0.1 * _ROW, 0.8 * _ROW
        return _bucket_top(bucket, self._row) + 0.1 * self._row, 0.8 * self._row

    def bar(self, bucket: int | None, span: Interval, color: str, label: str = "") -> None:
        x, width = self._x(span)
        y, height = self._y(bucket)
        # The write-back takes µs. An edge makes it visible.
        edge = 0.5 if color == _WRITING else 0
        self._axes.broken_barh([(x, width)], (y, height), color=color, lw=edge)
        if label and width > 0.06 * self._axes.get_xlim()[1]:  # the label fits
            self._axes.text(
                x + width / 2,
                y + height / 2,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if color == _BACKWARD else "black",
            )

    def hatch(self, bucket: int, span: Interval) -> None:
        self._axes.broken_barh(
            [self._x(span)],
            self._y(bucket),
            facecolor="none",
            edgecolor=_EXPOSED,
            hatch=_HATCH,
            lw=0.6,
        )


def _bucket_top(bucket: int, row: float) -> float:
    return 2 * _ROW + bucket * row


def _style(axes: Axes, height: float, length_ms: float, is_last: bool) -> None:
    axes.set_xlim(0, length_ms * 1.005)
    axes.set_ylim(height, 0)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)
    axes.tick_params(axis="x", labelsize=8, labelbottom=is_last, color=_AXIS)
    axes.tick_params(axis="y", labelsize=7, length=0)
    if is_last:
        axes.set_xlabel("ms since the first rank began the step", fontsize=8)


def _label_rows(axes: Axes, step: Step, num_buckets: int, row: float) -> None:
    """Labels rows. If rows are lower than a line of text, only some rows have a label."""
    every = ceil(_LABEL / row)
    labels = {0.5 * _ROW: "compute", 1.5 * _ROW: "gradients"}
    for index in range(every - 1, num_buckets, every):
        label = f"bucket {index}, {_size(step.layout[index].num_bytes)}"
        labels[_bucket_top(index, row) + row / 2] = label
    axes.set_yticks(list(labels), list(labels.values()))


def _size(num_bytes: int) -> str:
    if num_bytes == 0:
        return "sparse"
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB else f"{num_bytes / _KIB:.1f} KiB"


# ---- errors --------------------------------------------------------------------------------------


def _tool_missing(what: str, package: str) -> ImportError:
    return ImportError(
        f"{what} needs {package}, which is not installed. Run: pip install {package}"
    )
