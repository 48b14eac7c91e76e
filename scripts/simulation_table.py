"""Simulates large jobs, and writes the table of their failures into docs/reliability.md (2 min).

python scripts/simulation_table.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from marked_page import write_between_marks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cmake_build import build  # type: ignore[import-not-found]  # noqa: E402


def main() -> None:
    source = ROOT / "tests" / "torch_free"
    program = build(source, "bench", "health_simulation", "DDPX_BENCHMARKS=ON")
    done = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    write_between_marks(ROOT / "docs" / "reliability.md", "simulation", done.stdout.rstrip())


if __name__ == "__main__":
    main()
