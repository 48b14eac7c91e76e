"""Verdicts on tests from their outcomes with both classes and the list of excused tests."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from outcomes import Outcome
from tabulate import tabulate

BAD = ("WORSE", "STALE")
_EXCUSE = re.compile(r"^\|\s*`(test_\w+)`\s*\|\s*(.*?)\s*\|")


@dataclass
class Line:
    """One test with its outcomes under both classes."""

    name: str
    torch: Outcome | None
    ddpx: Outcome | None
    excused: bool

    @property
    def verdict(self) -> str:
        """The verdict as one word.

        * ok: both classes pass.
        * WORSE: torch's class passes, ours does not, and no excuse covers it.
        * excused: torch's class passes, ours does not, and an excuse covers it.
        * STALE: ours passes despite an excuse, so the excuse must be removed.
        * better: only ours passes.
        * neither: torch's class does not pass here, so the test has no meaning.
        * no DDP: the test constructed no wrapper, so it has no meaning.
        """
        if self.torch is None or self.ddpx is None:
            return ""
        if not self.torch.built and self.torch.status == self.ddpx.status == "pass":
            return "STALE" if self.excused else "no DDP"
        if self.ddpx.status == "pass":
            if self.excused:
                return "STALE"
            if self.torch.status != "pass":
                return "better" if self.ddpx.built else "no DDP"
            return "ok" if self.ddpx.built else "WORSE"
        if self.torch.status != "pass":
            return "neither"
        return "excused" if self.excused else "WORSE"


def excused_tests(divergences: Path) -> dict[str, str]:
    """The excused tests, with their reasons.

    These are the first two columns of Markdown tables in ``divergences``, where the first column is
    the name of a test in backticks.
    """
    if not divergences.exists():
        return {}
    lines = divergences.read_text().splitlines()
    return {match[1]: match[2] for match in map(_EXCUSE.match, lines) if match}


def table(lines: list[Line]) -> str:
    """All lines as text."""
    rows = [[x.name, _cell(x.torch, 40), _cell(x.ddpx, 80), x.verdict] for x in lines]
    return tabulate(rows, ["test", "torch", "ddpx", "verdict"])


def summary(lines: list[Line]) -> str:
    """Counts of the verdicts, or of the outcomes of one class if only that class ran."""
    parts = []
    for contestant in ("torch", "ddpx"):
        outcomes = [getattr(line, contestant) for line in lines]
        counts = Counter(outcome.status for outcome in outcomes if outcome)
        if counts:
            parts.append(f"{contestant}: {_counts(counts)}")
    verdicts = Counter(line.verdict for line in lines if line.verdict)
    if verdicts:
        parts.append(f"verdicts: {_counts(verdicts)}")
    return f"{len(lines)} tests; " + "; ".join(parts)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())


def _cell(outcome: Outcome | None, width: int) -> str:
    if outcome is None:
        return "not run"
    if not outcome.reason:
        return outcome.status
    text = f"{outcome.status}: {outcome.reason}"
    return text if len(text) <= width else text[: width - 3] + "..."
