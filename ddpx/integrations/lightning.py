"""The strategy ``"ddpx"`` of Lightning and Fabric. The import of this module registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from ddpx.integrations.options import WrapOptions


class _WrapOptionsOfStrategy:
    """The constructor of both strategies. A strategy derives from this class first."""

    def __init__(
        self,
        *arguments: Any,
        timeline: str | Path | None = None,
        timeline_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._wrap_options = WrapOptions(timeline, timeline_steps)


class ReducerDDPStrategy(_WrapOptionsOfStrategy, DDPStrategy):
    """A ``DDPStrategy`` of ``lightning.Trainer`` that uses ReducerDDP in place of DDP.

    ``strategy="ddpx"`` selects this class without options.

    Args:
        arguments: Positional arguments of ``DDPStrategy``.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.
        options: Keyword arguments of ``DDPStrategy``, which include arguments of DDP. With
            ``process_group_backend="shm"``, the process group uses shared memory.

    Raises:
        ValueError: ``timeline_steps`` is not a positive number, or ``timeline`` is missing.

    Example:
        >>> import lightning
        >>> from ddpx.integrations.lightning import ReducerDDPStrategy
        >>> strategy = ReducerDDPStrategy(process_group_backend="shm", find_unused_parameters=True)
        >>> trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=2)
        >>> trainer = lightning.Trainer(strategy="ddpx", accelerator="cpu", devices=2)
        >>> type(trainer.strategy).__name__
        'ReducerDDPStrategy'
    """

    strategy_name = "ddpx"

    def _setup_model(self, model: nn.Module) -> Any:
        return self._wrap_options.wrap(lambda: super(ReducerDDPStrategy, self)._setup_model(model))


class ReducerDDPFabricStrategy(_WrapOptionsOfStrategy, FabricDDPStrategy):
    """A ``DDPStrategy`` of ``lightning.Fabric`` that uses ReducerDDP in place of DDP.

    ``strategy="ddpx"`` selects this class without options.

    Args:
        arguments: Positional arguments of ``DDPStrategy``.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.
        options: Keyword arguments of ``DDPStrategy``, which include arguments of DDP. With
            ``process_group_backend="shm"``, the process group uses shared memory.

    Raises:
        ValueError: ``timeline_steps`` is not a positive number, or ``timeline`` is missing.

    Example:
        >>> import lightning
        >>> from ddpx.integrations.lightning import ReducerDDPFabricStrategy
        >>> strategy = ReducerDDPFabricStrategy(process_group_backend="shm")
        >>> fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        >>> fabric = lightning.Fabric(strategy="ddpx", accelerator="cpu", devices=2)
        >>> type(fabric.strategy).__name__
        'ReducerDDPFabricStrategy'
    """

    def setup_module(self, module: nn.Module) -> Any:
        """Wraps a module. ``fabric.setup()`` calls this method.

        Args:
            module: The module.

        Returns:
            The :class:`ddpx.ReducerDDP`.

        Example:
            >>> from ddpx.integrations.lightning import ReducerDDPFabricStrategy
            >>> strategy = ReducerDDPFabricStrategy(parallel_devices=[torch.device("cpu")])
            >>> isinstance(strategy.setup_module(module), ddpx.ReducerDDP)
            True
        """
        return self._wrap_options.wrap(
            lambda: super(ReducerDDPFabricStrategy, self).setup_module(module)
        )


StrategyRegistry.register("ddpx", ReducerDDPStrategy, "DDP by ddpx.ReducerDDP")
FABRIC_REGISTRY.register("ddpx", ReducerDDPFabricStrategy, "DDP by ddpx.ReducerDDP")
