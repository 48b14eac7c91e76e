"""What every adapter offers beyond its library: another backend, and a timeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from ddpx.module import ReducerDDP
from ddpx.patch import patch_ddp
from ddpx.timeline.environment import record_into

_Wrapped = TypeVar("_Wrapped", bound=nn.Module)


@dataclass(frozen=True)
class WrapOptions:
    """Attributes:
    timeline: a folder, into which each rank writes its part of a timeline. None: no timeline.
    timeline_steps: how many steps are recorded. None: all.
    """

    timeline: str | Path | None = None
    timeline_steps: int | None = None

    def wrap(self, make: Callable[[], _Wrapped]) -> _Wrapped:
        """What ``make`` returns; where it calls DDP it gets a ReducerDDP."""
        with patch_ddp():
            model = make()
        if isinstance(model, ReducerDDP) and self.timeline is not None:
            record_into(self.timeline, model, self.timeline_steps, agreed=True)
        return model


def init_group(backend: str | None) -> None:
    """For libraries that choose the backend by themselves, and use a group that exists.

    Nothing if ``backend`` is None, or if the process was not started by a launcher.
    """
    if backend is not None and not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
