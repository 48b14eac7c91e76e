"""A progress bar of training steps, at a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def step_bar(what: str, total: int | None) -> Callable[[], None] | None:
    """Returns a function that advances a progress bar by one step.

    Args:
        what: The label of the bar.
        total: The expected number of steps. The bar does not show later steps. None: unknown.

    Returns:
        The function. None if this is not rank 0, standard error is not a terminal, or tqdm is not
        installed.
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
