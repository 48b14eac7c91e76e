"""``prepare_model`` of Ray Train with ReducerDDP in place of DDP."""

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
    """Wraps a model in ReducerDDP, as ``ray.train.torch.prepare_model`` wraps it in DDP.

    Args:
        model: The model.
        options: Positional arguments of ``ray.train.torch.prepare_model``.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.
        more_options: Keyword arguments of ``ray.train.torch.prepare_model``.

    Returns:
        The wrapper. With a single worker, the model.

    Raises:
        ValueError: ``timeline_steps`` is not a positive number, or ``timeline`` is missing.

    Example:
        >>> from ddpx.integrations.ray import prepare_model
        >>> def train_loop_per_worker():
        ...     model = prepare_model(nn.Linear(4, 1))
        ...     model(inputs).sum().backward()
    """
    return WrapOptions(timeline, timeline_steps).wrap(
        lambda: ray.train.torch.prepare_model(model, *options, **more_options)
    )


@dataclass
class TorchConfig(ray.train.torch.TorchConfig):
    """A ``ray.train.torch.TorchConfig`` that supports ``backend="shm"``.

    Example:
        >>> from ddpx.integrations.ray import TorchConfig, prepare_model
        >>> from ray.train.torch import TorchTrainer
        >>> def train_loop_per_worker():
        ...     model = prepare_model(nn.Linear(4, 1))
        >>> trainer = TorchTrainer(train_loop_per_worker, torch_config=TorchConfig(backend="shm"))
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """The class with which Ray Train sets up workers."""
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(importlib.import_module, "ddpx")  # it registers "shm" with torch
        super().on_start(worker_group, backend_config)
