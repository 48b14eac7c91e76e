"""Keeps the buffers of ranks equal while training: broadcast, or a hook of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ddpx import errors, health, params
from ddpx.comm import state_sync
from ddpx.reducer import Reducer


class BufferSync(nn.Module):
    """The part of a wrapper that synchronises buffers at forward."""

    module: nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: frozenset[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    modules_buffers: list[torch.Tensor]
    named_module_buffers: dict[str, torch.Tensor]
    buffer_hook: _BufferCommHook | None = None
    reducer: Reducer

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Returns whether the next forward synchronizes buffers.

        Example:
            >>> model.will_sync_module_buffers()  # a linear layer has no buffers
            False
        """
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self.modules_buffers)
        )

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Lets ``hook(state, named_buffers)`` take the broadcast's place, before or after forward.

        Futures that it returns in a list are waited for at the end of backward.
        """
        if not callable(hook):
            raise errors.buffer_hook_not_callable(hook)
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts ``bufs``, or all buffers; for use in a buffer hook."""
        tensors = self.modules_buffers if bufs is None else bufs
        state_sync.broadcast(tensors, self.process_group, authoritative_rank)

    def _assign_modules_buffers(self) -> None:
        """Looks for the module's buffers anew: user code may have replaced them."""
        self.named_module_buffers = dict(
            params.named_managed_buffers(self.module, self.parameters_to_ignore)
        )
        self.modules_buffers = list(self.named_module_buffers.values())

    def _sync_buffers_at(self, location: _BufferCommHookLocation) -> None:
        hook = self.buffer_hook
        due = hook.buffer_comm_hook_location if hook else _BufferCommHookLocation.PRE_FORWARD
        if hook is None and self.process_group.size() == 1:
            return
        if due is location and self.will_sync_module_buffers():
            with health.waiting_for_buffers(self.reducer.monitor):
                self._sync_buffers()
            if location is _BufferCommHookLocation.PRE_FORWARD and torch.is_grad_enabled():
                self.reducer.begin_forward()

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            source = self._buffer_source()
            self._assign_modules_buffers()
            # Autograd may have saved a buffer in an earlier forward: it must not see a new version.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                if self.buffer_hook is None:
                    state_sync.broadcast(self.modules_buffers, self.process_group, source)
                    return
                futures = self.buffer_hook.buffer_comm_hook(
                    self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers
                )
        if futures is not None:
            self._wait_after_backward(futures)

    def _buffer_source(self) -> int:
        """The rank whose buffers count."""
        return 0

    def _wait_after_backward(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        raise NotImplementedError
