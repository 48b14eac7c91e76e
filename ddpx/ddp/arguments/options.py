"""The arguments of ReducerDDP as one checked, immutable value."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpx import _C, settings
from ddpx.comm.transport import VARIABLE as TRANSPORT_VARIABLE
from ddpx.comm.transport import checked_choice
from ddpx.ddp.arguments.bucket_sizes import cap_in_force, caps_in_bytes, plan_in_force
from ddpx.ddp.user_module.mixed_precision import check_config
from ddpx.params import ManagedParam
from ddpx.params.delayed import DelayedParams
from ddpx.planning import BucketPlan, indices_of

_SMALL_GRAD_BYTES = 1 << 20  # a device starts a kernel as fast as it copies so much
AVERAGES = ("mean", "sum", "weights")
_default_average: ContextVar[str] = ContextVar("_default_average", default="mean")
_NOT_DELAYED = DelayedParams()


# Users know options by the names of arguments.
_NAMES_IN_REPORTS = {
    "sync_buffers_at_init": "broadcast_buffers",
    "sync_buffers_at_forward": "forward_sync_buffers",
    "first_cap_bytes": "bucket_cap_mb (bytes of the first bucket)",
    "cap_bytes": "bucket_cap_mb (in bytes)",
    "listed_cap_bytes": "bucket_cap_mb_list (in bytes)",
    "auto_buckets": "bucket_cap_mb='auto' (what asked for it)",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a wrapper. Caps are in bytes. :func:`make_options` checks arguments."""

    sync_buffers_at_init: bool
    sync_buffers_at_forward: bool
    init_sync: bool = True
    first_cap_bytes: int
    cap_bytes: int
    listed_cap_bytes: tuple[int, ...]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    batched_grad_copy: bool = False
    skip_all_reduce_unused_params: bool = False
    lazy_bucket_allocation: bool = False
    reduce_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    average: str
    small_grad_bytes: int = _SMALL_GRAD_BYTES
    transport: str
    delayed: DelayedParams
    mixed_precision: Any
    bucket_plan: BucketPlan | None = None
    auto_buckets: str | None = None  # what asked for a search: "argument" or "environment"

    def describe(self, module: nn.Module) -> dict[str, object]:
        """The options by name, to be compared between ranks."""
        config = self.mixed_precision
        values = {**vars(self), **self.delayed.describe(module)}
        del values["delayed"], values["small_grad_bytes"]  # the latter may differ
        dtypes = config and (config.param_dtype, config.reduce_dtype, config.buffer_dtype)
        plan = self.bucket_plan and self.bucket_plan.digest
        values.update(mixed_precision=dtypes, bucket_plan=plan)
        return {_NAMES_IN_REPORTS.get(name, name): value for name, value in values.items()}

    @property
    def mode(self) -> _C.GraphMode:
        """``static_graph`` also finds unused parameters, and takes precedence."""
        if self.static_graph:
            return _C.GraphMode.STATIC
        if self.find_unused_parameters:
            return _C.GraphMode.FIND_UNUSED
        return _C.GraphMode.DEFAULT

    @property
    def caps(self) -> _C.BucketCaps:
        """Bucket sizes in bytes."""
        return _C.BucketCaps(self.first_cap_bytes, self.cap_bytes, self.listed_cap_bytes)

    def of_reducer(
        self, managed: Sequence[ManagedParam], delay_trigger: int | None, module: nn.Module
    ) -> _C.ReducerOptions:
        """The options that the reducer needs.

        Args:
            managed: The averaged parameters.
            delay_trigger: The index of the parameter that delayed parameters wait for, or None.
            module: The wrapped module. Error texts name its class.
        """
        # Local sums are at least as precise as the sums over ranks.
        reduce = self.reduce_dtype or self.grad_dtype
        local = self.grad_dtype or self.reduce_dtype
        return _C.ReducerOptions(
            caps=self.caps,
            mode=self.mode,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            batched_copy=self.batched_grad_copy,
            skip_unused_buckets=self.skip_all_reduce_unused_params,
            delay_trigger=delay_trigger,
            precision=_C.Precision(reduce=reduce, local=local, averaged=self.grad_dtype),
            lazy_buckets=self.lazy_bucket_allocation,
            listed_buckets=indices_of(self.bucket_plan, managed) if self.bucket_plan else [],
            average=_C.Average.__members__[self.average.upper()],
            module_name=type(module).__name__,
            small_grad_bytes=self.small_grad_bytes,
        )


@contextmanager
def default_average(average: str) -> Iterator[None]:
    """Makes wrappers that the block constructs without ``average`` use this one."""
    token = _default_average.set(average)
    try:
        yield
    finally:
        _default_average.reset(token)


