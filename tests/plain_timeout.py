"""Time limits of tests without pytest-timeout, by SIGALRM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest


def add_options(parser: pytest.Parser) -> None:
    parser.addini("timeout", "seconds that a test may take", default="0")


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the test's time limit is over")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The limit includes set-up and tear-down, as in pytest-timeout.

    A limit of 0 means no limit.
    """
    before = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, _limit_s(item))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
