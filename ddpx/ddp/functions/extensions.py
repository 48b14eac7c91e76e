"""The functions of ddpx for wrapped models, beyond the methods of DDP.

Each function is also a method of ``ReducerDDP``, unless the module has an attribute of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpx import errors, health, settings
from ddpx.ddp.backward_hooks.post_sync import PostSyncHook
from ddpx.ddp.fronts.lookup import replica_of
from ddpx.ddp.functions import weights
from ddpx.ddp.functions.synchronized_grads import average_grads
from ddpx.ddp.search.wrapper_search import report_of
from ddpx.planning import BucketPlan, PlanReport, plan_of


class AsMethod:
    """Makes a function a method of wrappers whose module has no attribute of the name.

    Classes derived from DDP often pass unknown names on to their module. A method of ours would
    hide the module's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, wrapper: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        if wrapper is None:
            return self._function
        name = self._function.__name__
        if _has(wrapper.module, name):
            raise AttributeError(name)  # Python then calls nn.Module.__getattr__, which has a text
        return MethodType(self._function, wrapper)


def _has(module: object, name: str) -> bool:
    """Whether ``module`` has the attribute, also one that raises when it is read."""
    try:
        getattr(module, name)
    except AttributeError:
        return False
    except Exception:  # of a property
        return True
    return True


