"""Records runs with a known cause of waiting, and writes what ddpx advises into docs/advice.md.

make advice-table, or python scripts/advice_table.py --only "slow link", whose other rows come from
runs/advice.json.

Needs root, for a link whose rate is limited (tests/emulated_hosts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from marked_page import write_between_marks
from tabulate import tabulate

from ddpx.testing import RankPool
from ddpx.timeline import Timeline

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "timeline")]

from planted import (  # type: ignore[import-not-found]  # noqa: E402
    CAUSES,
    HEALTHY,
    first_cause,
    recordings,
)

RECORDS = ROOT / "runs" / "advice.json"
NUM_SEEDS = 10
ENOUGH = 0.9  # of the recordings of a cause


def first_causes(cause: str, timelines: list[Timeline]) -> Counter[str]:
    """Counts the causes that the first sentences name. Prints the sentences that name another."""
    found: Counter[str] = Counter()
    for seed, timeline in enumerate(timelines):
        named = first_cause(timeline)
        found[named] += 1
        if named != cause:
            print(f"{cause}, seed {seed}:", *timeline.advice(), sep="\n  ")
            print(timeline.summary())
    print(f"{cause}: {dict(found)}", flush=True)
    return found


def spread(timelines: list[Timeline]) -> str:
    """How much the steps of recordings without a planted cause differ from each other."""
    spreads: list[float] = []
    waits: list[float] = []
    for timeline in timelines:
        summary = timeline.summary()
        waits += timeline.recording.core_waits.values()
        for rank in summary.ranks:
            steps = [s.ranks[rank.rank] for s in timeline.steps if rank.rank in s.ranks]
            lengths = [(step.end - step.forwards[0].begin) / 1e6 for step in steps]
            spreads.append(median(abs(ms - rank.step_ms) for ms in lengths) / rank.step_ms)
    text = f"median absolute deviation of a healthy rank's step: {median(spreads):.1%}"
    if waits:
        text += f"; its thread was without a core for {median(waits):.1%} of the time"
    return text


def measure(cause: str, num_seeds: int, pools: Mapping[int, RankPool]) -> dict[str, Any]:
    """Records a cause. Returns a record for the JSON file."""
    timelines = list(recordings(cause, range(num_seeds), pools.__getitem__))
    record: dict[str, Any] = {"seeds": num_seeds, "first": first_causes(cause, timelines)}
    if cause == HEALTHY:
        record["noise"] = spread(timelines)
    return {**record, "load": os.getloadavg()[0]}


def page_text(records: Mapping[str, dict[str, Any]]) -> str:
    others = {named for record in records.values() for named in record["first"]} - set(CAUSES)
    columns = [*CAUSES, *sorted(others)]
    rows = []
    for cause in CAUSES:
        record = records[cause]
        counts = [record["first"].get(named, "") for named in columns]
        rows.append([cause, record["seeds"], *counts, record["load"]])
    headers = ["", "recordings", *columns, "load average"]
    return (
        "Rows: the cause. Columns: the cause that the first sentence names, and the load average "
        "after the recordings of the row.\n\n"
        f"{tabulate(rows, headers, tablefmt='github', floatfmt='.1f')}\n\n"
        f"Noise on {os.cpu_count()} cores: {records[HEALTHY]['noise']}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "advice.md")
    parser.add_argument(
        "--only", choices=CAUSES, action="append", help="may be repeated; other rows stay"
    )
    arguments = parser.parse_args()
    causes = arguments.only or CAUSES
    records = json.loads(RECORDS.read_text()) if arguments.only and RECORDS.exists() else {}
    RECORDS.parent.mkdir(exist_ok=True)
    with RankPool(2) as two, RankPool(4) as four:
        for cause in causes:
            records[cause] = measure(cause, arguments.seeds, {2: two, 4: four})
            RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    missing = [cause for cause in CAUSES if cause not in records]
    if missing:
        print(f"{arguments.page} stays as it is until these are recorded: {', '.join(missing)}")
    else:
        write_between_marks(arguments.page, "advice table", page_text(records))
        print(page_text(records))
    right = [records[cause]["first"].get(cause, 0) >= ENOUGH * arguments.seeds for cause in causes]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
