"""Writes the results of benchmarks/gpu_timeline.py into docs/timeline.md, between marks.

python scripts/gpu_timeline_report.py figures.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked_page import write_between_marks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "timeline.md"
MARK = "gpu timeline"
_NOT = ("error", "seconds")  # keys of a part that are no results


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _profiler(part: dict[str, Any]) -> str:
    rows = [
        [
            rank,
            f"{sum(row['agrees'] for row in found['buckets'])} of {len(found['buckets'])}",
            f"{found['median_begin_us']:.0f} µs, {found['median_end_us']:.0f} µs",
            f"{found['median_kernel_ms']:.1f} ms",
            f"{sum(row['agrees'] for row in found['exposed'])} of {len(found['exposed'])}",
            f"{found['median_recorded_exposed_ms']:.1f} ms, "
            f"{found['median_profiled_exposed_ms']:.1f} ms",
            f"{found['clock_error_us']:.0f} µs",
        ]
        for rank, found in enumerate(part["ranks"])
    ]
    headers = ["rank", "reductions that agree", "difference of start, of end", "kernel"]
    headers += ["steps whose exposed time agrees", "recorded, profiled", "error of the clocks"]
    return f"{part['model']}, {part['steps']} steps. Medians.\n\n{_table(headers, rows)}"


def _advice(part: dict[str, Any]) -> str:
    rows = []
    for cause, found in part.items():
        if cause not in _NOT:
            right = sum(each["first"] == cause for each in found)
            others = {each["first"] for each in found} - {cause}
            rows.append([cause, f"{right} of {len(found)}", ", ".join(sorted(others)) or "-"])
    return _table(["cause", "named first", "named first instead"], rows)


def _cost(part: dict[str, Any]) -> str:
    rows = [
        [
            model,
            f"{found['ms']['not recorded']:.2f} ms",
            found["events"],
            f"{found['recorded_to_not']:.4f}",
            f"{found['again_to_not']:.4f}",
            found["rounds"],
        ]
        for model, found in part.items()
        if model not in _NOT
    ]
    headers = ["model", "step", "events of a step", "recorded / not", "A/A", "rounds"]
    return _table(headers, rows)


_PARTS = {"profiler": _profiler, "advice": _advice, "cost": _cost}


def text_of(figures: dict[str, Any]) -> str:
    """The text between the marks. Parts that failed or did not run are named."""
    texts = [f"Measured on {figures['device']}, over {figures['backend']}."]
    for name, section in _PARTS.items():
        part = figures.get(name, {"error": "not run, since no time was left"})
        results = [key for key in part if key not in _NOT]
        if results:
            texts.append(section(part))
        if "error" in part or not results:
            error = part.get("error", "no results").splitlines()[0]
            texts.append(f"Part `{name}`: {error}.")
    return "\n\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    write_between_marks(arguments.page, MARK, text_of(json.loads(arguments.json.read_text())))


if __name__ == "__main__":
    main()
