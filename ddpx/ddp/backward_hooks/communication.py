"""Communication hooks, which replace the all-reduce of a bucket, as in DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpx.reducer import Reducer


class CommHook:
    """The communication hook of one wrapper, which owns this object.

    Attributes:
        name: The name of the hook in logging data. None without a hook.
        registered: The hook in Python, and its state. None without such a hook.
        runs_optimizer: Whether the hook runs an optimizer of the wrapper's parameters.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.registered: tuple[Callable[..., Any], object] | None = None
        self.runs_optimizer = False
        self._kind: dist.BuiltinCommHookType | None = None
        self._is_bound_to_group = False  # the C++ core keeps the group of a built-in hook

    def register(self, reducer: Reducer, state: object, hook: Callable[..., Any]) -> None:
        """Makes ``hook(state, bucket)`` communicate each bucket.

        Raises:
            RuntimeError: The reducer has a hook already, or a backward is running.
        """
        reducer.set_comm_hook(state, hook)
        reducer.has_hook = True
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.registered = (hook, state)

    def register_builtin(self, reducer: Reducer, kind: dist.BuiltinCommHookType) -> None:
        """Makes a hook in C++ communicate each bucket.

        ``ALLREDUCE`` divides and sums. ``FP16_COMPRESS`` does the same in half precision.
        """
        reducer.set_builtin_comm_hook(kind, reducer.process_group)
        reducer.has_hook = True
        self.name = str(kind)
        self._kind = kind
        self._is_bound_to_group = True

    @property
    def replaces_all_reduce(self) -> bool:
        """Whether the script has registered a hook."""
        return self.registered is not None or self._kind is not None

    def continue_with(self, reducer: Reducer) -> None:
        """Makes the same hook communicate the buckets of the reducer of a copy of the wrapper."""
        if self.registered is not None:
            hook, state = self.registered
            self.register(reducer, state, hook)
        elif self._kind is not None:
            self.register_builtin(reducer, self._kind)

    def reduce_in(
        self, reducer: Reducer, dtype: torch.dtype, compute_dtype: torch.dtype | None
    ) -> None:
        """Sums buckets in ``dtype``. Gradients arrive in ``compute_dtype``."""
        reducer.set_mixed_precision(compute_dtype, dtype, reducer.process_group)
        reducer.has_hook = True
        self.name = f"mixed_precision({dtype})"
        self._is_bound_to_group = True

    def check_group_can_change(self, former: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
        """Raises RuntimeError if a hook would keep the process group ``former``."""
        if self._is_bound_to_group:
            raise RuntimeError(
                "_update_process_group() cannot be used with mixed_precision or a built-in "
                "communication hook. Both keep the process group that existed when they were set. "
                "Wrap the module again."
            )

        if self._group_of_state is former and former is not new:
            raise RuntimeError(
                "_update_process_group() cannot be used while the state of the communication hook "
                "has the former process group: the hook would average over the former ranks. Put "
                "the new group into the attribute process_group of the state first, or wrap the "
                "module again."
            )

    @property
    def has_group(self) -> bool:
        """Whether the hook or its state has a process group, which does not change with ours."""
        return self._is_bound_to_group or self._group_of_state is not None

    @property
    def _group_of_state(self) -> dist.ProcessGroup | None:
        """The process group that is the state of the hook, or that the state has."""
        state = None if self.registered is None else self.registered[1]
        # torch's own states have this attribute.
        for group in (state, getattr(state, "process_group", None)):
            if isinstance(group, dist.ProcessGroup):
                return group
        return None


def check_hook(hook: Callable[..., Any]) -> None:
    """Raises TypeError or ValueError if ``hook`` cannot be a communication hook."""
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable, but got {type(hook).__name__}. Pass a function "
            "hook(state, bucket) that returns a torch.futures.Future."
        )
    signature = inspect.signature(hook)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"Communication hook cannot be called with two arguments: {error}. The signature is "
            f"{signature}. Pass a function hook(state, bucket) that returns a "
            "torch.futures.Future."
        ) from None
    bucket = signature.parameters.get("bucket")
    bucket_types = (inspect.Parameter.empty, dist.GradBucket)
    if (
        bucket is not None
        and bucket.annotation not in bucket_types
        and not str(bucket.annotation).endswith("GradBucket")  # an annotation as a text
    ):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. The annotation is "
            f"{bucket.annotation!r}."
        )
    returned = signature.return_annotation
    future = torch.futures.Future[torch.Tensor]
    if not (returned in (inspect.Signature.empty, future) or "Future" in str(returned)):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"The annotation is {returned!r}."
        )
