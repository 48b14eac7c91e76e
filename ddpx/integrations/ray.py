"""Ray Train's ``prepare_model``, with ReducerDDP in DDP's place."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train.torch
from ray.train.torch.config import _TorchBackend
from torch import nn

from ddpx.integrations.options import WrapOptions


def prepare_model(
    model: nn.Module,
    *options: Any,
    timeline: str | Path | None = None,
    timeline_steps: int | None = None,
    **more_options: Any,
) -> nn.Module:
    """``ray.train.torch.prepare_model``, which wraps the model in ReducerDDP.

    Args:
        model: as there, and so are ``options``.
        timeline: a folder for a timeline of the training. None: no timeline.
        timeline_steps: how many steps of it are recorded. None: all.

    Example::

        from ddpx.integrations.ray import prepare_model

        def train_loop_per_worker():
            model = prepare_model(nn.Linear(4, 1))
    """
    return WrapOptions(timeline, timeline_steps).wrap(
        lambda: ray.train.torch.prepare_model(model, *options, **more_options)
    )


@dataclass
class TorchConfig(ray.train.torch.TorchConfig):
    """``ray.train.torch.TorchConfig`` that also knows ddpx's backend, ``backend="shm"``.

    Example::

        from ddpx.integrations.ray import TorchConfig

        TorchTrainer(train_loop_per_worker, torch_config=TorchConfig(backend="shm"))
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(importlib.import_module, "ddpx")  # it registers "shm" with torch
        super().on_start(worker_group, backend_config)
