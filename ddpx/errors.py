"""Errors that several modules raise, and helpers for the texts of errors.

The text of an error with one caller is where the error is raised. ``csrc/reducer/step_errors.cpp``
has the texts of the reducer. Errors that DDP has, too, contain the words of DDP's error, because
scripts look for them.
"""

from __future__ import annotations

from collections.abc import Iterable


def plural(noun: str) -> str:
    """ "parameters", "losses"."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def count(number: int, noun: str) -> str:
    """ "1 parameter", "2 parameters", "1,000 losses"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def count_names(names: Iterable[str], noun: str) -> str:
    """ "1 parameter: weight", "2 parameters: weight, bias"."""
    listed = list(names)
    return f"{count(len(listed), noun)}: {', '.join(listed)}"


def not_a_flag(name: str, value: object) -> TypeError:
    return TypeError(f"{name} must be True or False, but got {value!r}.")


def not_one_wrapper(value: object, number: int) -> TypeError:
    return TypeError(
        "expected one ReducerDDP or replicated module, or a module around one, but "
        f"{type(value).__name__} contains {number or 'none'}. Pass the ReducerDDP that wraps the "
        "model, or the module that was passed to ddpx.replicate()."
    )


def no_failure_detector() -> RuntimeError:
    return RuntimeError(
        "the failure detector is off for this wrapper: the world size is 1, the process group has "
        "no store, or DDPX_HEALTH=0 is set. Start at least 2 ranks, and do not set DDPX_HEALTH=0."
    )


def nothing_to_train() -> RuntimeError:
    return RuntimeError(
        "DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient. Use the module itself, or unfreeze parameters before wrapping."
    )
