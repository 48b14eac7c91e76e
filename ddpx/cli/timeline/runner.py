"""A rank of ``ddpx timeline``: a rank of ``ddpx run`` with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import nn

from ddpx.cli import runner
from ddpx.cli.observe import on_replicate, on_wrap
from ddpx.cli.progress import step_bar
from ddpx.ddp.fronts.front import Front
from ddpx.timeline.environment import STEPS


def main(words: Sequence[str]) -> None:
    """Runs the script as a rank of ``ddpx run`` does."""
    if (advance := step_bar("recording", int(os.environ[STEPS]))) is not None:
        _call_after_steps(advance)
    runner.main(words)


def _call_after_steps(advance: Callable[[], None]) -> None:
    """Calls ``advance`` after each averaged step of the first model."""
    wrappers: list[int] = []

    def watch(wrapper: nn.Module | Front) -> None:
        wrappers.append(id(wrapper))
        if len(wrappers) == 1 and isinstance(wrapper, Front):
            replica = wrapper._ddpx
            param = replica.managed[0].tensor
            replica.post_sync.register(replica.reducer, replica.managed, param, lambda _: advance())

    on_wrap(watch)
    on_replicate(watch)