def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Sets whether backwards from now on average gradients.

    The name is that of FSDP2. ``no_sync()`` does the same for a block.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        requires_gradient_sync: True to average gradients, False to keep them local.

    Raises:
        TypeError: ``requires_gradient_sync`` is no truth value.

    Example:
        >>> ddpx.set_requires_gradient_sync(model, False)
        >>> model(inputs).sum().backward()
        >>> model.module.weight.grad  # of this rank alone
        tensor([[8., 8., 8., 8.]])
    """
    syncs = settings.flag("requires_gradient_sync", requires_gradient_sync)
    replica_of(model).reducer.sync_enabled = syncs


def reset(model: nn.Module) -> None:
    """Prepares the wrapper for a new step after a step that failed.

    After an error in ``backward()`` the wrapper does this by itself. A training loop needs the
    call if the loop caught an error outside ``backward()``. After the call, the next forward
    does not report parameters that the last backward left without a gradient. With
    ``average="weights"``, the call forgets the weights of forwards since the last averaged
    backward: clear the gradients before the call. Between complete steps the call has no effect.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Raises:
        RuntimeError: A backward is running.

    Example:
        >>> loss = model(inputs).sum()
        >>> del loss  # this step has no backward
        >>> ddpx.reset(model)
        >>> model(inputs).sum().backward()
    """
    replica_of(model).reducer.reset()


def bucket_plan(model: nn.Module) -> BucketPlan:
    """Returns the buckets of a wrapper, as they are now.

    Buckets are rebuilt once, at the start of the second step in most modes. So make some steps
    before the call. With ``bucket_cap_mb="auto"``, the plan is the lasting one when
    ``ddpx.plan_report(model).final`` is true.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.bucket_plan(model).buckets
        (('weight', 'bias'),)
    """
    replica = replica_of(model)
    return plan_of(replica.reducer.plan.buckets, replica.managed)


def plan_report(model: nn.Module) -> PlanReport | None:
    """Returns what ``bucket_cap_mb="auto"`` has found so far.

    ``report.final`` tells whether the search has ended. ``str(report)`` is a sentence: the chosen
    plan with its gain, or the reason why the default plan was kept. Rank 0 also logs this sentence
    at the end of the search, at level INFO of the logger ``ddpx.planning``.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Returns:
        None without ``bucket_cap_mb="auto"``.

    Example:
        >>> print(ddpx.plan_report(model))
        None
        >>> small = ddpx.ReducerDDP(nn.Linear(4, 1, bias=False), bucket_cap_mb="auto")
        >>> print(ddpx.plan_report(small))
        the default plan was kept, after 0 steps: the model has one gradient
    """
    return report_of(replica_of(model))


def wait_for_gradients(model: nn.Module) -> None:
    """Waits until the averages of the last backward are in ``param.grad``.

    The call belongs between ``backward()`` and ``optimizer.step()``, in each step. Over NCCL the
    host queues all-reduces, and does not wait for them. Without this call, the host also queues the
    optimizer's step before it learns that a rank is lost, and the step may apply wrong gradients.
    :func:`ddpx.shrink` then has no state to continue from. Over gloo and shared memory, backward
    has waited already.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Raises:
        RankError: The group cannot continue. The gradients may be wrong.

    Example:
        >>> model(inputs).sum().backward()
        >>> ddpx.wait_for_gradients(model)
        >>> optimizer.step()
    """
    replica_of(model).reducer.wait_for_gradients()


def set_check_finite(model: nn.Module, enabled: bool = True) -> None:
    """Sets whether ``backward()`` raises if a gradient has NaN or infinity.

    The check is off by default. If one rank has such a gradient, all ranks of the process
    group raise. The error names the step, the rank and the parameter.

    The setting must be the same on all ranks. The check reads every gradient, and adds an
    all-reduce of a few bytes to each step. ``DDPX_CHECK_FINITE=1`` turns the check on without
    a change of the script. Do not combine the check with a gradient scaler: a scaler expects
    such steps and skips them.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        enabled: True to turn the check on, False to turn it off. Default True.

    Raises:
        TypeError: ``enabled`` is not a bool.
        RuntimeError: A backward is running.

    Example:
        >>> ddpx.set_check_finite(model)
        >>> (model(inputs) * float("inf")).sum().backward()
        Traceback (most recent call last):
            ...
        RuntimeError: ...
    """
    if not isinstance(enabled, bool):
        raise errors.not_a_flag("enabled", enabled)
    replica_of(model).reducer.set_check_finite(enabled)


def set_weight(model: nn.Module, weight: float | torch.Tensor) -> None:
    """Sets how many items the loss of the next forward sums over.

    The wrapper needs ``average="weights"``, and each forward that records a graph needs a weight.
    ``param.grad`` is then the sum of the gradients of all ranks, divided by the sum of their
    weights. Both sums include the micro-steps in ``no_sync()`` since the last averaged backward.

    The host does not wait for a tensor on a device. A negative, infinite or undefined number in
    such a tensor makes all gradients NaN, and the next averaged backward raises the error. The
    same holds if all weights are 0.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        weight: The number of items, such as tokens: a number, or a tensor with one element. 0 if
            this rank has no items.

    Raises:
        TypeError: ``weight`` is not a number.
        ValueError: ``weight`` is negative, infinite or NaN.
        RuntimeError: The wrapper has another ``average``.

    Example:
        >>> weighted = ddpx.ReducerDDP(nn.Linear(4, 1), average="weights")
        >>> ddpx.set_weight(weighted, 8 * (1 + dist.get_rank()))  # 8 items, or 16
        >>> (weighted(inputs).sum() * (1 + dist.get_rank())).backward()
        >>> weighted.module.bias.grad
        tensor([1.])
    """
    weights.set_weight(replica_of(model), weight)


def register_post_sync_hook(
    model: nn.Module, param_or_module: torch.Tensor | nn.Module, fn: PostSyncHook
) -> RemovableHandle:
    """Calls ``fn(param)`` after each synchronized backward, when ``param.grad`` is averaged.

    An exception of ``fn`` reaches the caller of ``backward()``.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        param_or_module: A parameter, or a module. For a module, the wrapper calls ``fn`` for
            each parameter of the module that the wrapper averages.
        fn: The hook. The return value is ignored.

    Returns:
        A handle. ``handle.remove()`` removes the hook.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: This wrapper averages none of the parameters.

    Example:
        >>> def print_norm(param):
        ...     print(f"{param.grad.norm():.1f}")
        >>> handle = ddpx.register_post_sync_hook(model, model.module.weight, print_norm)
        >>> model(inputs).sum().backward()
        32.0
        >>> handle.remove()
    """
    replica = replica_of(model)
    return replica.post_sync.register(replica.reducer, replica.managed, param_or_module, fn)


def synchronized_grads(
    model: nn.Module,
    loss: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Computes ``torch.autograd.grad(loss, tensors)`` and averages the result over ranks.

    Every rank calls this method with the same number of tensors, of the same shapes.
    ``param.grad`` does not change.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        loss: A scalar tensor.
        tensors: Parameters, or other tensors of the graph.
        retain_graph: Keep the graph for another backward. Default False.
        allow_unused: Allow tensors that the loss does not depend on. Default False.

    Returns:
        A gradient for each tensor, in the tensor's shape. A rank that did not use a tensor
        contributes zeros. The gradient is None if no rank used the tensor.

    Raises:
        RuntimeError: The loss does not depend on a tensor, and ``allow_unused`` is False.
        TypeError: A gradient has a dtype of 8 bits.
        RankFailure: A rank was lost.

    Example:
        >>> loss = model(inputs).sum()
        >>> ddpx.synchronized_grads(model, loss, [model.module.weight])
        (tensor([[16., 16., 16., 16.]]),)
    """
    tensors = tuple(tensors)
    replica = replica_of(model)
    reducer = replica.reducer
    syncs, reducer.sync_enabled = reducer.sync_enabled, False
    try:
        grads = torch.autograd.grad(
            loss, tensors, retain_graph=retain_graph, allow_unused=allow_unused
        )
    finally:
        reducer.sync_enabled = syncs
    with health.between_steps(replica.group):
        return average_grads(
            grads, tensors, loss.device, replica.group, replica.options.reduce_dtype
        )
