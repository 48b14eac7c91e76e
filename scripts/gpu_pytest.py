"""A plugin for pytest (``-p gpu_pytest``): writes one line of JSON at the end of each test.

The log of an interrupted run thus has all earlier tests. GPU_PYTEST_LOG names the file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_TEXT_BYTES = 1500  # size of the kept end of an error, which has the exception


def _write(**line: Any) -> None:
    with open(os.environ["GPU_PYTEST_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


_is_worker = False


def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist sends its reports to the main process, which logs them."""
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def pytest_runtest_logstart(nodeid: str) -> None:
    if not _is_worker:
        _write(id=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker:
        return
    if report.when == "call" or report.failed or report.skipped:
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _write(id=report.nodeid, outcome=outcome, seconds=report.duration, text=text[-_TEXT_BYTES:])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and not _is_worker:
        text = report.longreprtext[-_TEXT_BYTES:]
        _write(id=report.nodeid, outcome="error", seconds=0, text=text)


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(outcome="collected", number=len(session.items))
