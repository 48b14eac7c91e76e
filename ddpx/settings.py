"""Checks time limits and switches from arguments and from environment variables."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from numbers import Real

from ddpx.errors import not_a_flag

_LEAST_S = 1e-3
_MOST_S = 1e9
_MOST_BYTES = 2**62
_SWITCH = {"0": False, "1": True}


def seconds(name: str, value: object) -> float:
    """Checks a time limit.

    Args:
        name: The name of the argument or variable, for errors.
        value: The time limit, in seconds or as a timedelta. ``math.inf`` means no limit.

    Returns:
        The seconds.

    Raises:
        TypeError: ``value`` is neither a number nor a timedelta.
        ValueError: ``value`` is neither between 0.001 and 1e9 seconds nor ``math.inf``.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, but got {value!r}.")
    number = float(value)
    if not (_LEAST_S <= number <= _MOST_S or number == math.inf):
        raise _bad_seconds(name, value)
    return number


def seconds_of(variable: str) -> float | None:
    """Returns the time limit in an environment variable. None if the variable is unset or empty."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise _bad_seconds(variable, text) from None
    return seconds(variable, value)


def bytes_of(variable: str, default: int) -> int:
    """Returns the number of bytes in an environment variable."""
    text = os.environ.get(variable)
    if not text:
        return default
    if not text.isdecimal() or int(text) > _MOST_BYTES:
        raise ValueError(
            f"{variable}={text} is not a number of bytes. Set {variable} to a number from 0 to "
            f"{_MOST_BYTES}, such as {default}."
        )
    return int(text)


def switch_of(variable: str) -> bool | None:
    """Returns the switch in an environment variable. None if the variable is unset or empty."""
    text = os.environ.get(variable)
    if not text:
        return None
    if text not in _SWITCH:
        raise ValueError(
            f"{variable}={text} is neither on nor off. Set {variable} to 1 (on) or to 0 (off)."
        )
    return _SWITCH[text]


def flag(name: str, value: object) -> bool:
    """Checks a flag of the script.

    Args:
        name: The name of the argument, for errors.
        value: A bool, a number, or a number of numpy or torch. None is False, as in DDP.

    Returns:
        The truth value.

    Raises:
        TypeError: ``value`` has no truth value of its own, such as a text.
    """
    if value is None:
        return False
    if not hasattr(type(value), "__bool__") or isinstance(value, complex):  # "False" would be true
        raise not_a_flag(name, value)
    try:
        return bool(value)
    except Exception as error:  # an array of several values
        raise not_a_flag(name, value) from error


# ---- errors --------------------------------------------------------------------------------------


def _bad_seconds(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}={value!r} is not a valid time limit. Pass a number of seconds from 0.001 to 1e9, "
        "e.g. 10, or inf for no limit."
    )
