"""Optimizers that run during backward, as soon as a bucket is averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from ddpx import errors
from ddpx.ddp.arguments.options import Options
from ddpx.params.dtensors import is_dtensor
from ddpx.reducer import Reducer


class HookedWrapper(Protocol):
    """The members of a wrapper that this module uses."""

    module: nn.Module
    gradient_as_bucket_view: bool

    @property
    def reducer(self) -> Reducer: ...

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None: ...


def register_fused(
    wrapper: HookedWrapper,
    options: Options,
    optimizer: type[torch.optim.Optimizer],
    optimizer_args: Sequence[Any],
    optimizer_kwargs: dict[str, Any],
    optimized_params: Iterable[torch.Tensor] | None,
) -> None:
    """Runs an optimizer on each bucket, as DDP's ``_register_fused_optim()``.

    Raises:
        TypeError: The optimizer is not a class.
        RuntimeError: The script has registered a class with torch for the optimizer, and the class
            does not support DDP.
        ValueError: torch has no functional form of the optimizer; parameters are DTensors;
            ``reduce_dtype`` or ``grad_dtype`` is set; or the average is not the mean.
    """
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import (
        _OverlappedStandardOptimizer,
    )
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _hook_then_optimizer,
    )

    if not isinstance(optimizer, type):
        raise TypeError(
            "_register_fused_optim() takes the class of an optimizer, such as torch.optim.SGD, but "
            f"got {type(optimizer).__name__}. Pass arguments of the optimizer after the class."
        )
    _check_allowed("_register_fused_optim()", wrapper.module, options)
    overlapped = _as_overlapped_optim(
        optimizer, optimized_params, *optimizer_args, **optimizer_kwargs
    )
    # A class that the script has registered with torch may have a method of its own.
    if getattr(type(overlapped), "register_ddp", None) is _OverlappedStandardOptimizer.register_ddp:
        hook = _hook_then_optimizer(cast(Any, _average), overlapped._opt_hook_state)
        wrapper.register_comm_hook(weakref.ref(wrapper.reducer), hook)
        return
    try:
        overlapped.register_ddp(wrapper)
    except NotImplementedError as error:
        raise RuntimeError(
            f"{optimizer} does not support overlapped DDP: {type(overlapped).__name__}, which the "
            "script has registered with torch, has no register_ddp(). Run the optimizer after "
            "backward."
        ) from error


def _average(reducer: weakref.ref[Reducer], bucket: dist.GradBucket) -> _Average:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    running = reducer()
    assert running is not None  # the reducer has called this hook
    return _Average(allreduce_hook(running.process_group, bucket))


class _Average:
    """The future of an average, for torch's hook that then runs an optimizer.

    torch's hook would run the optimizer on local gradients if the all-reduce has failed.
    """

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future

    def then(
        self, step: Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Calls ``step`` if the average has no error."""

        def step_if_averaged(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            future.value()  # raises the error
            return step(future)

        return self._future.then(step_if_averaged)


def take_over(wrapper: HookedWrapper, options: Options) -> bool:
    """Makes optimizers of ``_apply_optimizer_in_backward()`` run on averaged gradients.

    Returns:
        Whether the module has such optimizers.
    """
    named = wrapper.module.named_parameters()
    params = [param for _, param in named if hasattr(param, "_in_backward_optimizers")]
    if not params:
        return False
    _check_allowed("_apply_optimizer_in_backward()", wrapper.module, options)
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _apply_optim_in_backward_hook,
    )
    from torch.distributed.optim.apply_optimizer_in_backward import (
        param_to_optim_hook_handle_map,
    )

    for param in params:  # torch's own hooks would step on local gradients
        for handle in param_to_optim_hook_handle_map.get(param, []):
            handle.remove()
    hook = _apply_optim_in_backward_hook(wrapper.gradient_as_bucket_view)
    wrapper.register_comm_hook(weakref.ref(wrapper), _with_result_on_stream(hook))
    return True


def _with_result_on_stream(hook: Any) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """Makes the result of torch's hook wait for the stream of the optimizers.

    torch joins this stream by a callback at the end of backward, before DDP takes the result. The
    reducer of ddpx takes the result earlier.
    """
    stream: torch.Stream = hook.keywords["optim_stream_state"].optim_stream

    def averaged(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook(state, bucket)
        result = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[] if result.device.type == "cpu" else [result.device]
        )
        with stream:
            future.set_result(result)
        return future

    averaged.__qualname__ = hook.__qualname__  # for logging data
    return averaged


def _check_allowed(name: str, module: nn.Module, options: Options) -> None:
    """Raises ValueError if buckets do not hold what the optimizer needs.

    Buckets hold the local shards of DTensors, and sums in ``reduce_dtype``. The optimizer runs in a
    communication hook, before the reducer makes another average than the mean.
    """
    dtensors = [name for name, p in module.named_parameters() if is_dtensor(p)]
    if dtensors:
        raise ValueError(
            f"{name} cannot step DTensor parameters, but the module has "
            f"{errors.count_names(dtensors, 'DTensor parameter')}. Run the optimizer after "
            "backward."
        )
    if options.reduce_dtype is not None or options.grad_dtype is not None:
        raise ValueError(
            f"{name} does not work with reduce_dtype= or grad_dtype=. The optimizer would get "
            "gradients in a dtype that it does not expect. Run the optimizer after backward."
        )
    if options.average != "mean":
        raise ValueError(
            f"{name} does not work with average={options.average!r}. The optimizer would get means "
            "over ranks. Run the optimizer after backward."
        )
