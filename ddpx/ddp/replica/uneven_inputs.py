"""Uneven inputs: a rank without further batches takes part in the communication of other ranks.

The context manager is torch's ``torch.distributed.algorithms.Join``.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from ddpx.comm.collectives import all_reduce, wait_for
from ddpx.reducer import Reducer


class JoinedWrapper(Protocol):
    """The members of a wrapper that a rank without batches uses."""

    device: torch.device
    require_forward_param_sync: bool
    _ddpx: Any  # the replica, whose module imports this one

    @property
    def process_group(self) -> dist.ProcessGroup: ...
    @property
    def reducer(self) -> Reducer: ...
    def _check_and_sync_module_buffers(self) -> None: ...
    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None: ...
    def _sync_final_model(self, is_last_joiner: bool) -> None: ...


class UnevenInputs:
    """The state of one wrapper in join contexts. A wrapper owns this object.

    Attributes:
        joined_before: Whether the wrapper has been in a join context.
    """

    def __init__(self) -> None:
        self.joined_before = False
        self._divide_by_initial_world_size = True
        self._num_contexts = 0
        self._open_context: int | None = None  # the number of the context that has not ended

    def make_hook(self, wrapper: JoinedWrapper, divide_by_initial_world_size: bool) -> JoinHook:
        """Makes the hook of a new join context."""
        self.joined_before = True
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._num_contexts += 1
        self._open_context = self._num_contexts
        hook = _ShadowSteps(self, wrapper)
        # An exception that leaves the context calls no hook. But the context then drops its hooks.
        ended = weakref.finalize(
            hook, _leave, weakref.ref(self), weakref.ref(wrapper), self._open_context
        )
        ended.atexit = False
        return hook

    @property
    def depends_on_other_ranks(self) -> bool:
        """Whether a forward depends on which ranks have inputs.

        After the end of a context, torch still lets each forward notify other ranks.
        """
        return self._open_context is not None or not self._divide_by_initial_world_size

    def begin_forward(self, wrapper: JoinedWrapper) -> None:
        """Tells ranks without batches that this rank makes another step."""
        # The wrapper is a Joinable, which a Protocol cannot express.
        work = Join.notify_join_context(wrapper)  # type: ignore[arg-type]
        divisor = None
        if work is not None and not self._divide_by_initial_world_size:
            wait_for(work, wrapper.process_group, wrapper.device)
            divisor = int(work.get_future().wait()[0].item())
        wrapper.reducer.set_divisor(divisor)

    def announce_step(self, reducer: Reducer, device: torch.device) -> None:
        """Announces to ranks without batches whether the next backward of this rank averages."""
        syncs = reducer.sync_enabled
        if self._open_context is not None:
            reducer.announce_joined_step(syncs)
        # Not torch.tensor(): a graph cannot capture a copy from the host.
        all_reduce(torch.full((1,), float(syncs), device=device), reducer.process_group)

    def receive_step(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Returns, on a rank without batches, whether the next backward of the others averages."""
        return bool(all_reduce(torch.zeros(1, device=device), group).item())

    def leave(self, reducer: Reducer, number: int | None = None) -> None:
        """Ends the open context, or only the context of this number."""
        if self._open_context is not None and number in (None, self._open_context):
            self._open_context = None
            reducer.leave_join()


def _leave(
    uneven: weakref.ref[UnevenInputs], wrapper: weakref.ref[JoinedWrapper], number: int
) -> None:
    state, model = uneven(), wrapper()
    if state is not None and model is not None:
        state.leave(model.reducer, number)


class _ShadowSteps(JoinHook):
    """Makes the collective calls of steps for which this rank has no inputs."""

    def __init__(self, uneven: UnevenInputs, wrapper: JoinedWrapper) -> None:
        self._uneven = uneven
        self._wrapper = wrapper
        super().__init__()

    def main_hook(self) -> None:
        """Takes part in one step of the other ranks."""
        wrapper = self._wrapper
        wrapper.reducer.rebuild_buckets()
        wrapper._check_and_sync_module_buffers()
        syncs = bool(wrapper._check_global_requires_backward_grad_sync(is_joined_rank=True))
        wrapper.require_forward_param_sync = syncs
        if syncs:
            wrapper.reducer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last rank that had batches."""
        wrapper = self._wrapper
        wrapper._sync_final_model(is_last_joiner)
        wrapper.reducer.set_divisor(None)
        self._uneven.leave(wrapper.reducer)
        if wrapper._ddpx.search is not None:
            wrapper._ddpx.search.resume()
