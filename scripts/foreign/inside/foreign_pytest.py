"""A plugin for pytest (``-p foreign_pytest``): appends the outcome of each test to FOREIGN_RESULTS.

A line is a JSON object. ``started`` names a test that begins, ``test`` one that has ended. Tests
with an outcome in the file are left out, so that a run can go on after a test that ended the
process.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_RESULTS = Path(os.environ["FOREIGN_RESULTS"])
_MOST_CHARACTERS = 6000
_reports: list[pytest.TestReport] = []  # of the test that runs
_built_before: Counter[str] = Counter()


def _write(**fields: object) -> None:
    with _RESULTS.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def _built() -> Counter[str]:
    log = Path(os.environ["FOREIGN_LOG"])
    return Counter(log.read_text().split() if log.exists() else ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lines = _RESULTS.read_text().splitlines() if _RESULTS.exists() else []
    ended = {json.loads(line).get("test") for line in lines}
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        details = report.longreprtext[-_MOST_CHARACTERS:]
        _write(test=report.nodeid, status="fail", reason="cannot be imported", details=details)


def pytest_runtest_logstart(nodeid: str) -> None:
    global _built_before
    _reports.clear()
    _built_before = _built()
    _write(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    by_outcome = {report.outcome: report for report in reversed(_reports)}
    status, reason, details = "pass", "", ""
    if failed := by_outcome.get("failed"):
        status, details = "fail", failed.longreprtext[-_MOST_CHARACTERS:]
        crash = getattr(failed.longrepr, "reprcrash", None)
        reason = crash.message if crash else details
    elif skipped := by_outcome.get("skipped"):
        status = "skip"
        if isinstance(skipped.longrepr, tuple):
            reason = str(skipped.longrepr[2]).removeprefix("Skipped: ")
    built = _built() - _built_before
    if os.environ["FOREIGN_CLASS"] == "ddpx" and built["torch"]:
        status, reason = "fail", "torch's class was constructed"
    _write(
        test=nodeid,
        status=status,
        reason=reason,
        details=details,
        built=built[os.environ["FOREIGN_CLASS"]],
        seconds=round(sum(report.duration for report in _reports), 1),
    )
