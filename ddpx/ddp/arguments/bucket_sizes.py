"""The sizes of buckets, or the plan of buckets: from arguments, else from the environment."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpx.params.delayed import DelayedParams
from ddpx.planning import BucketPlan

PLAN_VARIABLE = "DDPX_BUCKET_PLAN"
CAP_VARIABLE = "DDPX_BUCKET_CAP_MB"
AUTO = "auto"
_MIB = 1024 * 1024
_DEFAULT_CAP_MB = 25
_DEFAULT_FIRST_CAP_BYTES = _MIB
_LARGEST_CAP_BYTES = 2**63 - 1
_NO_LIMIT = -1.0  # in texts. As an argument, each negative size is no limit, as in DDP.


def plan_in_force(
    argument: BucketPlan | str | Path | None,
    cap_mb: object,
    listed_caps_mb: object,
    delayed: DelayedParams,
) -> BucketPlan | None:
    """The plan of the argument, or of the environment, which takes precedence over caps."""
    if argument is None:
        if delayed.is_used and os.environ.get(PLAN_VARIABLE):
            warnings.warn(
                f"{PLAN_VARIABLE} has no effect on a wrapper with delay_all_reduce_named_params.",
                UserWarning,
                stacklevel=6,
            )
            return None
        return checked_plan()
    if cap_mb is not None or listed_caps_mb is not None:
        raise ValueError(
            "bucket_plan= has the size of each bucket. Leave out bucket_cap_mb and "
            "bucket_cap_mb_list."
        )
    if delayed.is_used:
        raise ValueError(
            "bucket_plan= and delay_all_reduce_named_params exclude each other: delayed parameters "
            "have buckets of their own. Leave out one of them."
        )
    if isinstance(argument, BucketPlan):
        return argument
    if isinstance(argument, (str, Path)):
        return _loaded("bucket_plan", argument)
    raise TypeError(
        f"bucket_plan must be a ddpx.BucketPlan or the path of its file, but got {argument!r}."
    )


def checked_plan() -> BucketPlan | None:
    """The plan of the environment. None without one.

    Raises:
        ValueError: The file has no bucket plan, or cannot be read.
    """
    path = os.environ.get(PLAN_VARIABLE)
    return _loaded(PLAN_VARIABLE, path) if path else None


def checked_cap() -> float | str | None:
    """The bucket size of the environment. None without one.

    Raises:
        ValueError: The text is not a number of MiB, and not ``auto``.
    """
    text = os.environ.get(CAP_VARIABLE)
    return cap_of_text(CAP_VARIABLE, text) if text else None


def cap_of_text(name: str, text: str) -> float | str:
    """Parses a bucket size: a number of MiB, -1 for no limit, or ``auto``.

    Args:
        name: The name of the variable or option, for errors.
        text: The text.

    Raises:
        ValueError: The text is no bucket size.
    """
    if text == AUTO:
        return AUTO
    try:
        cap = float(text)
    except ValueError as error:
        raise _bad_cap(name, text) from error
    if not (cap == _NO_LIMIT or 0 <= cap < math.inf):
        raise _bad_cap(name, text)
    return cap


def cap_in_force(
    argument: float | str | None,
    listed_caps_mb: object,
    plan: BucketPlan | None,
    delayed: DelayedParams,
) -> tuple[float | None, str | None]:
    """The size of the argument or of the environment, and what asked for a search if any."""
    by_argument = isinstance(argument, str) and argument == AUTO
    excluded = {
        "bucket_cap_mb_list": listed_caps_mb is not None,
        "delay_all_reduce_named_params": delayed.is_used,
        "a bucket plan": plan is not None,
    }
    others = [name for name, given in excluded.items() if given]
    if by_argument and plan is None:
        if others:
            raise ValueError(
                f"bucket_cap_mb='auto' and {others[0]} exclude each other: the search chooses the "
                "size of each bucket. Leave out one of them."
            )
        return None, "argument"
    cap = checked_cap()
    if cap is not None and not others:
        return (None, "environment") if cap == AUTO else (float(cap), None)
    if cap is not None:
        warnings.warn(
            f"{CAP_VARIABLE} has no effect on a wrapper with {others[0]}.",
            UserWarning,
            stacklevel=5,
        )
    return (None if by_argument else argument), None  # type: ignore[return-value]


def _loaded(name: str, path: str | Path) -> BucketPlan:
    try:
        return BucketPlan.load(path)
    except OSError as error:
        raise ValueError(
            f"{name}={str(path)!r} is not the path of a bucket plan: {error}"
        ) from error


def caps_in_bytes(
    cap_mb: float | None, cap_mb_list: list[float] | None
) -> tuple[int, int, tuple[int, ...]]:
    """Returns the caps of the first bucket, of the others, and the listed caps, in bytes.

    The first bucket is smaller only with the default size. A negative size is no limit, as in DDP.
    """
    if cap_mb_list is not None:
        no_list = isinstance(cap_mb_list, (str, bytes, Mapping))
        if no_list or not isinstance(cap_mb_list, Iterable):
            raise TypeError(
                f"bucket_cap_mb_list must be a list of numbers of MiB, but got {cap_mb_list!r}. "
                "Pass e.g. [1, 25, 25]."
            )
        listed = tuple(_cap_bytes("bucket_cap_mb_list", cap) for cap in cap_mb_list)
        if any(cap < 0 for cap in listed):
            raise _bad_cap("bucket_cap_mb_list", cap_mb_list)
        if listed:
            return max(listed), max(listed), listed
    if cap_mb is None:
        return _DEFAULT_FIRST_CAP_BYTES, _DEFAULT_CAP_MB * _MIB, ()
    cap = _cap_bytes("bucket_cap_mb", cap_mb)
    if cap < 0:
        cap = _LARGEST_CAP_BYTES
    return cap, cap, ()


def _cap_bytes(name: str, cap_mb: float) -> int:
    """The size in bytes. ``cap_mb`` may be a number of numpy, or a tensor of one element."""
    if not hasattr(type(cap_mb), "__float__"):  # a text
        raise _bad_cap(name, cap_mb)
    try:
        return min(int(float(cap_mb) * _MIB), _LARGEST_CAP_BYTES)
    except Exception as error:  # infinity, not a number, or an array of several numbers
        raise _bad_cap(name, cap_mb) from error


# ---- errors --------------------------------------------------------------------------------------


def _bad_cap(name: str, value: object) -> ValueError:
    choices = "such as 25; -1 for no limit; or 'auto'"
    if name == "bucket_cap_mb_list":
        choices = "for each bucket, e.g. [1, 25, 25]"
    return ValueError(
        f"{name}={value!r} is not a bucket size. Pass a finite number of MiB, 0 or more, {choices}."
    )
