"""Errors that several modules of this package raise."""

from __future__ import annotations


def no_complete_step() -> RuntimeError:
    return RuntimeError(
        "no complete step was recorded. A complete step is a forward through the wrapper and a "
        "synchronized backward (outside no_sync()), both between start() and stop()."
    )
