"""Errors that several modules of this package raise, and the advice that most errors end with."""

from __future__ import annotations

FROM_CHECKPOINT = "Restart from a checkpoint (torchrun --max-restarts)."


def shrink_failed() -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() could not make a process group of the surviving ranks. {FROM_CHECKPOINT}"
    )
