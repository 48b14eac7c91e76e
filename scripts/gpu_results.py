"""The results of ``make gpu``, by test and part, in one file.

A result has the run that it is from, and a digest of the sources that it depends on. A run's name
is its date in UTC and its commit, so names sort by time. "+" after the commit means changed files.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

SCHEMA = 2
TABLES = ("parts", "tests", "sanitizer")
OUTCOMES = ("passed", "failed", "skipped", "not run")
NO_TIME = "no time was left"
NEWER = "no GPU was there since the test was written"
Row = dict[str, Any]
State = Literal["current", "older", "missing"]


class Unusable(Exception):
    """The file is not a file of results of this schema."""


class Results:
    """Tables of results, and the machine of each run.

    A row has ``outcome``, ``seconds``, ``run`` and ``sources``. Its ``text`` is the end of an
    error, or the reason of a skip. A row whose outcome is "not run" has only the reason. Rows of
    parts may have ``results``.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Row]] = {name: {} for name in TABLES}

    @property
    def tests(self) -> dict[str, Row]:
        return self.tables["tests"]

    @property
    def parts(self) -> dict[str, Row]:
        return self.tables["parts"]

    @property
    def last_run(self) -> str:
        """The newest run that has a result. "" without a result."""
        return max(
            (row.get("run", "") for table in self.tables.values() for row in table.values()),
            default="",
        )

    def state(self, table: str, name: str, digest: str) -> State:
        """Whether a test or part has to run, for sources with this digest."""
        row = self.tables[table].get(name, {})
        if row.get("outcome") not in ("passed", "skipped"):
            return "missing"
        return "current" if row["sources"] == digest else "older"

    def expect(
        self,
        table: str,
        expected: Collection[str],
        others: Collection[str],
        is_complete: bool,
        reason: str = NO_TIME,
    ) -> None:
        """Adds a row for each expected test without a result.

        Args:
            table: The name of the table.
            expected: The tests that have to run.
            others: Further tests that exist. Their results are kept.
            is_complete: Whether no other test exists. Rows of others are then removed.
            reason: Why the new rows have no result.
        """
        rows = self.tables[table]
        for name in list(rows):
            gone = is_complete and name not in expected and name not in others
            if gone or (rows[name]["outcome"] == "not run" and name not in expected):
                del rows[name]
        for name in expected:
            rows.setdefault(name, {"outcome": "not run", "text": reason})

    def merge(self, other: Results) -> None:
        """Takes each row that is newer in ``other``.

        If the last run of ``other`` is not older, tests that ``other`` does not know are removed.
        """
        is_newer = other.last_run >= self.last_run
        self.runs |= other.runs
        for name, theirs in other.tables.items():
            ours = self.tables[name]
            if is_newer and theirs and name != "parts":
                for gone in ours.keys() - theirs.keys():
                    del ours[gone]
            for key, row in theirs.items():
                if key not in ours or row.get("run", "") >= ours[key].get("run", ""):
                    ours[key] = row

    def _used_runs(self) -> dict[str, dict[str, Any]]:
        used = {row.get("run") for table in self.tables.values() for row in table.values()}
        return {name: self.runs[name] for name in sorted(self.runs) if name in used}

    def save(self, path: Path) -> None:
        """Writes the file, one line for each part and test. A reader finds a complete file."""
        texts = [f'"schema": {SCHEMA}', f'"runs": {json.dumps(self._used_runs(), indent=1)}']
        for name in TABLES:
            rows = sorted(self.tables[name].items())
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows)
            texts.append(f'"{name}": {{\n{lines}\n}}')
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text("{\n" + ",\n".join(texts) + "\n}\n")
        draft.replace(path)


def load(path: Path) -> Results:
    """Reads a file of :meth:`Results.save`.

    Raises:
        Unusable: The file has another schema.
    """
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise Unusable(f"{path}: schema {data.get('schema')}, but {SCHEMA} is expected")
    results = Results()
    results.runs = data["runs"]
    results.tables = {name: data[name] for name in TABLES}
    return results
