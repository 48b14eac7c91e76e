"""The buffers that ranks keep equal during training, and the rule by which they do so."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ddpx import params
from ddpx.ddp.user_module.module_ref import ModuleRef


class BufferRules:
    """The buffers of one module, and the rule by which ranks synchronize them.

    A wrapper owns this object.

    Args:
        module: The module.
        ignored: Names of buffers that ranks do not synchronize.
        enabled: Whether forwards synchronize buffers (``forward_sync_buffers``).

    Attributes:
        named: The buffers, by name.
        tensors: The buffers.
        hook: The hook in place of the broadcast. None without a hook.
    """

    def __init__(self, module: ModuleRef, ignored: Collection[str], enabled: bool) -> None:
        self._module = module
        self._ignored = ignored
        self.enabled = enabled
        # As in DDP, a forward skips the broadcast if the forward before it was not synchronized.
        self.last_forward_was_synchronized = True
        self.hook: _BufferCommHook | None = None
        self.named: dict[str, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def refresh(self) -> None:
        """Reads the buffers of the module again, because user code may have replaced them."""
        self.named = dict(params.named_managed_buffers(self._module(), self._ignored))
        self.tensors = list(self.named.values())

    def will_sync(self) -> bool:
        """Whether the next forward synchronizes buffers."""
        return self.last_forward_was_synchronized and self.enabled and bool(self.tensors)

    def is_at(self, location: _BufferCommHookLocation) -> bool:
        """Whether forwards synchronize buffers at ``location``."""
        if self.hook is None:
            return location is _BufferCommHookLocation.PRE_FORWARD
        return self.hook.buffer_comm_hook_location is location

    def set_hook(
        self, state: object, hook: Callable[..., Any], location: _BufferCommHookLocation
    ) -> None:
        """Replaces the broadcast by ``hook(state, named_buffers)``.

        Raises:
            TypeError: The hook is not callable, or ``location`` is not a location.
        """
        if not callable(hook):
            raise TypeError(
                f"The buffer hook must be callable, got {type(hook).__name__}. Pass a function "
                "hook(state, named_buffers)."
            )
        if not isinstance(location, _BufferCommHookLocation):  # the hook would never run
            raise TypeError(
                "the location of a buffer hook must be _BufferCommHookLocation.PRE_FORWARD or "
                f"POST_FORWARD, but got {location!r}."
            )
        self.hook = _BufferCommHook(hook, state, location)
