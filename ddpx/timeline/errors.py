"""Every text of an error of this package."""

from __future__ import annotations

from collections.abc import Sequence


def bad_max_steps(max_steps: object) -> ValueError:
    return ValueError(
        f"max_steps={max_steps!r} is not valid. Pass a positive number, or None for no limit."
    )


def bad_timeline_steps(text: str) -> ValueError:
    return ValueError(
        f"DDPX_TIMELINE_STEPS={text!r} is not a positive number. Set DDPX_TIMELINE_STEPS to the "
        "number of steps to record, or unset the variable."
    )


def not_one_wrapper(model: object, number: int) -> TypeError:
    return TypeError(
        f"ddpx.record() records exactly one ReducerDDP, but {type(model).__name__} contains "
        f"{number or 'none'}. Pass the wrapped model itself."
    )


def timeline_started() -> RuntimeError:
    return RuntimeError(
        "this timeline was started before. Make a new timeline with ddpx.record(model)."
    )


def timeline_not_running() -> RuntimeError:
    return RuntimeError("this timeline is not recording. Call start() first, and call stop() once.")


def timeline_empty() -> RuntimeError:
    return RuntimeError(
        "this timeline is empty. Run training steps inside `with ddpx.record(model) as timeline:`, "
        "or between start() and stop()."
    )


def no_complete_step() -> RuntimeError:
    return RuntimeError(
        "no complete step was recorded. A complete step is a forward through the wrapper and a "
        "synchronised backward (outside no_sync()), both between start() and stop()."
    )


def not_a_timeline(path: object, why: str) -> ValueError:
    return ValueError(f"{path} holds no usable timeline of ddpx: {why}.")


def no_such_model(path: object, model: object, recorded: Sequence[int]) -> ValueError:
    numbers = ", ".join(str(number) for number in recorded)
    return ValueError(
        f"{path} has no recording of model {model!r}. Recorded "
        f"{'model' if len(recorded) == 1 else 'models'}: {numbers}."
    )


def no_such_step(step: int, recorded: Sequence[int]) -> ValueError:
    """``recorded`` is not empty."""
    if len(recorded) <= 10:
        there_are = ", ".join(str(number) for number in recorded)
    else:
        there_are = f"{len(recorded)} from {recorded[0]} to {recorded[-1]}"
    return ValueError(
        f"step {step} is not in this timeline. Recorded "
        f"{'step' if len(recorded) == 1 else 'steps'}: {there_are}."
    )


def tool_missing(what: str, package: str) -> ImportError:
    return ImportError(
        f"{what} needs {package}, which is not installed. Run: pip install {package}"
    )
