"""``bucket_cap_mb="auto"``: the search of the best bucket plan in the steps of a wrapper."""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, health
from ddpx.comm import transforms
from ddpx.comm.collectives import all_reduce, broadcast
from ddpx.comm.process_group import device_of_calls, is_alone, rank_of_job
from ddpx.ddp.arguments.bucket_sizes import AUTO, CAP_VARIABLE
from ddpx.ddp.arguments.options import Options
from ddpx.ddp.backward_hooks.communication import CommHook
from ddpx.ddp.backward_hooks.post_sync import PostSync
from ddpx.ddp.search.events import arrivals_of, times_of_steps
from ddpx.params import ManagedParam
from ddpx.params.dtensors import is_dtensor, local_part
from ddpx.planning.candidates import Buckets, ReadyGradient
from ddpx.planning.report import PlanReport
from ddpx.planning.search import MOST_STEPS, PlanSearch
from ddpx.reducer import Reducer

_logger = logging.getLogger("ddpx.planning")
_STEPS_KEPT = 16  # more than a measurement has
_MOST_EVENTS = 1 << 20
_LARGE_BYTES = 1 << 20
_HAS_HOOK = "the wrapper has a communication hook"  # a reason


class Searched(Protocol):
    """The members of a replica that its search uses."""

    group: dist.ProcessGroup
    options: Options
    comm_hook: CommHook
    post_sync: PostSync
    search: WrapperSearch | None
    plan_report: PlanReport | None

    @property
    def module(self) -> nn.Module: ...
    @property
    def reducer(self) -> Reducer: ...
    @property
    def managed(self) -> Sequence[ManagedParam]: ...
    @property
    def device(self) -> torch.device: ...


# Called with the replica, at the end of each search of this process.
_end_callbacks: list[Callable[[Searched], None]] = []


def call_at_end(callback: Callable[[Searched], None]) -> None:
    """Calls ``callback`` in the first forward after the end of each search of this process."""
    _end_callbacks.append(callback)


class WrapperSearch:
    """The search of one wrapper, from its construction to the end of the search.

    The replica of the wrapper owns this object, and drops it at the end of the search.

    Args:
        replica: The object of the wrapper, after ``attach()``.
    """

    def __init__(self, replica: Searched) -> None:
        self._search = PlanSearch(_Training(replica))
        self._reducer = replica.reducer
        self._post_sync = replica.post_sync
        self._advance()
        self._post_sync.call_after_steps(self._reducer, self._advance)

    @property
    def report(self) -> PlanReport:
        """The result of the search so far."""
        return self._search.report

    def suspend(self) -> None:
        """A join context begins. The search goes on after the context."""
        self._search.suspend()

    def resume(self) -> None:
        """A join context has ended on all ranks without an exception."""
        self._advanced = self._reducer.num_steps  # steps of the context do not count
        self._search.resume(self._advanced)

    def prepare_forward(self, replica: Searched, captured: bool) -> None:
        """Prepares the reducer for a forward, and drops a search that has ended.

        Raises:
            RuntimeError: The current stream is captured, and the search has not ended.
        """
        if (captured or self._reducer.is_captured) and not self.report.final:
            raise _capture_while_searching(replica.group.rank(), self.report)
        self._reducer.prepare_forward(captured)
        in_backward = torch._C._current_graph_task_id() != -1
        if self._reducer.phase == _C.Phase.IDLE and not in_backward:
            if not self.report.final and self._reducer.num_steps > self._advanced:
                self._advance()  # the last backward raised an error before its end
            if self.report.final:
                self._end(replica)

    def stop(self) -> None:
        """The wrapper begins again with the default plan, and drops this search."""
        self._search.stop()
        self._post_sync.call_after_steps(self._reducer, None)

    def give_up(self, replica: Searched) -> None:
        """Ends the search with the default plan, which was not measured."""
        self._search.give_up(_HAS_HOOK)
        self._post_sync.call_after_steps(self._reducer, None)
        replica.search = None
        replica.plan_report = self.report

    def _advance(self) -> None:
        self._advanced = self._reducer.num_steps
        if self._search.advance(self._advanced):
            self._post_sync.call_after_steps(self._reducer, None)

    def _end(self, replica: Searched) -> None:
        replica.search = None
        replica.plan_report = self.report
        if replica.group.rank() == 0:
            _logger.info(
                "[ddpx rank %d] bucket_cap_mb='auto': %s", rank_of_job(replica.group), self.report
            )
        for callback in _end_callbacks:
            callback(replica)


def report_of(replica: Searched) -> PlanReport | None:
    """The present result of a wrapper's search. None without ``bucket_cap_mb="auto"``."""
    return replica.plan_report if replica.search is None else replica.search.report


