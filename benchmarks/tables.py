"""Markdown from figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goals import Goal
from pooling import Figure
from tabulate import tabulate

_BEGIN, _END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. The caller formats numbers."""
    text = [[str(cell) for cell in row] for row in rows]
    align = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(text, headers, tablefmt="github", colalign=align, disable_numparse=True)


def with_range(figure: Figure, digits: int = 2) -> str:
    """The median, with the lowest and highest median of a single launch."""
    median, low, high = (f"{figure[key]:.{digits}f}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} - {high})"


def with_interval(bounds: tuple[float, float]) -> str:
    """The bounds of an interval."""
    return f"{bounds[0]:.2f} - {bounds[1]:.2f}"


def short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(num_bytes: int) -> str:
    kib = num_bytes // 1024
    return f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB"


def num_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def goal_table(goals: Sequence[Goal], others: Mapping[str, Sequence[Goal]]) -> str:
    """The table of goals, and a line for each missed goal whose reason is known.

    Args:
        goals: The goals, measured with the pinned torch.
        others: By version of torch, the goals of a run with that torch, for further columns.
    """
    runs = [goals, *others.values()]
    found = [{goal.what: goal for goal in run} for run in runs]
    rows = []
    for what in dict.fromkeys(goal.what for run in runs for goal in run):
        of_runs = [run.get(what) for run in found]
        cells = [cell for goal in of_runs for cell in _cells(goal)]
        rows.append([what, next(goal.demand for goal in of_runs if goal), *cells])
    headers = ["measured", "verdict"]
    headers += [
        f"{word}, torch {version}" for version in others for word in ("measured", "verdict")
    ]
    text = table(["figure", "goal", *headers], rows)
    reasons: dict[str, list[str]] = {}
    for goal in goals:
        if goal.why and not goal.met:
            reasons.setdefault(goal.why, []).append(goal.what)
    lines = [f"- {'; '.join(whats)}: {why}" for why, whats in reasons.items()]
    return text + (
        "\n\nGoals that were missed, and the reasons:\n\n" + "\n".join(lines) if lines else ""
    )


def _cells(goal: Goal | None) -> list[str]:
    return [goal.found, goal.verdict] if goal else ["", ""]


def wrapped(page: str) -> str:
    """The page with its paragraphs and list items in lines of up to 104 characters."""
    blocks = []
    for block in page.split("\n\n"):
        lines = block.split("\n")
        if not block.startswith(("#", "|", "!", "<")):
            lines = [
                part
                for line in lines
                for part in textwrap.wrap(
                    line,
                    width=104,
                    subsequent_indent="  " if line.startswith("- ") else "",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def splice(path: Path, text: str) -> None:
    """Replaces the text between the marks of a file, if the file has the marks."""
    before, begin, rest = path.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


Results = dict[str, Any]  # what a part measured: the content of its JSON file
