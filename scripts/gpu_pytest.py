"""A plugin for pytest (``-p gpu_pytest``), which scripts/gpu_workers.py drives.

With GPU_PYTEST_IDS, writes the ids of all tests into this file. With GPU_PYTEST_FD, a connection of
``multiprocessing``, runs the tests that the driver names, one after another. The plugin asks for a
test before it runs the previous one, because pytest keeps fixtures that the next test needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

_MESSAGE_CHARS, _TEXT_CHARS = 500, 1000  # kept of an exception, and of the end of its traceback
_errors: dict[str, str] = {}  # of the collection
_reports: list[pytest.TestReport] = []  # of the test that runs


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The exception and the end of its traceback, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message[:_MESSAGE_CHARS] + "\n...\n" if crash else ""
    return f"{message}{report.longreprtext[-_TEXT_CHARS:]}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _errors[report.nodeid] = _text(report)


def pytest_collection_finish(session: pytest.Session) -> None:
    if file := os.environ.get("GPU_PYTEST_IDS"):
        ids = [item.nodeid for item in session.items]
        Path(file).write_text(json.dumps({"tests": ids, "errors": _errors}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def _result() -> dict[str, Any]:
    """The result of the test that has just run, of its set-up, call and tear-down."""
    outcomes = [report.outcome for report in _reports]
    outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
    text = "\n".join(_text(report) for report in _reports if report.outcome == outcome != "passed")
    seconds = sum(report.duration for report in _reports)
    _reports.clear()
    return {"outcome": outcome, "seconds": seconds, "text": text}


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout") or 0)


def _named_tests(session: pytest.Session, driver: Connection) -> Iterator[pytest.Item]:
    """The tests that the driver names. None ends them."""
    items = {item.nodeid: item for item in session.items}
    while True:
        driver.send(("take",))
        test = driver.recv()
        if test is None:
            return
        if test in items:
            yield items[test]
        else:
            error = _errors.get(test.partition("::")[0], "pytest did not collect this test")
            driver.send(("ended", test, {"outcome": "failed", "seconds": 0.0, "text": error}))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    fd = os.environ.pop("GPU_PYTEST_FD", None)
    if fd is None:
        return None
    os.set_inheritable(int(fd), False)  # or a rank could outlive the test process at its end
    driver = Connection(int(fd))
    tests = _named_tests(session, driver)
    item = next(tests, None)
    while item is not None:
        following = next(tests, None)
        driver.send(("started", item.nodeid, _limit_s(item)))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        driver.send(("ended", item.nodeid, _result()))
        item = following
    return True
