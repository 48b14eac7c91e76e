"""The plots of docs/benchmarks.md.

Only this module imports matplotlib, so that ranks need not load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import step_time
from pooling import lowest, ratio
from tables import Results, num_ranks

_DPI = 90


# Label, contender or the prefix of contenders of which the best counts, and color.
_BARS = (
    ("DDP over gloo, default", "DDP, default", "#fdd0a2"),
    ("best DDP over gloo", "DDP, ", "#fd8d3c"),
    ("ddpx over gloo", f"{step_time.OVER_GLOO}, views", "#9ecae1"),
    ("best DDP over shm", "DDP over shm, ", "#d94801"),
    ("ddpx over shm", f"{step_time.OVER_SHM}, views", "#2171b5"),
)


def _save(figure: Any, path: Path, bottom: float = 0) -> None:
    """``bottom``: the part of the height that stays free for a legend."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    plt.close(figure)


def _step_time(results: Results, path: Path) -> None:
    """Ratios to bare: one panel per model, one group of bars per number of ranks.

    The hue tells the wrapper. Within a group the transports stand side by side.
    """
    cells = results["cells"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    figure, panels = plt.subplots(1, len(models), figsize=(10, 3.6), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        groups = [cell for cell in cells if cell["model"] == model]
        for place, (label, contender, color) in enumerate(_BARS):
            ratios = [
                ratio(cell["launches"], lowest(cell["launches"], contender), "bare")
                for cell in groups
            ]
            heights = [r["median"] for r in ratios]
            spread = [
                [max(r["median"] - r["low"], 0) for r in ratios],
                [max(r["high"] - r["median"], 0) for r in ratios],
            ]
            at = [group + 0.16 * (place - 2) for group in range(len(groups))]
            style = {"label": label, "color": color, "error_kw": {"lw": 0.8}}
            panel.bar(at, heights, 0.15, yerr=spread, **style)
        panel.set_title(model, fontsize=9)
        panel.set_xticks(range(len(groups)), [num_ranks(c["ranks"]) for c in groups])
        panel.axhline(1, color="gray", lw=0.8)
    panels[0][0].set_ylabel("step / bare step")
    bars, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(bars, labels, fontsize=8, loc="lower center", ncols=5)
    _save(figure, path, bottom=0.09)


def _all_reduce(results: Results, path: Path) -> None:
    """Time by size: one panel per number of ranks."""
    cells = results["cells"]
    counts = sorted({cell["ranks"] for cell in cells})
    figure, panels = plt.subplots(1, len(counts), figsize=(10, 3.6), squeeze=False)
    for panel, ranks in zip(panels[0], counts, strict=True):
        group = [cell for cell in cells if cell["ranks"] == ranks]
        sizes = [cell["bytes"] / 1024 for cell in group]
        for name in group[0]["ms"]:
            style = "--" if name.startswith("copy") or name.endswith("again") else "o-"
            medians = [cell["ms"][name]["median"] for cell in group]
            panel.loglog(sizes, medians, style, ms=3, lw=1.2, label=name)
        panel.set_title(num_ranks(ranks), fontsize=9)
        panel.set_xlabel("KiB a rank")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms")
    panels[0][0].legend(fontsize=7)
    _save(figure, path)


def _growth(results: Results, path: Path) -> None:
    """Cost per parameter by the number of parameters; step and all-reduce by the number of
    ranks."""
    figure, (of_params, of_ranks) = plt.subplots(1, 2, figsize=(10, 3.6))
    cells = results["by_params"]
    for name in [name for name in cells[0]["ns"] if not name.startswith("bare")]:
        found = [c for c in cells if name in c["ns"]]
        values = [c["ns"][name]["median"] for c in found]
        of_params.plot([c["num_params"] for c in found], values, "o-", ms=3, label=name)
    of_params.set(xscale="log", yscale="log", xlabel="parameters")
    of_params.set_ylabel("ns a parameter beyond bare")
    cells = results["by_ranks"]
    for name in cells[0]["ms"]:
        values = [cell["ms"][name]["median"] for cell in cells]
        style = "o--" if name.startswith("all-reduce") else "o-"
        of_ranks.plot([cell["ranks"] for cell in cells], values, style, ms=3, label=name)
    of_ranks.set(yscale="log", xlabel="ranks", ylabel="ms")
    of_ranks.set_xscale("log", base=2)
    for panel in (of_params, of_ranks):
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    _save(figure, path)


_PLOTS = {"step_time": _step_time, "all_reduce": _all_reduce, "growth": _growth}


def draw(name: str, results: Results, folder: Path) -> None:
    """The plot of a part, or None."""
    if name in _PLOTS:
        _PLOTS[name](results, folder / f"{name}.png")
