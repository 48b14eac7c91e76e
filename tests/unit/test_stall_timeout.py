"""The stall timeout: by the script, else by the environment, else by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest

import ddpx
from ddpx.health import stall_timeout

InForce = Callable[[], tuple[float | None, float | None, bool]]


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> InForce:
    """What has reached the core last; None stands for never."""
    reached: list[Any] = []
    monkeypatch.setattr(
        stall_timeout._C, "set_stall_timeouts", lambda *values: reached.append(values)
    )
    monkeypatch.setattr(stall_timeout, "_of_script", {})
    return lambda: reached[-1]


def test_what_is_not_given_stays(in_force: InForce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPX_STALL_ERROR", "300")
    stall_timeout.apply()
    assert in_force() == (10.0, 300.0, False)
    ddpx.set_stall_timeout(stacks=True)
    assert in_force() == (10.0, 300.0, True)
    ddpx.set_stall_timeout(Fraction(2))
    assert in_force() == (2.0, 300.0, True)
    ddpx.set_stall_timeout(error=timedelta(minutes=2))
    assert in_force() == (2.0, 120.0, True)
    ddpx.set_stall_timeout(math.inf)
    assert in_force() == (None, 120.0, True)
    ddpx.set_stall_timeout(error=math.inf, stacks=False)
    assert in_force() == (None, None, False)
    stall_timeout.apply()  # as the first wrapper does
    assert in_force() == (None, None, False)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"warn": 0}, ValueError),
        ({"warn": 3.0, "error": 2.0}, ValueError),
        ({"warn": -1.0}, ValueError),
        ({"warn": 1e-10}, ValueError),
        ({"error": math.nan}, ValueError),
        ({"error": 1e12}, ValueError),
        ({"warn": "10"}, TypeError),
        ({"warn": True}, TypeError),
        ({"warn": 1.0, "stacks": "yes"}, TypeError),
    ],
)
def test_wrong_arguments_change_nothing(
    in_force: InForce, wrong: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"warn|error|stacks"):
        ddpx.set_stall_timeout(**wrong)
    stall_timeout.apply()
    assert in_force() == (10.0, None, False)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("DDPX_STALL_WARN", "soon"), ("DDPX_STALL_ERROR", "0"), ("DDPX_STALL_STACKS", "true")],
)
def test_wrong_variables_are_named(
    in_force: InForce, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"^{variable}="):
        stall_timeout.apply()
