"""Draws one step of all ranks: computation, and the state of every bucket over time.

With many ranks and buckets, the straggler and its victim are drawn in full. Each other rank has two
rows. Buckets without long waits share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from ddpx.errors import count
from ddpx.timeline.analyze import focus
from ddpx.timeline.analyze.extent import find_step, not_begun, step_extent
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.analyze.turns import in_turn
from ddpx.timeline.export.picture_rows import Rows
from ddpx.timeline.export.rows import MAX_FOLDED, label
from ddpx.timeline.model import Recording, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MS = 1e6
_AXIS = "#999999"
_LEGEND_COLUMNS = 5

# Lengths in inches.
_WIDTH, _LEFT, _RIGHT = 11.0, 1.25, 0.2
_HEADER, _LINE, _FOOTER, _TITLE = 0.54, 0.17, 0.5, 0.34
_ROW, _FOLDED_ROW, _BUCKETS_AT_MOST = 0.17, 0.14, 24.0
_LABEL = 0.125  # the height of a line of a label
_SUBTITLE_COLUMNS = 150  # characters


@dataclass(frozen=True)
class _Row:
    """A row of a block.

    Attributes:
        rank: The rank.
        content: "compute", "gradients", or the indices of buckets.
        height: The height in inches.
        label: The label on the left. Empty for no label.
    """

    rank: int
    content: str | tuple[int, ...]
    height: float
    label: str


@dataclass(frozen=True)
class _Block:
    """Rows with a title on the left and a text on the right."""

    title: str
    text: str
    rows: tuple[_Row, ...]

    @property
    def height(self) -> float:
        return sum(row.height for row in self.rows)


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
        raise ImportError(
            "the picture needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from cause
    chosen = find_step(recording, step)
    blocks = _blocks(recording, chosen)
    subtitle = _subtitle(recording, chosen, step)
    length_ms = step_extent(chosen).ns / _MS * 1.005
    plot_width = _WIDTH - _LEFT - _RIGHT
    rows = Rows(step_extent(chosen).begin, length_ms, plot_width)
    # A legend of at most two lines. Its entries are known after the bars are drawn.
    header = _HEADER + _LINE * (len(subtitle) + 2)
    total = header + _FOOTER + sum(_TITLE + block.height for block in blocks)
    figure = Figure(figsize=(_WIDTH, total))
    top = total - header
    for block in blocks:
        top -= _TITLE + block.height
        place = (_LEFT / _WIDTH, top / total, plot_width / _WIDTH, block.height / total)
        axes = figure.add_axes(place)
        _style(axes, block, length_ms, is_last=block is blocks[-1])
        _draw_block(axes, rows, in_turn(recording, chosen), block)
    _write_header(figure, recording, chosen, subtitle, rows, total)
    return figure


# ---- blocks --------------------------------------------------------------------------------------


def _blocks(recording: Recording, step: Step) -> list[_Block]:
    detailed = focus.detailed_ranks(step)
    groups = focus.bucket_rows(step, detailed)
    height = min(_ROW, _BUCKETS_AT_MOST / max(len(detailed) * len(groups), 1))
    blocks = [_full_block(recording, step, rank, groups, height) for rank in detailed]
    others = [rank for rank in sorted(step.ranks) if rank not in detailed]
    if others:
        blocks.append(_folded_block(step, others))
    return blocks


def _full_block(
    recording: Recording, step: Step, rank: int, groups: Sequence[tuple[int, ...]], height: float
) -> _Block:
    rows = [_Row(rank, "compute", _ROW, "compute"), _Row(rank, "gradients", _ROW, "gradients")]
    if any(bucket is not None for bucket in step.ranks[rank].buckets):
        every = ceil(_LABEL / height)  # lower rows than a line of text: only some have a label
        rows += [
            _Row(rank, group, height, "" if (number + 1) % every else label(step, group))
            for number, group in enumerate(groups)
        ]
    figures = step_figures(step.ranks[rank])
    text = f"compute {figures.compute / _MS:.1f} ms"
    late_ms = not_begun(step, rank).ns / _MS
    if late_ms >= 0.05:  # shown as 0.1
        text = f"not begun {late_ms:.1f} ms, {text}"
    if figures.communication:
        text += (
            f", communication {figures.communication / _MS:.1f} ms: "
            f"{figures.overlapped / _MS:.1f} overlapped, {figures.exposed / _MS:.1f} exposed"
        )
    return _Block(f"rank {rank} ({recording.hosts[rank]})", text, tuple(rows))


def _folded_block(step: Step, ranks: Sequence[int]) -> _Block:
    """The ranks with the most exposed communication, with all buckets in one row."""
    shown = sorted(focus.by_exposed(step, ranks)[:MAX_FOLDED])
    rows = []
    for rank in shown:
        rows.append(_Row(rank, "compute", _FOLDED_ROW, f"rank {rank}"))
        rows.append(_Row(rank, tuple(range(len(step.layout))), _FOLDED_ROW, ""))
    title = count(len(ranks), "other rank")
    if len(shown) < len(ranks):
        title = f"{len(shown)} of {title}, those with the longest exposed waits"
    return _Block(title, "of each rank: computation, and all buckets in one row", tuple(rows))


def _draw_block(axes: Axes, rows: Rows, step: Step, block: _Block) -> None:
    top = 0.0
    ticks: dict[float, str] = {}
    for row in block.rows:
        y = (top, row.height)
        if row.label:
            ticks[top + row.height / 2] = row.label
        if row.content == "compute":
            rows.compute(axes, step, row.rank, y)
        elif row.content == "gradients":
            rows.gradients(axes, step, row.rank, y)
        else:
            assert not isinstance(row.content, str)
            rows.buckets(axes, step, row.rank, y, row.content)
        top += row.height
    axes.set_yticks(list(ticks), list(ticks.values()))


def _style(axes: Axes, block: _Block, length_ms: float, *, is_last: bool) -> None:
    axes.set_xlim(0, length_ms)
    axes.set_ylim(block.height, 0)
    axes.set_title(block.title, loc="left", fontsize=9, weight="bold", pad=4)
    axes.set_title(block.text, loc="right", fontsize=8, pad=4)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)
    axes.tick_params(axis="x", labelsize=8, labelbottom=is_last, color=_AXIS)
    axes.tick_params(axis="y", labelsize=7, length=0)
    if is_last:
        axes.set_xlabel("ms since the first rank began the step", fontsize=8)


# ---- header --------------------------------------------------------------------------------------


def _write_header(
    figure: Figure,
    recording: Recording,
    step: Step,
    subtitle: Sequence[str],
    rows: Rows,
    total: float,
) -> None:
    left = 0.15 / _WIDTH
    title = (
        f"Step {step.number}: {step_extent(step).ns / _MS:.1f} ms on "
        f"{count(recording.world_size, 'rank')} over {recording.backend}, on {recording.device}"
    )
    figure.text(left, 1 - 0.13 / total, title, fontsize=13, weight="bold", va="top")
    for number, line in enumerate(subtitle):
        figure.text(left, 1 - (0.4 + _LINE * number) / total, line, fontsize=9, va="top")
    figure.legend(
        handles=rows.legend(),
        loc="upper left",
        bbox_to_anchor=(left - 0.04 / _WIDTH, 1 - (0.4 + _LINE * len(subtitle)) / total),
        borderaxespad=0.3,
        borderpad=0,
        ncols=_LEGEND_COLUMNS,
        fontsize=8,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _subtitle(recording: Recording, step: Step, number: int | None) -> list[str]:
    """The lines of the subtitle."""
    sentences = [f"{focus.why_text(recording, step, number)} {focus.wait_text(recording, step)}"]
    sentences.append(focus.folded_text(step))
    return [line for sentence in sentences for line in wrap(sentence, _SUBTITLE_COLUMNS)]
