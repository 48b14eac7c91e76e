"""Draws bucket plans as bars. Each plan has a row, and each bucket a colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpx.cli import errors
from ddpx.cli.buckets.plan import MIB, Plan


def check(path: Path) -> None:
    """Finds mistakes before the work begins.

    Raises:
        UserMistake: The file cannot be written, matplotlib is not installed, or matplotlib does not
            know the suffix of the file.
    """
    errors.check_file(path)
    errors.check_tool("matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        suffixes = ", ".join(f".{name}" for name in sorted(known))
        raise errors.UserMistake(f"{path} has no suffix of a picture. Pass one of {suffixes}.")


def draw(plans: Sequence[Plan], path: Path, title: str) -> None:
    """Draws the buckets of later steps to scale, in launch order from left to right."""
    import matplotlib
    from matplotlib.figure import Figure  # unlike pyplot, needs no display

    colours = matplotlib.colormaps["Set3"]
    figure = Figure(figsize=(10, 1.5 + 0.6 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", weight="bold")
    for row, plan in enumerate(plans):
        left = 0.0
        total = sum(bucket.num_bytes for bucket in plan.lasting) / MIB
        for index, bucket in enumerate(plan.lasting):
            width = bucket.num_bytes / MIB
            axes.barh(row, width, 0.7, left, color=colours(index % colours.N), edgecolor="white")
            if width > 0.04 * total:  # the label fits
                text = f"{index}\n{width:.3g}"
                axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=8)
            left += width
    axes.set_yticks(range(len(plans)), [plan.caps for plan in plans])
    axes.invert_yaxis()
    axes.set_ylabel("bucket sizes")
    axes.set_xlabel("gradients in MiB, in launch order. In each bucket: its number, and its MiB")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
