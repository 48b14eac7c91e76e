"""Simulates large jobs, and writes the table of their failures into docs/reliability.md (2 min).

    python scripts/simulation_table.py

Exits with 1 if a figure misses its goal.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from marked_page import write_between_marks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cmake_build import build  # type: ignore[import-not-found]  # noqa: E402

GOALS_S = {"start, s": 10.0, "death, s": 5.0, "host lost, s": 20.0, "eight hosts lost, s": 20.0}


def missed(text: str) -> list[str]:
    """The figures in the output of the simulation that miss their goals."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    found = []
    for cells in rows:
        row = dict(zip(head, cells, strict=True))
        for name, goal_s in GOALS_S.items():
            # "-": does not apply to so few hosts. "none": no host reported.
            if row[name] != "-" and (row[name] == "none" or float(row[name]) > goal_s):
                found.append(f"{row['ranks']} ranks: {name}: {row[name]}")
        if row["false reports"] != "none":
            found.append(f"{row['ranks']} ranks: false reports")
    if not text.rstrip().endswith(": no report."):
        found.append("a report in 100 hours")
    return found


def main() -> int:
    source = ROOT / "tests" / "torch_free"
    program = build(source, "bench", "health_simulation", "DDPX_BENCHMARKS=ON")
    done = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    write_between_marks(ROOT / "docs" / "reliability.md", "simulation", done.stdout.rstrip())
    figures = missed(done.stdout)
    for figure in figures:
        print(f"misses its goal: {figure}")
    return int(bool(figures))


if __name__ == "__main__":
    sys.exit(main())
