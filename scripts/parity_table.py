"""Runs the parity matrix and writes its table into docs/parity.md.

make parity-table
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from marked_page import write_between_marks
from tabulate import tabulate

from ddpx.testing import RankPool
from ddpx.testing.compare import Comparison, summarize

ROOT = Path(__file__).parent.parent
WORLD_SIZES = (2, 3, 4)


def _run(transport: str, case_name: str, mode: str, pool: RankPool) -> Comparison:
    """One case in one mode with all bucket caps, on all ranks, as one comparison."""
    # From tests/parity, which main adds to the path.
    from parity_cases import compare_case  # type: ignore[import-not-found]

    per_rank = pool.run(compare_case, case_name, mode, transport=transport)
    merged = [summarize(list(comparisons.values())) for comparisons in per_rank]
    return summarize(merged)


def _cell(outcomes: dict[str, Comparison]) -> str:
    different = [setup for setup, comparison in outcomes.items() if not comparison.identical]
    if different:
        return "differs at " + ", ".join(different)
    return "identical"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "parity.md")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    from parity_cases import CAPS, CASES, MODES, TRANSPORTS

    outcomes: dict[tuple[str, str], dict[str, Comparison]] = {}
    for world_size in WORLD_SIZES:
        with RankPool(world_size) as pool:
            for transport, case in itertools.product(TRANSPORTS, CASES):
                setup = f"{world_size} ranks over {transport}"
                for mode in case.modes:
                    outcome = _run(transport, case.name, mode, pool)
                    outcomes.setdefault((case.name, mode), {})[setup] = outcome
                print(f"{setup}: {case.name}", flush=True)

    rows = [
        [case.name]
        + [_cell(outcomes[case.name, m]) if (case.name, m) in outcomes else "-" for m in MODES]
        for case in CASES
    ]
    num_tensors = sum(c.num_tensors for by_size in outcomes.values() for c in by_size.values())
    num_different = sum(
        len(c.differences) for by_size in outcomes.values() for c in by_size.values()
    )
    text = (
        f"torch {torch.__version__}, at {', '.join(map(str, WORLD_SIZES))} ranks, DDP over gloo, "
        f"ReducerDDP over {', '.join(TRANSPORTS)}, each cell with {len(CAPS)} kinds of bucket "
        f"caps: {num_tensors:,} gradients, parameters and buffers compared, {num_different} "
        "differ.\n\n" + tabulate(rows, ["training", *MODES], tablefmt="github")
    )
    write_between_marks(arguments.page, "parity table", text)
    print(text)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
