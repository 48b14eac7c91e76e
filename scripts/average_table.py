"""Compares averages with one process over all items, and writes the table of docs/averages.md.

make average-table
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from marked_page import write_between_marks
from tabulate import tabulate

from ddpx.testing import RankPool

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from averages import (  # type: ignore[import-not-found]  # noqa: E402
    TOLERANCE,
    outcome_of,
    worst_error,
)
from modes import MODES_OF_DDPX  # type: ignore[import-not-found]  # noqa: E402

WORLD_SIZES = (1, 2, 3)
AVERAGES = ("mean", "sum", "weights")
TRANSPORTS = ("group", "auto")
MODES: dict[str, dict[str, Any]] = {
    **MODES_OF_DDPX,
    "view, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "view, find unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "lazy": {"lazy_bucket_allocation": True},
}
BAD_WEIGHTS = {"weight 0": 0.0, "weight -1": -1.0, "no weight": None}
EXPECTED = ("backward raises, gradients are NaN", "set_weight() raises", "forward raises")


def errors_of(mode: str, average: str, pools: dict[int, RankPool]) -> float:
    """The largest relative error of all ranks, numbers of ranks, transports and micro-steps."""
    found = [
        error
        for pool in pools.values()
        for transport in TRANSPORTS
        for num_micro_steps in (1, 3)
        for error in pool.run(
            worst_error, num_micro_steps, average, transport=transport, **MODES[mode]
        )
    ]
    return max(found)


def outcome_on_all(weight: float | None, mode: str, pools: dict[int, RankPool]) -> str:
    """What the weight does. The outcomes of different ranks are joined."""
    per_pool = [pool.run(outcome_of, weight, **MODES[mode]) for pool in pools.values()]
    return "; ".join(sorted({outcome for per_rank in per_pool for outcome in per_rank}))


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "averages.md")
    arguments = parser.parse_args()
    pools = {size: RankPool(size) for size in WORLD_SIZES}
    rows, right = [], True
    try:
        for mode in MODES:
            errors = [errors_of(mode, average, pools) for average in AVERAGES]
            outcomes = [outcome_on_all(weight, mode, pools) for weight in BAD_WEIGHTS.values()]
            right = right and max(errors) <= TOLERANCE and tuple(outcomes) == EXPECTED
            rows.append([mode, *(f"{error:.0e}" for error in errors), *outcomes])
            print(*rows[-1], sep=", ", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    headers = ["", *(f'"{average}"' for average in AVERAGES), *BAD_WEIGHTS]
    text = (
        f"torch {torch.__version__}, {', '.join(map(str, WORLD_SIZES))} ranks over gloo and shared "
        "memory, 1 and 3 micro-steps, several buckets. Cells: the largest error of an element, "
        "relative to the largest element of the gradient. Last columns: what happens on each rank "
        "if the weights of all ranks are wrong.\n\n" + tabulate(rows, headers, tablefmt="github")
    )
    write_between_marks(arguments.page, "average table", text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
