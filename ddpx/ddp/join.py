"""Training with uneven inputs: ranks that have run out shadow what the others communicate.

The context manager is torch's ``torch.distributed.algorithms.Join``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddpx import health, params
from ddpx.comm import state_sync
from ddpx.ddp.buffers import BufferSync
from ddpx.reducer import Reducer


class UnevenInputs(BufferSync, Joinable):
    """The part of a wrapper that takes part in a join context."""

    reducer: Reducer
    device: torch.device
    require_backward_grad_sync: bool
    _divide_by_initial_world_size = True
    _joined_before = False
    _num_joins = 0  # join contexts that were made
    _open_join: int | None = None  # the number of the one that has not ended
    _authoritative_rank: int  # whose model all ranks got at the end of a join context

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context for a training loop in which ranks have different numbers of batches.

        A rank that has no more batches takes part in the communication of the other ranks. At the
        end of the context, all ranks get the model of the last rank that had batches.

        Args:
            divide_by_initial_world_size: True, the default, divides gradients by the number of all
                ranks. False divides them by the number of ranks that still have batches.
            enable: False makes the context do nothing. Default True.
            throw_on_early_termination: Raise on all ranks when the first rank has no more batches.
                Default False.

        Returns:
            A ``torch.distributed.algorithms.Join`` context.

        Raises:
            RuntimeError: At the end of the batches of any rank, with
                ``throw_on_early_termination``.

        Example:
            >>> batches = [inputs] * (2 + dist.get_rank())
            >>> with model.join():
            ...     for batch in batches:
            ...         model(batch).sum().backward()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that a rank without further batches runs.

        ``torch.distributed.algorithms.Join`` calls this method.

        Args:
            kwargs: ``divide_by_initial_world_size``, as for :meth:`join`.

        Example:
            >>> from torch.distributed.algorithms import Join
            >>> with Join([model]):
            ...     model(inputs).sum().backward()
        """
        self._joined_before = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        self._num_joins += 1
        self._open_join = self._num_joins
        shadow = _Shadow(self)
        # An exception that leaves the context calls no hook, but the context lets its hooks go.
        ended = weakref.finalize(shadow, _leave_join, weakref.ref(self), self._open_join)
        ended.atexit = False
        return shadow

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` communicates."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group in which ``Join`` communicates."""
        return self.process_group

    def _begin_joined_forward(self) -> None:
        """Tells ranks that have run out that this one makes another step."""
        work = Join.notify_join_context(self)
        divisor = None
        if work is not None and not self._divide_by_initial_world_size:
            health.wait(work, self.process_group, self.device)
            divisor = int(work.get_future().wait()[0].item())
        self.reducer.set_divisor(divisor)

    def _agree_on_sync(self, has_inputs: bool) -> torch.Tensor:
        """1 or more if some rank's next backward is synchronised."""
        syncs = has_inputs and self.require_backward_grad_sync
        if has_inputs and self._open_join is not None:
            self.reducer.announce_joined_step(syncs)
        flag = torch.full((1,), float(syncs), device=self.device)
        work = dist.all_reduce(flag, group=self.process_group, async_op=True)
        health.wait(work, self.process_group, self.device)
        return flag

    def _buffer_source(self) -> int:
        if not self._join_config.enable:
            return super()._buffer_source()
        return self._last_rank_that(True)

    def _last_rank_that(self, claims: bool) -> int:
        rank = self.process_group.rank() if claims else -1
        highest = torch.tensor([rank], device=self.device)
        maximum = dist.ReduceOp.MAX
        work = dist.all_reduce(highest, op=maximum, group=self.process_group, async_op=True)
        health.wait(work, self.process_group, self.device)
        return int(highest.item())


def _leave_join(wrapper: weakref.ref[UnevenInputs], number: int | None) -> None:
    model = wrapper()
    if model is not None and number is not None and model._open_join == number:
        model._open_join = None
        model.reducer.leave_join()


class _Shadow(JoinHook):
    """Makes the collective calls of a step without inputs."""

    def __init__(self, wrapper: UnevenInputs) -> None:
        self._wrapper = wrapper
        super().__init__()

    def main_hook(self) -> None:
        wrapper = self._wrapper
        wrapper.reducer.rebuild_buckets()
        hook = wrapper.buffer_hook
        before_forward = hook is None or (
            hook.buffer_comm_hook_location is _BufferCommHookLocation.PRE_FORWARD
        )
        if before_forward and wrapper.will_sync_module_buffers():
            source = wrapper._last_rank_that(False)
            state_sync.broadcast(wrapper.modules_buffers, wrapper.process_group, source)
        syncs = bool(wrapper._agree_on_sync(has_inputs=False).item())
        wrapper.require_forward_param_sync = syncs
        if syncs:
            wrapper.reducer.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        wrapper = self._wrapper
        source = wrapper._last_rank_that(is_last_joiner)
        wrapper._authoritative_rank = source
        state = params.module_state(
            wrapper.module, wrapper.parameters_to_ignore, wrapper.forward_sync_buffers
        )
        state_sync.broadcast(state, wrapper.process_group, source)
        wrapper.reducer.set_divisor(None)
        _leave_join(weakref.ref(wrapper), wrapper._open_join)
