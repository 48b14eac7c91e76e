"""Every text of an error of this package."""

from __future__ import annotations

from collections.abc import Sequence


def bad_max_steps(max_steps: object) -> ValueError:
    return ValueError(f"max_steps={max_steps!r}: pass a positive number, or None for no limit.")


def bad_timeline_steps(text: str) -> ValueError:
    return ValueError(f"DDPX_TIMELINE_STEPS={text!r} is not a positive number.")


def not_one_wrapper(model: object, number: int) -> TypeError:
    found = "is none" if number == 0 else f"are {number}"
    return TypeError(
        f"ddpx.record() records one ReducerDDP, but there {found} in {type(model).__name__}. "
        "Pass the wrapped model itself."
    )


def timeline_started() -> RuntimeError:
    return RuntimeError("this timeline was started before; ddpx.record(model) makes a new one.")


def timeline_not_running() -> RuntimeError:
    return RuntimeError("this timeline is not recording: call start() first, and stop() once.")


def timeline_empty() -> RuntimeError:
    return RuntimeError(
        "this timeline holds nothing yet: use `with ddpx.record(model) as timeline:`, or start() "
        "and stop(), around training steps."
    )


def no_complete_step() -> RuntimeError:
    return RuntimeError(
        "no complete step was recorded: a step is a forward through the wrapper and a synchronised "
        "backward (not within no_sync()), both between start and stop."
    )


def not_a_timeline(path: object, why: str) -> ValueError:
    return ValueError(f"{path} holds no timeline of ddpx: {why}")


def no_such_model(path: object, model: object, recorded: Sequence[int]) -> ValueError:
    numbers = ", ".join(str(number) for number in recorded)
    return ValueError(f"{path} holds no model {model!r}; of models it has: {numbers}.")


def no_such_step(step: int, recorded: Sequence[int]) -> ValueError:
    """``recorded`` is not empty."""
    if len(recorded) <= 10:
        there_are = "these are: " + ", ".join(str(number) for number in recorded)
    else:
        there_are = f"{len(recorded)} are, from {recorded[0]} to {recorded[-1]}"
    return ValueError(f"step {step} is not in this timeline; {there_are}.")


def tool_missing(what: str, package: str) -> ImportError:
    return ImportError(f"{what} needs {package}: pip install {package}")