def begin(replica: Searched) -> WrapperSearch | None:
    """Begins a search in place of the present one, if the options ask for a search.

    Returns:
        None if there is nothing to search. The report then says why.
    """
    if replica.search is not None:
        replica.search.stop()
    if replica.options.auto_buckets is None:
        return None
    if is_alone(replica.group):
        reason = "the process group has one rank, which does not communicate"
    elif len(replica.managed) == 1:
        reason = "the model has one gradient"
    elif replica.comm_hook.replaces_all_reduce:
        reason = _HAS_HOOK
    else:
        return WrapperSearch(replica)
    replica.plan_report = PlanReport("done", chosen="default", reason=reason)
    return None


def exclude(replica: Searched, call: str) -> None:
    """Ends the search before ``call`` registers a communication hook.

    Raises:
        RuntimeError: The argument ``bucket_cap_mb="auto"`` was given.
    """
    if replica.options.auto_buckets == "argument":
        raise _hook_excluded(call)
    if replica.options.auto_buckets is None:
        return
    warnings.warn(
        f"{CAP_VARIABLE}={AUTO} has no effect on a wrapper with a communication hook ({call}).",
        UserWarning,
        stacklevel=3,
    )
    if replica.search is not None:
        replica.search.give_up(replica)


class _Training:
    """The training of one wrapper, for :class:`ddpx.planning.search.PlanSearch`."""

    def __init__(self, replica: Searched) -> None:
        self._reducer = replica.reducer
        self._group = replica.group
        self._device = replica.device
        self._recording: _C.Recording | None = None
        self.gradients = gradients_of(replica)

    def default_buckets(self) -> Buckets:
        return tuple(tuple(bucket) for bucket in self._reducer.plan.buckets)

    def use(self, buckets: Buckets) -> None:
        self._reducer.use_buckets(buckets)

    def record(self) -> None:
        per_step = 10 * len(self.gradients) + 16  # the bound for one bucket per parameter
        capacity = max(min(per_step * _STEPS_KEPT, _MOST_EVENTS), 2 * per_step)
        self._recording = _C.Recording(capacity, self._device)
        self._reducer.add_recording(self._recording)

    def stop(self) -> None:
        if self._recording is not None:
            self._reducer.remove_recording(self._recording)
            self._recording = None

    def arrivals_s(self, steps: range) -> list[float]:
        return arrivals_of(self._events(), steps, len(self.gradients))

    def step_times_s(self, steps: range) -> list[tuple[float, float]]:
        return times_of_steps(self._events(), steps)

    def reduce_time_s(self, num_bytes: int) -> float:
        repeats = 3 if num_bytes > _LARGE_BYTES else 6
        times_ns = self._reducer.time_all_reduces(num_bytes, repeats)
        return statistics.median(times_ns[1:]) / 1e9  # the first one touches new memory

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._exchange(partial(all_reduce, op=dist.ReduceOp.MAX), values, torch.float64)

    def of_rank_0(self, values: Sequence[int]) -> list[int]:
        return self._exchange(broadcast, values, torch.int64)

    def _exchange(
        self, call: Callable[..., torch.Tensor], values: Sequence[float], dtype: torch.dtype
    ) -> list[Any]:
        """Makes a collective call behind the buckets of a step."""
        with transforms.outside(), torch.no_grad(), health.collective_call(self._group):
            device = device_of_calls(self._group, self._device)
            return call(torch.tensor(values, dtype=dtype, device=device), self._group).tolist()

    def _events(self) -> torch.Tensor:
        assert self._recording is not None
        if self._device.type != "cpu":
            torch.accelerator.current_stream(self._device).synchronize()
            self._recording.collect()
        return self._recording.events()


def gradients_of(replica: Searched) -> tuple[ReadyGradient, ...]:
    """The gradients of a replica, with the sizes that an all-reduce sends."""
    options = replica.options
    config = options.mixed_precision
    low = None if config is None else config.reduce_dtype or config.param_dtype
    summed = options.reduce_dtype or options.grad_dtype or low
    kinds: dict[object, int] = {}
    found = []
    for param in replica.managed:
        tensor = local_part(param.tensor) if is_dtensor(param.tensor) else param.tensor
        size = tensor.element_size()
        if summed is not None and tensor.is_floating_point():
            size = summed.itemsize
        kind = kinds.setdefault((tensor.dtype, tensor.device), len(kinds))
        found.append(ReadyGradient(tensor.numel() * size, kind, param.expect_sparse))
    return tuple(found)


# ---- errors --------------------------------------------------------------------------------------


def _hook_excluded(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} cannot be used with bucket_cap_mb='auto': the search times all-reduces, which a "
        "communication hook replaces. An optimizer in backward registers such a hook, too. Leave "
        "out bucket_cap_mb='auto', or pass a plan that was found without the hook: bucket_plan=."
    )


def _capture_while_searching(rank: int, report: PlanReport) -> RuntimeError:
    return RuntimeError(
        f"[ddpx rank {rank}] a step is captured into a CUDA graph, but bucket_cap_mb='auto' has "
        f"not chosen the buckets yet: {report}. The choice needs up to {MOST_STEPS} steps. Train "
        "without a capture until ddpx.plan_report(model).final is true, or pass the plan of "
        "another run: bucket_plan=."
    )
