"""The tables of docs/compatibility.md about suites of other projects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from verdicts import BAD, Line

NO_REASON = "**unexplained**"
_HEAD = (
    ("tests", "construct DDP", "torch's class", "ReducerDDP", "reason of the difference"),
    ("---",) * 5,
)
_MOST_CHARACTERS = 120
_WORDS = {"pass": "passed", "fail": "failed", "skip": "skipped", "timeout": "late", "crash": "died"}


def table(lines: Iterable[Line], reasons: Mapping[str, str]) -> str:
    """A table in Markdown.

    A row for each file of tests has the numbers of tests. A row for each test with another outcome
    follows, with the reason.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.name.partition("::")[0], []).append(line)
    rows = []
    for name, group in groups.items():
        differing = [line for line in group if differs(line)]
        if len(group) == 1 and differing and group[0].name == name:
            rows.append(_row(group[0], reasons))
            continue
        rows.append([f"`{name}`", _num_wrapping(group), _counts(group, 0), _counts(group, 1), ""])
        rows += [_row(line, reasons) for line in differing]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (*_HEAD, *rows))


def differs(line: Line) -> bool:
    """Whether the row of a test is shown."""
    return line.verdict in (*BAD, "excused", "better")


def _row(line: Line, reasons: Mapping[str, str]) -> list[str]:
    assert line.torch is not None and line.ddpx is not None
    words = [_word(each.status, each.reason) for each in (line.torch, line.ddpx)]
    if line.verdict == "STALE":
        reason = "**no difference, but there is a reason**"
    elif line.verdict == "better":
        reason = "works with ReducerDDP only"
    else:
        reason = reasons.get(line.name, NO_REASON)
    return [f"`{line.name}`", "", *words, reason]


def _word(status: str, reason: str) -> str:
    word = _WORDS[status]
    text = reason if len(reason) <= _MOST_CHARACTERS else f"{reason[:_MOST_CHARACTERS]}…"
    quoted = text.replace("|", "\\|").replace("`", "'")
    return f"{word}: `{quoted}`" if status == "fail" and quoted else word


def _counts(group: Iterable[Line], index: int) -> str:
    outcomes = [(line.torch, line.ddpx)[index] for line in group]
    counts = Counter(_WORDS[outcome.status] for outcome in outcomes if outcome)
    return ", ".join(f"{counts[word]} {word}" for word in _WORDS.values() if counts[word])


def _num_wrapping(group: Iterable[Line]) -> str:
    return str(sum(bool(line.torch and line.torch.built) for line in group))
