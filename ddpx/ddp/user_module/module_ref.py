"""A reference to the module of a replica."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class ModuleRef:
    """Returns the module when called. The parts of a replica share this object.

    Args:
        module: The module.
        keeps: Whether the reference keeps the module alive, as for a wrapper. The hooks of a
            replicated module hold the replica, so this replica does not hold the module.
    """

    def __init__(self, module: nn.Module, keeps: bool) -> None:
        self.keeps = keeps
        self._kept = module if keeps else None
        self._weak = weakref.ref(module)
        self._class_name = type(module).__name__

    def __call__(self) -> nn.Module:
        """The module.

        Raises:
            RuntimeError: The module was deleted.
        """
        module = self._weak()
        if module is None:
            raise RuntimeError(
                "the module that was passed to ddpx.replicate() was deleted. A shallow copy of it "
                "still runs its hooks. Call ddpx.replicate() on the module that trains."
            )
        return module

    @property
    def name(self) -> str:
        """The module as errors name it: "ReducerDDP of Net", or "replicated Net"."""
        return f"{'ReducerDDP of' if self.keeps else 'replicated'} {self._class_name}"

    @property
    def is_deleted(self) -> bool:
        """Whether the module was deleted."""
        return self._weak() is None

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleRef, (self(), self.keeps)
