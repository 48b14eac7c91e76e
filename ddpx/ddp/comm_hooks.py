"""Communication hooks: what may take the all-reduce's place, as in DDP."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpx import errors
from ddpx.ddp.options import Options
from ddpx.params.dtensors import is_dtensor
from ddpx.reducer import Reducer


class CommHooks(nn.Module):
    """The part of a wrapper that registers communication hooks."""

    module: nn.Module
    process_group: dist.ProcessGroup
    reducer: Reducer
    gradient_as_bucket_view: bool
    _options: Options
    _comm_hook_name: str | None = None
    _hook_holds_group = False
    _hook_state: object = None
    _steps_in_backward = False  # an optimizer runs as soon as a bucket is averaged
    _last_error: str | None = None

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Makes ``hook(state, bucket)`` communicate each bucket, in place of the all-reduce.

        The interface is that of DDP.

        Args:
            state: The first argument of the hook.
            hook: A function. ``bucket`` is a ``torch.distributed.GradBucket`` with gradients that
                are not divided by the number of ranks. The function returns a
                ``torch.futures.Future`` of a tensor with the averaged gradients, in the shape of
                ``bucket.buffer()``.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The hook has annotations of other types.
            RuntimeError: The wrapper has a hook already, or a backward is running.

        Example:
            >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
            >>> model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            >>> model(inputs).sum().backward()
            >>> model.module.weight.grad
            tensor([[16., 16., 16., 16.]])
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._last_error = f"{type(error).__name__}: {error}"
            raise
        self.reducer.set_comm_hook(state, _checked(hook))
        self._comm_hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self._hook_state = state

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """``ALLREDUCE`` divides and sums; ``FP16_COMPRESS`` does so in half precision, in C++."""
        self.reducer.set_builtin_comm_hook(comm_hook_type, self.process_group)
        self._comm_hook_name = str(comm_hook_type)
        self._hook_holds_group = True

    def _reduce_in(self, dtype: torch.dtype, compute_dtype: torch.dtype | None) -> None:
        """Gradients arrive in ``compute_dtype``; buckets are summed in ``dtype``."""
        self.reducer.set_mixed_precision(compute_dtype, dtype, self.process_group)
        self._comm_hook_name = f"mixed_precision({dtype})"
        self._hook_holds_group = True

    def _check_group_can_change(self) -> None:
        if self._hook_holds_group:
            raise errors.group_held_by_hook()

    def _hook_state_holds_group(self) -> bool:
        state = self._hook_state
        group = getattr(state, "process_group", None)  # as torch's own states have it
        return isinstance(state, dist.ProcessGroup) or isinstance(group, dist.ProcessGroup)

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Runs an optimizer on each bucket as soon as it is averaged, as in DDP.

        Raises:
            RuntimeError: torch has no functional form of ``optim``.
            ValueError: parameters are DTensors; ``reduce_dtype`` or ``grad_dtype`` is set.
        """
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        self._check_optimizers_can_run_in_backward("_register_fused_optim()")
        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise errors.optimizer_does_not_overlap(optim) from error
        self._steps_in_backward = True

    def _run_optimizers_in_backward(self) -> None:
        """If ``_apply_optimizer_in_backward`` was used on the params: after they are averaged."""
        params = [p for p in self.module.parameters() if hasattr(p, "_in_backward_optimizers")]
        if not params:
            return
        self._check_optimizers_can_run_in_backward("_apply_optimizer_in_backward()")
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for param in params:  # torch's own hooks would step on local gradients
            for handle in param_to_optim_hook_handle_map.get(param, []):
                handle.remove()
        self.register_comm_hook(
            weakref.ref(self), _apply_optim_in_backward_hook(self.gradient_as_bucket_view)
        )
        self._steps_in_backward = True

    def _check_optimizers_can_run_in_backward(self, name: str) -> None:
        """Torch's hooks step on what lies in buckets: local shards, sums in ``reduce_dtype``."""
        dtensors = [name for name, p in self.module.named_parameters() if is_dtensor(p)]
        if dtensors:
            raise errors.optimizer_in_backward_of_dtensors(name, dtensors)
        if self._options.reduce_dtype is not None or self._options.grad_dtype is not None:
            raise errors.optimizer_in_backward_with_dtypes(name)


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, which must return a future: torch's C++ core crashes over None."""

    def checked(state: object, bucket: dist.GradBucket) -> Any:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise errors.hook_without_future(future)
        return future

    return checked


def check_hook(hook: Callable[..., Any]) -> None:
    """Raises TypeError or ValueError if ``hook`` cannot be a communication hook."""
    if not callable(hook):
        raise errors.hook_not_callable(hook)
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    bucket_types = (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket", "GradBucket")
    if bucket is not None and bucket.annotation not in bucket_types:
        raise errors.hook_bucket_annotation(bucket.annotation)
    returned = signature.return_annotation
    future = torch.futures.Future[torch.Tensor]
    if not (returned in (inspect.Signature.empty, future) or "Future" in str(returned)):
        raise errors.hook_return_annotation(returned)
