"""What ddpx offers beyond DDP: hooks after synchronisation, averaged ``autograd.grad``, reset."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpx import errors
from ddpx.dtensors import local_part
from ddpx.options import Options
from ddpx.params import ManagedParam
from ddpx.reducer import Reducer

PostSyncHook = Callable[[torch.Tensor], None]


class GradAccess(nn.Module):
    """The part of a wrapper that hands averaged gradients to the user."""

    process_group: dist.ProcessGroup
    reducer: Reducer
    require_backward_grad_sync: bool
    _options: Options
    _post_sync_hooks: dict[int, tuple[list[torch.Tensor], PostSyncHook]]
    _post_backward_futures: list[torch.futures.Future[Any]]

    def _managed(self) -> Sequence[ManagedParam]:
        raise NotImplementedError

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards from now on average gradients; named as in FSDP2.

        ``no_sync()`` does the same for a block.
        """
        self.require_backward_grad_sync = requires_gradient_sync

    def reset(self) -> None:
        """Makes the wrapper ready for a step again after one that failed.

        Steps begin afresh by themselves after an error that backward raised; this is for loops that
        caught one elsewhere. Harmless between steps.

        Raises:
            RuntimeError: a backward runs.
        """
        self.reducer.reset()

    def set_check_finite(self, enabled: bool = True) -> None:
        """Whether ``backward()`` raises if a gradient has NaN or infinity. Off by default.

        If one rank has such a gradient, all ranks of the wrapper's process group raise, and the
        error names step, rank and parameter.

        It costs a look at every gradient and an all-reduce of a few bytes a step, and must be the
        same on all ranks. ``DDPX_CHECK_FINITE=1`` turns it on for scripts that cannot be edited.
        Not together with a gradient scaler, which expects such steps and skips them.

        Raises:
            RuntimeError: a backward runs.
        """
        self.reducer.set_check_finite(enabled)

    def register_post_sync_hook(
        self, param_or_module: torch.Tensor | nn.Module, fn: PostSyncHook
    ) -> RemovableHandle:
        """Calls ``fn(param)`` after each synchronised backward, when ``param.grad`` is averaged.

        For a module: for each of its params that this wrapper averages. What ``fn`` raises reaches
        the caller of ``backward()``.

        Raises:
            ValueError: nothing of it is averaged by this wrapper.
        """
        wanted = (
            {id(param) for param in param_or_module.parameters()}
            if isinstance(param_or_module, nn.Module)
            else {id(param_or_module)}
        )
        params: list[torch.Tensor] = [p.tensor for p in self._managed() if id(p.tensor) in wanted]
        if not params:
            raise errors.not_averaged_here()
        handle = RemovableHandle(self._post_sync_hooks)
        self._post_sync_hooks[handle.id] = (params, fn)
        self._call_after_sync()
        return handle

    def synchronized_grads(
        self,
        loss: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        allow_unused: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad(loss, tensors)``, averaged over ranks.

        Every rank calls it with as many tensors of the same shapes. ``param.grad`` stays as it is.

        Args:
            loss: a scalar.
            tensors: parameters or other tensors of the graph.
            retain_graph: keep the graph for another backward.
            allow_unused: let tensors be unused by the loss; None for those that no rank used.

        Returns:
            A gradient per tensor; a tensor that only some ranks used counts zeros from the others.
        """
        tensors = tuple(tensors)
        syncs = self.require_backward_grad_sync
        self.require_backward_grad_sync = False  # local gradients are what is wanted here
        try:
            grads = torch.autograd.grad(
                loss, tensors, retain_graph=retain_graph, allow_unused=allow_unused
            )
        finally:
            self.require_backward_grad_sync = syncs
        world_size, reduce_dtype = self.process_group.size(), self._options.reduce_dtype
        used = torch.tensor([float(grad is not None) for grad in grads], device=loss.device)
        dist.all_reduce(used, group=self.process_group)
        averaged: list[torch.Tensor | None] = []
        for grad, tensor, num_users in zip(grads, tensors, used.tolist(), strict=True):
            if num_users == 0:
                averaged.append(None)
                continue
            local = torch.zeros_like(tensor) if grad is None else grad
            dtype = reduce_dtype if reduce_dtype and local.is_floating_point() else local.dtype
            mean = (local.to(dtype) * (1 / world_size)).detach().contiguous()
            real = torch.view_as_real(mean) if mean.is_complex() else mean
            dist.all_reduce(local_part(real), group=self.process_group)
            averaged.append(mean.to(local.dtype))
        return tuple(averaged)

    def _wait_after_backward(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._post_backward_futures.extend(futures)
        self._call_after_sync()

    def _call_after_sync(self) -> None:
        """Only now, so that a step without hooks never comes back to Python."""
        weak = weakref.ref(self)

        def after_sync() -> None:
            wrapper = weak()
            if wrapper is not None:
                wrapper._after_sync()

        self.reducer.set_after_sync(after_sync)

    def _after_sync(self) -> None:
        futures, self._post_backward_futures = self._post_backward_futures, []
        for future in futures:
            future.wait()
        for params, fn in list(self._post_sync_hooks.values()):
            for param in params:
                fn(param)
