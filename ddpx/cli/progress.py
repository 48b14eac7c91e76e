"""A bar of the steps that ranks make, for someone who waits at a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


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
