"""Functions in the place of methods that ``ReducerDDP`` has from DDP.

Each function takes a wrapper, a module that was passed to ``ddpx.replicate()``, or a module around
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ddpx import settings
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.fronts.lookup import front_of


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Keeps gradients local if forward, backward or both run in this context.

    As :meth:`ReducerDDP.no_sync`.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> with ddpx.no_sync(model):
        ...     model(inputs).sum().backward()
        >>> model.module.weight.grad  # of this rank alone
        tensor([[8., 8., 8., 8.]])
    """
    return front_of(model).no_sync()


def join(
    model: nn.Module,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Join:
    """Returns a context for a training loop in which ranks have different numbers of batches.

    As :meth:`ReducerDDP.join`.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        divide_by_initial_world_size: True, the default, divides gradients by the number of all
            ranks. False divides them by the number of ranks that still have batches.
        enable: False makes the context do nothing. Default True.
        throw_on_early_termination: Raise on all ranks when the first rank has no more batches.
            Default False.

    Example:
        >>> batches = [inputs] * (2 + dist.get_rank())
        >>> with ddpx.join(model):
        ...     for batch in batches:
        ...         model(batch).sum().backward()
    """
    return front_of(model).join(divide_by_initial_world_size, enable, throw_on_early_termination)


def as_ddp(model: nn.Module) -> Front:
    """Returns an object with DDP's methods, for functions of torch that take a DDP.

    Such functions are ``torch.distributed.algorithms.Join`` and ``hook_with_zero_step()``. The
    object of a wrapper is the wrapper itself.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> from torch.distributed.algorithms import Join
        >>> with Join([ddpx.as_ddp(model)]):
        ...     model(inputs).sum().backward()
    """
    return front_of(model)


def register_comm_hook(model: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Makes ``hook(state, bucket)`` communicate each bucket, in place of the all-reduce.

    As :meth:`ReducerDDP.register_comm_hook`.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        state: The first argument of the hook.
        hook: A function of the state and a ``torch.distributed.GradBucket``, which returns a
            future of the averaged gradients.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> ddpx.register_comm_hook(model, None, default_hooks.bf16_compress_hook)
        >>> model(inputs).sum().backward()
        >>> model.module.weight.grad
        tensor([[16., 16., 16., 16.]])
    """
    front_of(model).register_comm_hook(state, hook)


def register_builtin_comm_hook(model: nn.Module, hook: dist.BuiltinCommHookType) -> None:
    """Makes a hook in C++ communicate each bucket.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        hook: ``ALLREDUCE`` or ``FP16_COMPRESS``.

    Example:
        >>> ddpx.register_builtin_comm_hook(model, dist.BuiltinCommHookType.FP16_COMPRESS)
        >>> model(inputs).sum().backward()
        >>> model.module.weight.grad
        tensor([[16., 16., 16., 16.]])
    """
    front_of(model)._register_builtin_comm_hook(hook)


def register_buffer_comm_hook(
    model: nn.Module,
    state: object,
    hook: Callable[..., Any],
    location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
) -> None:
    """Replaces the broadcast of buffers by ``hook(state, named_buffers)``.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        state: The first argument of the hook.
        hook: A function. The end of backward waits for the futures that it returns in a list.
        location: Before or after forward. Default: after forward.

    Raises:
        TypeError: ``hook`` is not callable, or ``location`` is not a ``_BufferCommHookLocation``.

    Example:
        >>> def keep_buffers(state, named_buffers):
        ...     return None
        >>> ddpx.register_buffer_comm_hook(model, None, keep_buffers)
        >>> model(inputs).sum().backward()
    """
    front_of(model)._register_buffer_comm_hook(state, hook, location)


def register_fused_optim(
    model: nn.Module,
    optim: type[torch.optim.Optimizer],
    *args: Any,
    optim_params: Iterable[torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Runs an optimizer on each bucket as soon as the bucket is averaged, as in DDP.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        optim: The class of the optimizer.
        args: Arguments of the optimizer.
        optim_params: The parameters of the optimizer. Default: all parameters.
        kwargs: Keyword arguments of the optimizer.

    Raises:
        TypeError: ``optim`` is not a class.
        RuntimeError: The script has registered a class with torch for ``optim``, and the class does
            not support DDP.
        ValueError: torch has no functional form of ``optim``; parameters are DTensors;
            ``reduce_dtype`` or ``grad_dtype`` is set; or the average is not the mean.

    Example:
        >>> before = model.module.weight.detach().clone()
        >>> ddpx.register_fused_optim(model, torch.optim.SGD, 0.5)
        >>> model(inputs).sum().backward()
        >>> before - model.module.weight.detach()
        tensor([[8., 8., 8., 8.]])
    """
    front_of(model)._register_fused_optim(optim, *args, optim_params=optim_params, **kwargs)


def set_static_graph(model: nn.Module) -> None:
    """Has the effect of ``static_graph=True``. Allowed before the first averaged backward.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.set_static_graph(model)
        >>> model(inputs).sum().backward()
    """
    front_of(model)._set_static_graph()


def set_sparse_metadata(model: nn.Module, rows: Mapping[str, torch.Tensor]) -> None:
    """Sets the rows in which sparse gradients have entries, from the next backward on.

    The sparse gradients of these parameters are then summed as dense blocks of these rows. Every
    rank passes the same rows.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        rows: The rows in which any rank has entries, by parameter name.

    Example:
        >>> words = ddpx.replicate(nn.Embedding(8, 2, sparse=True))
        >>> ddpx.set_sparse_metadata(words, {"weight": torch.tensor([0, 3])})
        >>> words(torch.tensor([3])).sum().backward()
    """
    front_of(model)._set_sparse_metadata(rows)


def set_forward_sync_buffers(model: nn.Module, enabled: bool) -> None:
    """Sets whether forwards broadcast the buffers of rank 0.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        enabled: True to broadcast buffers.

    Raises:
        TypeError: ``enabled`` is no truth value.

    Example:
        >>> ddpx.set_forward_sync_buffers(model, False)
    """
    front_of(model).forward_sync_buffers = settings.flag("enabled", enabled)


def will_sync_module_buffers(model: nn.Module) -> bool:
    """Returns whether the next forward synchronizes buffers.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.will_sync_module_buffers(model)  # a linear layer has no buffers
        False
    """
    return front_of(model).will_sync_module_buffers()


def set_manual_finalization(model: nn.Module, required: bool = True) -> None:
    """Sets whether :func:`finalize_backward` ends each step, instead of the end of ``backward()``.

    As :attr:`ReducerDDP.require_manual_backward_finalization`.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        required: True for manual finalization. Default True.

    Raises:
        TypeError: ``required`` is no truth value.
        RuntimeError: As on assignment to the attribute.

    Example:
        >>> ddpx.set_manual_finalization(model)
        >>> model(inputs).sum().backward()
        >>> ddpx.finalize_backward(model)
        >>> model.module.weight.grad
        tensor([[16., 16., 16., 16.]])
    """
    front_of(model).require_manual_backward_finalization = required


def should_finalize_after_backward(model: nn.Module) -> bool:
    """Returns whether :func:`finalize_backward` must come after ``backward()`` has returned.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.should_finalize_after_backward(model)  # without manual finalization
        False
    """
    return front_of(model).should_finalize_after_backward


def finalize_backward(model: nn.Module) -> None:
    """Waits for the gradients of the step, and writes the averages to ``param.grad``.

    As :meth:`ReducerDDP.finalize_backward`.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.set_manual_finalization(model)
        >>> model(inputs).sum().backward()
        >>> ddpx.finalize_backward(model)
    """
    front_of(model).finalize_backward()


def process_group(model: nn.Module) -> dist.ProcessGroup:
    """Returns the ranks to average over.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.process_group(model).size()
        2
    """
    return front_of(model).process_group


def update_process_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Averages over other ranks from here on. The caller makes these ranks agree.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        group: The ranks.

    Example:
        >>> ddpx.update_process_group(model, dist.new_group([0, 1]))
        >>> model(inputs).sum().backward()
    """
    front_of(model)._update_process_group(group)


def logging_data(model: nn.Module) -> dict[str, str | int]:
    """Returns arguments, buckets and times of the last sampled step, under DDP's names.

    Args:
        model: A replicated module, a wrapper, or a module around one.

    Example:
        >>> ddpx.logging_data(model)["module_name"]
        'Linear'
    """
    return front_of(model)._get_ddp_logging_data()


def set_logging_sample_rate(model: nn.Module, sample_rate: int) -> None:
    """Measures the times of the first ten steps, and then of every ``sample_rate``-th step.

    Args:
        model: A replicated module, a wrapper, or a module around one.
        sample_rate: The number of steps from one measurement to the next.

    Raises:
        ValueError: ``sample_rate`` is less than 1.

    Example:
        >>> ddpx.set_logging_sample_rate(model, 100)
    """
    front_of(model)._set_ddp_runtime_logging_sample_rate(sample_rate)
