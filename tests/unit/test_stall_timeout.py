"""How patient a rank is: by the script, else by the environment, else by default."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

import ddpx
from ddpx.health import patience

InForce = Callable[[], tuple[float | None, float | None, bool]]


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> InForce:
    """What has reached the core last; None stands for never."""
    reached: list[Any] = []
    monkeypatch.setattr(patience._C, "set_patience", lambda *values: reached.append(values))
    monkeypatch.setattr(patience, "_of_script", {})
    return lambda: reached[-1]


def test_what_is_not_given_stays(in_force: InForce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPX_STALL_RAISE_S", "300")
    patience.put_in_force()
    assert in_force() == (10.0, 300.0, False)
    ddpx.set_patience(stacks=True)
    assert in_force() == (10.0, 300.0, True)
    ddpx.set_patience(Fraction(2))
    assert in_force() == (2.0, 300.0, True)
    ddpx.set_patience(math.inf, raise_s=math.inf, stacks=False)
    assert in_force() == (None, None, False)
    patience.put_in_force()  # as the first wrapper does
    assert in_force() == (None, None, False)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"warn_s": 0}, ValueError),
        ({"warn_s": -1.0}, ValueError),
        ({"warn_s": 1e-10}, ValueError),
        ({"raise_s": math.nan}, ValueError),
        ({"raise_s": 1e12}, ValueError),
        ({"warn_s": "10"}, TypeError),
        ({"warn_s": True}, TypeError),
        ({"warn_s": 1.0, "stacks": "yes"}, TypeError),
    ],
)
def test_wrong_arguments_change_nothing(
    in_force: InForce, wrong: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"warn_s|raise_s|stacks"):
        ddpx.set_patience(**wrong)
    patience.put_in_force()
    assert in_force() == (10.0, None, False)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("DDPX_STALL_WARN_S", "soon"), ("DDPX_STALL_RAISE_S", "0"), ("DDPX_STALL_STACKS", "true")],
)
def test_wrong_variables_are_named(
    in_force: InForce, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"^{variable}="):
        patience.put_in_force()
