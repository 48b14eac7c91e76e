"""What ``ddpx timeline`` starts as a rank: as ``ddpx run`` does, with a bar of the steps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from torch import nn

from ddpx.cli import runner
from ddpx.cli.observe import on_wrap
from ddpx.cli.progress import after_each_step, step_bar
from ddpx.timeline.environment import STEPS


def main() -> None:
    if (advance := step_bar("recording", int(os.environ[STEPS]))) is not None:
        _call_after_steps(advance)
    runner.main()


def _call_after_steps(advance: Callable[[], None]) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def note(wrapper: nn.Module) -> None:
        models.append(weakref.ref(wrapper))

    def syncs() -> bool:  # the model that is shown in the end
        first = models[0]() if models else None
        return first is not None and bool(first.require_backward_grad_sync)

    on_wrap(note)
    after_each_step(syncs, advance)


if __name__ == "__main__":
    main()
