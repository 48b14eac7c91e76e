"""Compares recordings of one script with each other, and writes the verdicts into docs/timeline.md.

    python scripts/identical_pairs.py

A verdict other than "no difference seen" on such a pair is false. Other recordings, of a script
with a larger batch, show that large differences are found. Recordings are kept in runs/pairs, and
are not made again. Takes about 15 minutes. Exits with 1 if more than one pair in twenty has a false
verdict.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from marked_page import write_between_marks
from tabulate import tabulate

from ddpx.cli.timeline.compare import comparison_text
from ddpx.cli.timeline.launches import Launch, load
from ddpx.cli.timeline.verdict import compare_steps

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "cli" / "scripts" / "steady.py"
LAUNCHES = 3
MORE_ROWS = 960  # a batch of 1024 rows in place of 64
_VERDICTS = re.compile(r"No difference seen|are slower|are faster")


def record(folder: Path, *arguments: object) -> list[Launch]:
    if not (folder / "summary.txt").exists():
        command = [sys.executable, "-m", "ddpx", "timeline", "--launches", str(LAUNCHES)]
        command += ["--out", str(folder), str(SCRIPT), "--", *map(str, arguments)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load(folder, 0)


def verdict(new: Sequence[Launch], base: Sequence[Launch]) -> str:
    """The verdict and the main part of the difference, in words."""
    found = compare_steps([one.steps_ms for one in new], [one.steps_ms for one in base])
    after, before = ([one.summary for one in side] for side in (new, base))
    text = comparison_text(after, before, found, "after", "before")
    words = _VERDICTS.search(text)
    part = re.search(r"Most of the difference is ([a-z ]+)", text)
    return f"{words[0] if words else text}{f', {part[1]}' if part else ''}"


def row(name: str, verdicts: Sequence[str]) -> list[object]:
    slower = [words for words in verdicts if "slower" in words]
    return [
        name,
        len(verdicts),
        sum("No difference" in words for words in verdicts),
        len(slower),
        sum("compute" in words for words in slower),
        sum("faster" in words for words in verdicts),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--slow", type=int, default=10, help="recordings of the slow script")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "pairs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "timeline.md")
    args = parser.parse_args()

    singles, triples, slow = [], [], []
    for number in range(args.pairs):
        base, new = (record(args.folder / f"{number}{side}") for side in "ab")
        triples.append(verdict(new, base))
        singles += [verdict([one], [other]) for one, other in zip(new, base, strict=True)]
        if number < args.slow:
            slow.append(verdict(record(args.folder / f"{number}slow", "--more", MORE_ROWS), base))
        print(number, triples[-1], *slow[number:], flush=True)

    rows = [
        row("identical scripts, 1 launch each", singles),
        row(f"identical scripts, {LAUNCHES} launches each", triples),
        row(f"16 times the batch, {LAUNCHES} launches each", slow),
    ]
    headers = ["pairs", "number", "no difference seen", "slower", "of these, compute", "faster"]
    text = tabulate(rows, headers, tablefmt="github")
    write_between_marks(args.page, "pairs", text)
    print(text)
    false = max(
        sum("No difference" not in words for words in verdicts) / len(verdicts)
        for verdicts in (singles, triples)
    )
    return 1 if false > 1 / 20 else 0


if __name__ == "__main__":
    sys.exit(main())