def make_options(
    *,
    broadcast_buffers: bool | None = None,
    forward_sync_buffers: bool | None = None,
    check_reduction: bool = False,
    bucket_cap_mb: float | str | None = None,
    bucket_cap_mb_list: list[float] | None = None,
    reduce_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    average: str | None = None,
    transport: str | None = None,
    bucket_plan: BucketPlan | str | Path | None = None,
    delayed: DelayedParams = _NOT_DELAYED,
    mixed_precision: Any = None,
    **flags: object,
) -> Options:
    """Checks arguments of ReducerDDP and makes options.

    Flags and caps may be numbers of numpy and torch, as in DDP. None as a flag is False.

    Args:
        flags: The flags of :class:`Options`, except ``sync_buffers_at_init`` and
            ``sync_buffers_at_forward``.

    Raises:
        TypeError: A flag has no truth value of its own, a list of caps is not a list, or a dtype is
            not a floating-point dtype.
        ValueError: A cap is not a finite number of MiB; a dtype has 8 bits; no such transport or
            average exists; a file has no bucket plan, or cannot be read; or arguments contradict
            each other.
    """
    if mixed_precision is not None:
        check_config(mixed_precision, reduce_dtype, grad_dtype)
    chosen: dict[str, Any] = {name: settings.flag(name, value) for name, value in flags.items()}
    settings.flag("broadcast_buffers", broadcast_buffers)
    settings.flag("forward_sync_buffers", forward_sync_buffers)
    for name, dtype in {"reduce_dtype": reduce_dtype, "grad_dtype": grad_dtype}.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{name} must be a floating-point torch.dtype or None, but got {dtype!r}. Pass "
                f"e.g. {name}=torch.float32."
            )
        if dtype is not None and dtype.itemsize < torch.float16.itemsize:
            raise ValueError(
                f"{name}={dtype} cannot be used: torch does not add floating-point numbers of 8 "
                f"bits or less. Pass a dtype of 16 bits or more, such as {name}=torch.float32."
            )
    if settings.flag("check_reduction", check_reduction):
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. It "
            "has no effect.",
            FutureWarning,
            stacklevel=5,
        )

    if average is None:
        average = _default_average.get()
    if not (isinstance(average, str) and average in AVERAGES):
        raise ValueError(
            f"average={average!r} is not an average. Pass one of {', '.join(map(repr, AVERAGES))}."
        )
    sync_at_init, sync_at_forward = _buffer_sync(broadcast_buffers, forward_sync_buffers)
    plan = plan_in_force(bucket_plan, bucket_cap_mb, bucket_cap_mb_list, delayed)
    cap_mb, auto = cap_in_force(bucket_cap_mb, bucket_cap_mb_list, plan, delayed)
    first, cap, listed = caps_in_bytes(cap_mb, bucket_cap_mb_list)
    choice = checked_choice(transport)
    if choice == "shm" and not chosen.get("init_sync", True):
        asked = "transport='shm'" if transport is not None else f"{TRANSPORT_VARIABLE}=shm"
        raise ValueError(
            f"{asked} needs init_sync=True: ranks agree on shared memory when they compare their "
            "parameters. Leave init_sync out, or pass transport='auto'."
        )
    return Options(
        sync_buffers_at_init=sync_at_init,
        sync_buffers_at_forward=sync_at_forward,
        first_cap_bytes=first,
        cap_bytes=cap,
        listed_cap_bytes=listed,
        reduce_dtype=reduce_dtype,
        grad_dtype=grad_dtype,
        average=average,
        small_grad_bytes=settings.bytes_of("DDPX_SMALL_GRAD_BYTES", _SMALL_GRAD_BYTES),
        transport=choice,
        delayed=delayed,
        mixed_precision=mixed_precision,
        bucket_plan=plan,
        auto_buckets=auto,
        **chosen,
    )


def _buffer_sync(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Returns whether construction and whether forwards synchronize buffers.

    ``broadcast_buffers`` decides both. ``forward_sync_buffers`` decides only the latter.
    """
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "Both `broadcast_buffers` and `forward_sync_buffers` were specified. "
                "broadcast_buffers has no effect. Pass only forward_sync_buffers.",
                FutureWarning,
                stacklevel=6,
            )
        return True, bool(forward_sync_buffers)
    if broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. "
            "forward_sync_buffers controls the synchronisation of buffers in forward only: "
            "construction then always synchronises buffers.",
            FutureWarning,
            stacklevel=6,
        )
    sync = True if broadcast_buffers is None else bool(broadcast_buffers)
    return sync, sync
