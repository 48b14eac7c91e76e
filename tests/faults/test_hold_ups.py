"""Tests of report times run again if the machine delayed them, and only then."""

from __future__ import annotations

import ctypes
import math

import fault_ranks
import pytest


@pytest.mark.parametrize(("held_up_s", "num_trials"), [(math.inf, 1), (-math.inf, 2)])
def test_what_fails_is_done_again(
    monkeypatch: pytest.MonkeyPatch, held_up_s: float, num_trials: int
) -> None:
    trials = []

    @fault_ranks.again_if_held_up
    def fail(name: str) -> None:
        trials.append(name)
        raise AssertionError(name)

    monkeypatch.setattr(fault_ranks, "HELD_UP_S", held_up_s)
    with pytest.raises(AssertionError, match="late"):
        fail("late")
    assert trials == ["late"] * num_trials


def test_a_hold_up_is_measured() -> None:
    usleep = ctypes.PyDLL(None).usleep  # keeps the GIL
    with fault_ranks.HoldUps() as hold_ups:
        fault_ranks.await_that(
            lambda: usleep(300_000) != 0 or hold_ups.longest_s > 0.2, "nothing is measured"
        )
