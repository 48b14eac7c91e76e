"""How long a rank waits for others: as the script says; else the environment; else by default."""

from __future__ import annotations

import math

from ddpx import _C, errors, settings

_DEFAULTS: dict[str, float | bool] = {"warn_s": 10.0, "raise_s": math.inf, "stacks": False}
_of_script: dict[str, float | bool] = {}


def set_patience(
    warn_s: float | None = None, raise_s: float | None = None, *, stacks: bool | None = None
) -> None:
    """How long a rank waits for others, in this process; at any time, also before wrapping.

    What is not given stays as it was: as set before, else as ``DDPX_STALL_WARN_S``,
    ``DDPX_STALL_RAISE_S`` and ``DDPX_STALL_STACKS`` say, else 10 seconds, never and False.

    Args:
        warn_s: seconds until it logs which ranks are missing and what they were last seen doing;
            again after twice as long, and so on. ``math.inf``: never.
        raise_s: seconds until every waiting rank raises :class:`ddpx.RankStalled`. ``math.inf``:
            when the process group's own timeout ends the wait.
        stacks: let warnings bring the Python stacks of the missing ranks.

    Raises:
        TypeError: no number, or no bool.
        ValueError: a number that is no time to wait; or so says a variable.
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
