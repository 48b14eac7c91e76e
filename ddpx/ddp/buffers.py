"""Keeps the buffers of all ranks equal during training: by a broadcast, or by a user's hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ddpx import params
from ddpx.comm import state_sync
from ddpx.comm.process_group import is_alone

Futures = Sequence[torch.futures.Future[Any]]


class BufferSync:
    """The buffers of one module, and the rule by which ranks synchronize them.

    A wrapper owns this object and calls it from forward.

    Args:
        module: The wrapped module.
        ignored: Names of buffers that ranks do not synchronize.
        enabled: Whether forwards synchronize buffers (``forward_sync_buffers``).
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], enabled: bool) -> None:
        self._module = module
        self._ignored = ignored
        self.enabled = enabled
        # As in DDP, a forward skips the broadcast if the forward before it was not synchronized.
        self.last_forward_was_synchronized = True
        self.hook: _BufferCommHook | None = None
        self.refresh()

    def refresh(self) -> None:
        """Reads the buffers of the module again, because user code may have replaced them."""
        self.named = dict(params.named_managed_buffers(self._module, self._ignored))
        self.tensors = list(self.named.values())

    def will_sync(self) -> bool:
        """Whether the next forward synchronizes buffers."""
        return self.last_forward_was_synchronized and self.enabled and bool(self.tensors)

    def is_due(self, location: _BufferCommHookLocation, group: dist.ProcessGroup) -> bool:
        """Whether this forward synchronizes buffers at ``location``."""
        if self.hook is None:
            if location is not _BufferCommHookLocation.PRE_FORWARD or is_alone(group):
                return False
        elif self.hook.buffer_comm_hook_location is not location:
            return False
        return self.will_sync()

    def set_hook(
        self, state: object, hook: Callable[..., Any], location: _BufferCommHookLocation
    ) -> None:
        """Replaces the broadcast by ``hook(state, named_buffers)``.

        Raises:
            TypeError: The hook is not callable.
        """
        if not callable(hook):
            raise _hook_not_callable(hook)
        self.hook = _BufferCommHook(hook, state, location)

    def broadcast(
        self, tensors: Sequence[torch.Tensor] | None, group: dist.ProcessGroup, source: int
    ) -> None:
        """Broadcasts ``tensors``, or all buffers, from the rank ``source``."""
        state_sync.broadcast(self.tensors if tensors is None else tensors, group, source)

    def sync(self, group: dist.ProcessGroup, source: int) -> Futures | None:
        """Synchronizes the buffers, with the values of the rank ``source``.

        Returns:
            Futures of a hook. The end of backward waits for them.
        """
        self.refresh()
        # Autograd may have saved a buffer in an earlier forward. A changed version would make the
        # backward of that forward raise.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.tensors)):
            if self.hook is None:
                self.broadcast(None, group, source)
                return None
            return self.hook.buffer_comm_hook(self.hook.buffer_comm_hook_state, self.named)


def _hook_not_callable(hook: object) -> TypeError:
    return TypeError(
        f"a buffer hook must be callable, but got {type(hook).__name__}. "
        "Pass a function hook(state, named_buffers)."
    )
