"""Options of all adapters: the backend, the timeline and the average."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from ddpx.ddp.arguments.options import default_average
from ddpx.ddp.module import ReducerDDP
from ddpx.integrations.patch import patch_ddp
from ddpx.timeline.environment import record_into

_Wrapped = TypeVar("_Wrapped", bound=nn.Module)


@dataclass(frozen=True)
class WrapOptions:
    """The options that an adapter adds to the arguments of DDP.

    Attributes:
        timeline: The folder into which each rank writes its part of a timeline. None: no timeline.
        timeline_steps: The number of recorded steps. None: as ``max_steps`` of
            :func:`ddpx.record`.
        average: The argument of this name of :class:`ReducerDDP`.

    Raises:
        ValueError: ``timeline_steps`` is not a positive number, or ``timeline`` is missing.
    """

    timeline: str | Path | None = None
    timeline_steps: int | None = None
    average: str = "mean"

    def __post_init__(self) -> None:
        steps = self.timeline_steps
        if steps is None:
            return
        if type(steps) is not int or steps < 1:
            raise ValueError(
                f"timeline_steps={steps!r} is not a positive number of steps. Pass a whole number "
                "such as 20, or None for the last steps."
            )
        if self.timeline is None:
            raise ValueError(
                f"timeline_steps={steps} needs a folder: pass timeline=, or leave timeline_steps "
                "out."
            )

    def wrap(self, make: Callable[[], _Wrapped]) -> _Wrapped:
        """Returns the result of ``make``, in which a call of DDP creates a ReducerDDP."""
        with patch_ddp(), default_average(self.average):
            model = make()
        wrapper = getattr(model, "_orig_mod", model)  # torch.compile() wraps the wrapper
        if isinstance(wrapper, ReducerDDP) and self.timeline is not None:
            record_into(self.timeline, wrapper, self.timeline_steps, agreed=True)
        return model


def init_group(backend: str | None) -> None:
    """Initializes the default process group, for a library that cannot choose the backend.

    The call has no effect if ``backend`` is None, if the group exists, or if no launcher started
    the process.
    """
    if backend is not None and not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
