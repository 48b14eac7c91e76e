"""The time limits of waits: from the script, else from the environment, else the default."""

from __future__ import annotations

import math
from datetime import timedelta

from ddpx import _C, errors, settings

_DEFAULTS: dict[str, float | bool] = {"warn": 10.0, "error": math.inf, "stacks": False}
_of_script: dict[str, float | bool] = {}


def set_stall_timeout(
    warn: float | timedelta | None = None,
    error: float | timedelta | None = None,
    *,
    stacks: bool | None = None,
) -> None:
    """Sets how long this process waits for other ranks. Allowed at any time.

    An argument that is None does not change its setting. Before the first call, the settings are
    those of the environment variables ``DDPX_STALL_WARN``, ``DDPX_STALL_ERROR`` and
    ``DDPX_STALL_STACKS``.

    Args:
        warn: The time until a waiting rank logs the missing ranks and their last activity, in
            seconds or as a timedelta. Further warnings follow, each after twice the time.
            ``math.inf`` turns warnings off. The default of the variable is 10.
        error: The time until every waiting rank raises :class:`ddpx.RankStalled`, in seconds or as
            a timedelta. With ``math.inf``, the timeout of the process group ends the wait. The
            default of the variable is ``math.inf``.
        stacks: Whether a further message follows each warning, with the three innermost frames of
            the scripts of missing ranks of this machine. :func:`ddpx.peer_stack` returns all frames
            of all threads. The default of the variable is False.

    Raises:
        TypeError: A time is neither a number nor a timedelta, or ``stacks`` is not a bool.
        ValueError: A time is neither between 0.001 and 1e9 seconds nor ``math.inf``; or ``error``
            and ``warn`` are set, and the error would come before the warning; or an environment
            variable has a wrong value.

    Example:
        >>> ddpx.set_stall_timeout(warn=30, error=600, stacks=True)
    """
    given: dict[str, float | bool] = {}
    for name, value in (("warn", warn), ("error", error)):
        if value is not None:
            given[name] = settings.seconds(name, value)
    if stacks is not None:
        if not isinstance(stacks, bool):
            raise errors.not_a_flag("stacks", stacks)
        given["stacks"] = stacks
    _apply({**_of_script, **given})
    _of_script.update(given)


def apply() -> None:
    """Passes the settings to the core. The first wrapper calls this function.

    Raises:
        ValueError: An environment variable has a wrong value.
    """
    _apply(_of_script)


def _apply(of_script: dict[str, float | bool]) -> None:
    of_environment = {
        "warn": settings.seconds_of("DDPX_STALL_WARN"),
        "error": settings.seconds_of("DDPX_STALL_ERROR"),
        "stacks": settings.switch_of("DDPX_STALL_STACKS"),
    }
    set_values = {name: value for name, value in of_environment.items() if value is not None}
    set_values.update(of_script)
    warn, error = (set_values.get(name) for name in ("warn", "error"))
    if warn is not None and error is not None and warn != math.inf and error < warn:
        raise ValueError(
            f"The stall error (after {error:g} s) would come before its warning (after {warn:g} "
            "s). Pass an error time that is at least the warning time, or warn=math.inf for no "
            "warning."
        )
    chosen = {**_DEFAULTS, **set_values}
    _C.set_stall_timeouts(_limit(chosen["warn"]), _limit(chosen["error"]), bool(chosen["stacks"]))


def _limit(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds
