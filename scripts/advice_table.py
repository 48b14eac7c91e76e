"""Records runs with a known cause of waiting, and writes what ddpx advises into docs/advice.md.

make advice-table

Needs root, for a link whose rate is limited (tests/emulated_hosts.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import median

from marked_page import write_between_marks
from tabulate import tabulate

from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.advice import diagnose

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "timeline")]

from planted import CAUSES, HEALTHY, recordings  # type: ignore[import-not-found]  # noqa: E402

NUM_SEEDS = 10
ENOUGH = 0.9  # of the recordings of a cause


def first_causes(cause: str, timelines: list[Timeline]) -> Counter[str]:
    """Counts the causes that the first sentences name. Prints the sentences that name another."""
    found: Counter[str] = Counter()
    for seed, timeline in enumerate(timelines):
        findings = diagnose(timeline.recording)
        named = findings[0].cause if findings else HEALTHY
        found[named] += 1
        if named != cause:
            print(f"{cause}, seed {seed}:", *(f.sentence for f in findings), sep="\n  ")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "advice.md")
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = {}
    noise = ""
    with RankPool(2) as two, RankPool(4) as four:
        pools = {2: two, 4: four}
        for cause in CAUSES:
            timelines = list(recordings(cause, range(arguments.seeds), pools.__getitem__))
            found[cause] = first_causes(cause, timelines)
            if cause == HEALTHY:
                noise = spread(timelines)
    others = sorted({named for counts in found.values() for named in counts} - set(CAUSES))
    columns = [*CAUSES, *others]
    rows = [[cause, *(found[cause][named] or "" for named in columns)] for cause in CAUSES]
    text = (
        f"{arguments.seeds} recordings of each cause. Rows: the cause. Columns: the cause that the "
        f"first sentence names.\n\n{tabulate(rows, ['', *columns], tablefmt='github')}\n\n"
        f"Noise of this run, on {os.cpu_count()} cores: {noise}. Load average at its end: "
        f"{os.getloadavg()[1]:.1f}."
    )
    write_between_marks(arguments.page, "advice table", text)
    print(text)
    right = all(found[cause][cause] >= ENOUGH * arguments.seeds for cause in CAUSES)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
