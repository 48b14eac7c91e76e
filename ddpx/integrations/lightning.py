"""The strategy ``"ddpx"`` of Lightning and Fabric; importing this module registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from ddpx.integrations.options import WrapOptions


class ReducerDDPStrategy(DDPStrategy):
    """Lightning's DDPStrategy with ReducerDDP in DDP's place.

    Args:
        backend: of the process group, for example ``"shm"``. None: as Lightning chooses.
        timeline: a folder for a timeline of the training. None: no timeline.
        timeline_steps: how many steps of it are recorded. None: all.
        options: DDPStrategy's, among which are DDP's.

    Example::

        import ddpx.integrations.lightning

        trainer = lightning.Trainer(strategy="ddpx", devices=2, accelerator="cpu")
    """

    strategy_name = "ddpx"

    def __init__(
        self,
        backend: str | None = None,
        timeline: str | Path | None = None,
        timeline_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=backend, **options)
        self._wrap_options = WrapOptions(timeline, timeline_steps)

    def _setup_model(self, model: nn.Module) -> Any:
        return self._wrap_options.wrap(lambda: super(ReducerDDPStrategy, self)._setup_model(model))


class ReducerDDPFabricStrategy(FabricDDPStrategy):
    """Fabric's DDPStrategy with ReducerDDP in DDP's place; arguments as for ReducerDDPStrategy.

    Example::

        import ddpx.integrations.lightning

        fabric = lightning.Fabric(strategy="ddpx", devices=2, accelerator="cpu")
    """

    def __init__(
        self,
        backend: str | None = None,
        timeline: str | Path | None = None,
        timeline_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=backend, **options)
        self._wrap_options = WrapOptions(timeline, timeline_steps)

    def setup_module(self, module: nn.Module) -> Any:
        return self._wrap_options.wrap(
            lambda: super(ReducerDDPFabricStrategy, self).setup_module(module)
        )


StrategyRegistry.register("ddpx", ReducerDDPStrategy, "DDP by ddpx.ReducerDDP")
FABRIC_REGISTRY.register("ddpx", ReducerDDPFabricStrategy, "DDP by ddpx.ReducerDDP")
