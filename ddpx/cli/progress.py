"""A bar of the steps that ranks make, for someone who waits at a terminal."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def step_bar(what: str, total: int | None) -> Callable[[], None] | None:
    """What is to be called after each step; None unless this is rank 0, standard error is a
    terminal, and tqdm is installed.

    Args:
        what: is done in these steps.
        total: how many steps are expected; later ones are not shown. None: not known.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar = tqdm(total=total, desc=what, unit="step", leave=False)

    def advance() -> None:
        if not bar.disable:
            bar.update()
            if bar.n == total:
                bar.close()

    return advance


def after_each_step(synced: Callable[[], bool], call: Callable[[], None]) -> None:
    """From here on ``call`` is called after every outermost backward for which ``synced`` holds."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1 and synced():
            call()

    torch.autograd.backward = wrapped
