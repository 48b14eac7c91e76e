"""Times and switches, as users give them: checked, from arguments and from the environment."""

from __future__ import annotations

import math
import os
from numbers import Real

from ddpx import errors

_LEAST_S = 1e-3
_MOST_S = 1e9
_SWITCH = {"0": False, "1": True}


def seconds(name: str, value: object) -> float:
    """``value``, which is called ``name``; ``math.inf`` stands for no limit.

    Raises:
        TypeError: it is no number.
        ValueError: it is no time that somebody could wait.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise errors.no_number_of_seconds(name, value)
    number = float(value)
    if not (_LEAST_S <= number <= _MOST_S or number == math.inf):
        raise errors.bad_seconds(name, value)
    return number


def seconds_of(variable: str) -> float | None:
    """What an environment variable says; None if it is not set, or empty."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise errors.bad_seconds(variable, text) from None
    return seconds(variable, value)


def switch_of(variable: str) -> bool | None:
    """What an environment variable says, by 1 or 0; None if it is not set, or empty."""
    text = os.environ.get(variable)
    if not text:
        return None
    if text not in _SWITCH:
        raise errors.bad_switch(variable, text)
    return _SWITCH[text]
