"""DDP's names for the synchronization of buffers.

Forward is made of these methods. A derived class may override each of them, or call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from ddpx import health, params
from ddpx.comm import state_sync
from ddpx.comm.collectives import all_reduce
from ddpx.comm.process_group import is_alone, resolve_group
from ddpx.ddp.replica.replica import Replica
from ddpx.reducer import Reducer


class BufferInterface:
    """Attributes and methods of DDP that concern buffers."""

    device: torch.device
    broadcast_bucket_size: int
    forward_sync_buffers: bool  # whether forwards broadcast buffers
    require_forward_param_sync: bool  # whether the last forward was synchronized
    modules_buffers: list[torch.Tensor]  # the buffers to broadcast
    named_module_buffers: dict[str, torch.Tensor]  # the same, by name, for a buffer hook
    buffer_hook: _BufferCommHook | None  # the hook in place of the broadcast
    _ddpx: Replica  # everything that ddpx keeps; all other attributes have names of DDP
    _join_config: Any

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks to average over. Assignment changes the ranks of broadcasts, as in DDP."""
        return self._ddpx.group

    @process_group.setter
    def process_group(self, value: dist.ProcessGroup | None) -> None:
        self._ddpx.group = resolve_group(value)

    @property
    def reducer(self) -> Reducer:
        """The reducer."""
        return self._ddpx.averaging.reducer

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

    def _assign_modules_buffers(self) -> None:
        """Reads the buffers of the module again, because user code may have replaced them."""
        replica = self._ddpx
        named = params.named_managed_buffers(replica.module, replica.ignored)
        found = dict(named)
        # nn.Module's assignment of attributes takes longer, and each forward comes here.
        vars(self).update(named_module_buffers=found, modules_buffers=list(found.values()))

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Replaces the broadcast by ``hook(state, named_buffers)``, before or after forward.

        The end of backward waits for the futures that the hook returns in a list.

        Raises:
            TypeError: The hook is not callable, or ``comm_hook_location`` is not a location.
        """
        if not callable(hook):
            raise TypeError(
                f"The buffer hook must be callable, got {type(hook).__name__}. Pass a function "
                "hook(state, named_buffers)."
            )
        if not isinstance(comm_hook_location, _BufferCommHookLocation):  # it would never run
            raise TypeError(
                "the location of a buffer hook must be _BufferCommHookLocation.PRE_FORWARD or "
                f"POST_FORWARD, but got {comm_hook_location!r}."
            )
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Whether this forward synchronizes buffers before the module runs."""
        return self.will_sync_module_buffers() and (
            self.buffer_hook is None
            or self.buffer_hook.buffer_comm_hook_location is _BufferCommHookLocation.PRE_FORWARD
        )

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Whether this forward synchronizes buffers after the module has run."""
        return (
            self.will_sync_module_buffers()
            and self.buffer_hook is not None
            and self.buffer_hook.buffer_comm_hook_location is _BufferCommHookLocation.POST_FORWARD
        )

    def _sync_buffers(self) -> None:
        """Synchronizes the buffers with those of rank 0; in a join context, of the highest rank."""
        if _syncs_with_nobody(self):
            return
        with health.waiting_for_buffers(self.reducer.monitor), torch.no_grad():
            source = 0
            if self._join_config.enable:  # rank 0 may have no more batches
                source = self._find_common_rank(self._distributed_rank, True)
            self._assign_modules_buffers()
            # Autograd may have saved a buffer in an earlier forward. A changed version would make
            # the backward of that forward raise.
            versioned = tuple(each for each in self.modules_buffers if not each.is_inference())
            with torch.autograd._unsafe_preserve_version_counter(versioned):
                self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        """Runs the buffer hook. Without a hook, broadcasts the buffers of one rank."""
        hook = self.buffer_hook
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcasts ``bufs``, or all buffers. Buffer hooks call this method."""
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcasts ``tensors``. Small tensors share a broadcast of at most ``buffer_size``."""
        state_sync.broadcast(tensors, self.process_group, authoritative_rank, buffer_size)

    @property
    def _distributed_rank(self) -> int:
        """This rank in the process group."""
        return self.process_group.rank()

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """Returns the highest ``input_rank`` of the ranks whose ``rank_cond`` is true.

        A collective call.

        Raises:
            ValueError: The condition is true on no rank.
        """
        candidate = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        rank = int(all_reduce(candidate, self.process_group, dist.ReduceOp.MAX).item())
        if rank == -1:
            raise ValueError(
                "_find_common_rank() got rank_cond=False on every rank. Pass True on one rank or "
                "more."
            )
        return rank


# Where a derived class sees the broadcast of a rank that is alone.
_SEE_BROADCAST = (
    "_assign_modules_buffers",
    "_sync_module_buffers",
    "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced",
)


def _syncs_with_nobody(wrapper: BufferInterface) -> bool:
    """Whether this rank is alone, and no hook and no derived class sees the broadcast."""
    alone = is_alone(wrapper.process_group) and wrapper.buffer_hook is None
    return alone and all(
        getattr(type(wrapper), name) is getattr(BufferInterface, name) for name in _SEE_BROADCAST
    )
