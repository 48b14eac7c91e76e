"""How long a rank waits for others: as the script says; else the environment; else by default."""

from __future__ import annotations

import math

from ddpx import _C, errors, settings

_DEFAULTS: dict[str, float | bool] = {"warn_s": 10.0, "raise_s": math.inf, "stacks": False}
_of_script: dict[str, float | bool] = {}


def set_patience(
    warn_s: float | None = None, raise_s: float | None = None, *, stacks: bool | None = None
) -> None:
    """Sets how long this process waits for other ranks. Allowed at any time.

    An argument that is None does not change its setting. Before the first call, the settings are
    those of the environment variables ``DDPX_STALL_WARN_S``, ``DDPX_STALL_RAISE_S`` and
    ``DDPX_STALL_STACKS``.

    Args:
        warn_s: Seconds until a waiting rank logs the missing ranks and their last activity. The
            next warnings follow after twice the time each. ``math.inf`` turns warnings off. The
            default of the variable is 10.
        raise_s: Seconds until every waiting rank raises :class:`ddpx.RankStalled`. With
            ``math.inf``, the timeout of the process group ends the wait. The default of the
            variable is ``math.inf``.
        stacks: Whether warnings contain the Python stacks of the missing ranks. The default of
            the variable is False.

    Raises:
        TypeError: A time is not a number, or ``stacks`` is not a bool.
        ValueError: A time is neither between 0.001 and 1e9 seconds nor ``math.inf``, or an
            environment variable has a wrong value.

    Example:
        >>> ddpx.set_patience(warn_s=30, raise_s=600, stacks=True)
    """
    given: dict[str, float | bool] = {}
    for name, value in (("warn_s", warn_s), ("raise_s", raise_s)):
        if value is not None:
            given[name] = settings.seconds(name, value)
    if stacks is not None:
        if not isinstance(stacks, bool):
            raise errors.not_a_flag("stacks", stacks)
        given["stacks"] = stacks
    _put_in_force({**_of_script, **given})
    _of_script.update(given)


def put_in_force() -> None:
    """What the environment says, where the script does not.

    Raises:
        ValueError: it says what cannot be.
    """
    _put_in_force(_of_script)


def _put_in_force(of_script: dict[str, float | bool]) -> None:
    of_environment = {
        "warn_s": settings.seconds_of("DDPX_STALL_WARN_S"),
        "raise_s": settings.seconds_of("DDPX_STALL_RAISE_S"),
        "stacks": settings.switch_of("DDPX_STALL_STACKS"),
    }
    said = {name: value for name, value in of_environment.items() if value is not None}
    patience = {**_DEFAULTS, **said, **of_script}
    _C.set_patience(
        _limit(patience["warn_s"]), _limit(patience["raise_s"]), bool(patience["stacks"])
    )


def _limit(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds
