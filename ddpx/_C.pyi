"""The C++ core, from csrc/bindings/. tests/unit/test_stub.py compares this file with the core."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

class Phase:
    """The phases of a reducer. docs/architecture.md has a diagram."""

    IDLE: ClassVar[Phase]
    REBUILDING: ClassVar[Phase]
    COLLECTING: ClassVar[Phase]
    FINALIZING: ClassVar[Phase]
    FAILED: ClassVar[Phase]
    READY: ClassVar[Phase]
    FINALIZED: ClassVar[Phase]
    __members__: ClassVar[dict[str, Phase]]
    @property
    def name(self) -> str: ...
    @property
    def words(self) -> str:
        """The phase in error texts."""
    def __int__(self) -> int: ...

def transition(from_: Phase, to: Phase) -> Phase:
    """Returns ``to``. Raises RuntimeError if the transition from ``from_`` is not allowed."""

class GraphMode:
    """What the reducer may assume about the autograd graphs of several steps."""

    DEFAULT: ClassVar[GraphMode]
    FIND_UNUSED: ClassVar[GraphMode]
    STATIC: ClassVar[GraphMode]

class ParamMeta:
    """The facts about a parameter from which a bucket plan is made."""

    def __init__(self, param: torch.Tensor, expect_sparse: bool = False) -> None: ...
    @property
    def numel(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def expect_sparse(self) -> bool: ...

class BucketCaps:
    """Bucket sizes in bytes. ``listed_bytes`` has a size for each bucket in turn, if not empty."""

    def __init__(
        self, first_bytes: int, cap_bytes: int, listed_bytes: Sequence[int] = ...
    ) -> None: ...
    @property
    def first_bytes(self) -> int: ...
    @property
    def cap_bytes(self) -> int: ...
    @property
    def listed_bytes(self) -> list[int]: ...

class BucketPlan:
    """The gradients of each bucket, in launch order."""

    @staticmethod
    def initial(params: Sequence[ParamMeta], caps: BucketCaps, mode: GraphMode) -> BucketPlan: ...
    @staticmethod
    def by_arrival(
        params: Sequence[ParamMeta], caps: BucketCaps, arrival_order: Sequence[int]
    ) -> BucketPlan: ...
    @property
    def buckets(self) -> list[list[int]]:
        """The indices of the parameters of each bucket."""

class ReducerParam:
    """A parameter whose gradient the reducer averages."""

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str,
        expect_sparse: bool = False,
        delayed: bool = False,
    ) -> None: ...
    @staticmethod
    def of_dtensor(
        leaf: torch.Tensor,
        shard: torch.Tensor,
        name: str,
        delayed: bool,
        pull: Callable[[], None],
        push: Callable[[], None],
    ) -> ReducerParam:
        """A DTensor parameter ``leaf``, whose local part ``shard`` is in buckets.

        Args:
            pull: Sets ``shard.grad`` to the local part of ``leaf.grad``.
            push: Sets ``leaf.grad`` to a DTensor whose local part is ``shard.grad``.
        """

class Precision:
    """Dtypes of gradients. None: the dtype of the parameter."""

    def __init__(
        self,
        *,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        local: torch.dtype | None = None,
        averaged: torch.dtype | None = None,
    ) -> None:
        """Sets dtypes.

        Args:
            compute: The dtype in which gradients arrive.
            reduce: The dtype of sums over ranks.
            local: The dtype of local sums, if it is wider.
            averaged: The dtype of averaged gradients.
        """

class StepTimes:
    """Times in nanoseconds. 0 if not measured."""

    @property
    def forward(self) -> int: ...
    @property
    def backward(self) -> int: ...
    @property
    def comm(self) -> int: ...
    @property
    def overlap(self) -> int: ...

class StepReport:
    """The times of a sampled step, on the host's clock."""

    @property
    def step(self) -> int:
        """The number of the step, from 0. -1 before the first sampled step has ended."""
    @property
    def num_launches(self) -> int:
        """The number of communicated buckets."""
    @property
    def times(self) -> StepTimes: ...
    @property
    def mean(self) -> StepTimes: ...
    @property
    def moments(self) -> list[int]: ...

class Doing:
    """``health::Doing`` of ``csrc/health/machine/activity.h``, as far as Python publishes it."""

    OUTSIDE: ClassVar[Doing]
    BUFFERS: ClassVar[Doing]
    FORWARD: ClassVar[Doing]

class LostRank:
    """``health::LostRank`` of ``csrc/health/verdict/failure.h``: a rank that is lost."""

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def last_seen(self) -> str: ...

class RankReport:
    """``health::RankReport`` of ``csrc/health/verdict/failure.h``: a failure as a rank meets it."""

    @property
    def error_name(self) -> str:
        """The error to raise, such as ``"ddpx.RankFailure"``."""
    @property
    def lost(self) -> list[LostRank]: ...
    @property
    def rank(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def bucket(self) -> int | None: ...
    @property
    def params(self) -> list[str]: ...
    @property
    def own_stack(self) -> str:
        """The stack of this rank, if the other ranks have given it up."""
    @property
    def how(self) -> str:
        """Where no rank is lost: what the ranks did."""
    @property
    def text(self) -> str: ...

class HealthRecord:
    """``health::Record`` of ``csrc/health/log_queue.h``: a message for logging."""

    @property
    def event(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def fields(self) -> dict[str, str]: ...
    def answer_stack_request(self, stack: str) -> None: ...
    def publish_recorded_calls(self, calls: Sequence[tuple[int, str]]) -> None: ...

INTRODUCTION_BYTES: int  # the most bytes of Monitor.introduction()

class Monitor:
    """The failure detector of one rank in one group; see ``csrc/health/monitor.h``."""

    @property
    def rank(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    @property
    def has_raised(self) -> bool:
        """``RankFailure``, on this rank."""
    @property
    def interrupted(self) -> bool:
        """Whether the main thread has raised the failure between calls of ddpx."""
    @property
    def report(self) -> RankReport | None:
        """What this rank would raise now."""
    def raise_if_failed(self) -> None:
        """Raises ``RankFailure`` if the group cannot go on."""
    def explain_error(self, said: str) -> None:
        """After an error in a collective call: raises ``RankFailure`` if ranks are gone."""
    def begin_construction(self) -> None: ...
    def begin_call(self) -> None:
        """A collective call of a construction; nothing elsewhere."""
    def end_call(self) -> None: ...
    def publish(self, doing: Doing) -> None: ...
    def introduction(self) -> bytes:
        """For all ranks of the group. Empty if they have met."""
    def find_host(self, introductions: Sequence[bytes]) -> int:
        """The host of this rank, given the introductions of all ranks."""
    def meet(self, introductions: Sequence[bytes], hosts: list[int]) -> None:
        """``hosts`` are the results of :meth:`find_host` of all ranks; 0 without a monitor."""
    def introduce(self) -> None:
        """Lets ranks meet through the store, without a collective call."""
    def ranks(self) -> list[dict[str, Any]]:
        """The status of each rank. Empty for unknown ranks.

        This rank has no ``agreement``, ``local`` and ``ending``.
        """
    def name_ranks(self, in_job: list[int]) -> None:
        """By rank in the group: that in the job, for texts."""
    def publish_fault(self, text: str, is_of_module: bool) -> None:
        """A forward of this rank has raised an error, for ranks that wait for this rank.

        ``is_of_module``: the module's own code raised. Ranks that wait then only warn.
        """
    def publish_agreement(self, text: str) -> None:
        """For the other ranks of this machine."""
    def retire(self) -> None:
        """Another group has taken this one's place."""
    def stack_of(self, rank: int, timeout: timedelta) -> str | None: ...

def lowered(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``param`` in ``dtype``, as a tensor of the autograd graph.

    The gradient stays in ``dtype`` if the ``grad_dtype`` of the parameter is None.
    """

def forget_grad_dtype(param: torch.Tensor) -> None:
    """Undoes that ``param.grad_dtype`` was set. The gradient has the dtype of the parameter."""

def needs_abort_polling(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether its calls go on waiting when the group is aborted, as gloo's on CPU do."""

def holds_plain_values(tensor: torch.Tensor) -> bool:
    """Whether a group can send the memory of the tensor, and torch can overwrite the tensor."""

def hold_plain_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each of the tensors has :func:`holds_plain_values`."""

def wait(work: dist.Work, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """For a call on tensors of ``device``; RankFailure as soon as the group has failed."""

def all_reduce(
    tensor: torch.Tensor, process_group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
) -> None:
    """Reduces in place. This call and the next two are for groups that are written in C++."""

def broadcast(tensor: torch.Tensor, process_group: dist.ProcessGroup, source: int) -> None:
    """Overwrites ``tensor`` with the tensor of rank ``source`` of the group."""

def all_gather(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, which have one shape, by rank."""

def monitor_of(process_group: dist.ProcessGroup) -> Monitor | None:
    """Made at the first call; None if there is nobody to watch."""

def take_health_record() -> HealthRecord | None:
    """The oldest record; None if there is none: the thread that reads must end."""

def set_health_log_reader(start: Callable[[], object] | None) -> None:
    """``start`` starts a thread that reads records.

    With None, no further thread starts, and no ``start`` runs any more, unless one takes a second.
    """

def abort_group(process_group: dist.ProcessGroup) -> None:
    """Aborts the calls of a group that the script does not use any more. This may take long."""

def await_watchdogs_of_aborted() -> None: ...
def explain_error(said: str) -> None:
    """Calls :meth:`Monitor.explain_error` of all groups."""

def fail_rank(cause: str) -> None:
    """This rank's script ends with an error. Its peers hear of it in all groups."""

def begin_printing_report() -> None:
    """The interpreter prints a report. SIGTERM then does not print it again.

    If the watchdog has begun to write the report after SIGTERM, this call waits for the end of the
    process.
    """

def end_printing_report() -> None: ...
def leave_groups() -> None:
    """This rank's script has come to its end."""

def set_stall_timeouts(warn_s: float | None, raise_s: float | None, with_stacks: bool) -> None:
    """None: never."""

class ShmOrder:
    """The order in which the values of ranks are summed."""

    GLOO: ClassVar[ShmOrder]
    FIXED: ClassVar[ShmOrder]

class ShmBackend(Backend):
    """A backend of torch over shared memory. See ``csrc/shm_backend/shm_backend.h``."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        inner: Backend,
        order: ShmOrder,
        host_identity: str,
        in_job: Sequence[int],
    ) -> None:
        """``in_job`` has the ranks of the job, by rank in the group. Empty: the same ranks."""
    def set_lane(self, index: int, lane: Backend) -> None:
        """Sets the backend of a lane. All ranks of the lane call this."""
    @property
    def lanes(self) -> list[list[int]]:
        """The ranks of each lane between hosts, in the order of hosts. Empty for one host."""
    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host. Ranks of one host share memory."""
    def set_timeout(self, timeout: timedelta) -> None: ...
    @property
    def order(self) -> ShmOrder: ...
    @property
    def timeout(self) -> timedelta: ...
    @property
    def resident_bytes(self) -> int:
        """The size of the memory for buckets."""

def steady_now() -> int:
    """The time in nanoseconds on the clock of recordings. Ranks of one host share this clock."""

class EventKind:
    """The kind of an event. ``csrc/observe/event_log.h`` explains the index of each kind."""

    FORWARD_BEGIN: ClassVar[EventKind]
    FORWARD_END: ClassVar[EventKind]
    PHASE: ClassVar[EventKind]
    BACKWARD_BEGIN: ClassVar[EventKind]
    STEP_BEGIN: ClassVar[EventKind]
    GRAD_ARRIVED: ClassVar[EventKind]
    BUCKET_READY: ClassVar[EventKind]
    LAUNCHED: ClassVar[EventKind]
    COMPLETED: ClassVar[EventKind]
    BACKWARD_END: ClassVar[EventKind]
    WAIT_BEGIN: ClassVar[EventKind]
    WAIT_END: ClassVar[EventKind]
    AGREE_BEGIN: ClassVar[EventKind]
    AGREE_END: ClassVar[EventKind]
    WRITTEN_BACK: ClassVar[EventKind]
    STEP_END: ClassVar[EventKind]
    LOCAL_BACKWARD_END: ClassVar[EventKind]
    __members__: ClassVar[dict[str, EventKind]]
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...

class PlanInForce:
    """A plan, and the first step with this plan."""

    @property
    def first_step(self) -> int: ...
    @property
    def plan(self) -> BucketPlan: ...

class Recording:
    """A ring buffer of events, which a reducer fills."""

    def __init__(self, capacity: int, device: torch.device, max_steps: int = 0) -> None:
        """Records ``max_steps`` steps, or all steps if 0. Keeps the newest ``capacity`` events."""
    def collect(self) -> None:
        """Adds the events that a device has finished."""
    def close(self) -> None:
        """Ends the recording. Waits for a device."""
    def events(self) -> torch.Tensor:
        """An int64 row for each event, oldest first: time in ns, step, kind, index."""
    @property
    def plans(self) -> list[PlanInForce]: ...
    @property
    def capacity(self) -> int:
        """The number of events for which the ring buffer has room."""
    @property
    def num_added(self) -> int:
        """The number of added events, including overwritten events."""
    @property
    def device_error_ns(self) -> int:
        """The error bound of a device's times against the host's clock."""

class Average:
    """What a step makes of the gradients of all ranks; see ``csrc/reducer/weights.h``."""

    MEAN: ClassVar[Average]
    SUM: ClassVar[Average]
    WEIGHTS: ClassVar[Average]
    __members__: ClassVar[dict[str, Average]]
    @property
    def name(self) -> str: ...

class ReducerOptions:
    """How a reducer groups, copies and sums gradients."""

    def __init__(
        self,
        caps: BucketCaps,
        mode: GraphMode,
        gradient_as_bucket_view: bool = False,
        batched_copy: bool = False,
        skip_unused_buckets: bool = False,
        delay_trigger: int | None = None,
        precision: Precision = ...,
        lazy_buckets: bool = False,
        listed_buckets: Sequence[Sequence[int]] = ...,
        average: Average = ...,
        module_name: str = "a module",
        small_grad_bytes: int = 0,
    ) -> None:
        """``csrc/reducer/context.h`` describes each option."""

class Reducer:
    """Packs gradients into buckets as they arrive and all-reduces them while backward runs."""

    def __init__(
        self,
        params: Sequence[ReducerParam],
        process_group: dist.ProcessGroup,
        transport: Backend | None,
        options: ReducerOptions,
        frozen_params: Sequence[ReducerParam] = ...,
    ) -> None: ...
    def prepare_forward(self, captured: bool = False) -> bool:
        """Begins a forward that records a graph. Returns True if the buckets were rebuilt.

        ``captured``: the current stream is captured. torch before 2.12 does not tell the reducer.
        """
    def check_join_capture(self, captured: bool) -> None:
        """Raises RuntimeError if the current stream is captured. For forwards in ``join()``."""
    def rebuild_buckets(self) -> bool:
        """Rebuilds the buckets if the rebuild is due. Returns True if so."""
    def shadow_step(self) -> None:
        """Makes the collective calls of a step without gradients of this rank."""
    def begin_forward(self) -> None:
        """For recordings and peers: the module's forward begins, with synchronized buffers."""
    def use_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        """Replaces the bucket plan, between steps. Every rank passes the same buckets."""
    def time_all_reduces(self, num_bytes: int, repeats: int) -> list[int]:
        """The times in ns of all-reduces of this size, one after another. A collective call."""
    def watch_outputs(self, outputs: Sequence[torch.Tensor], params_replaced: bool = False) -> None:
        """Watches the outputs of a forward, so that the reducer detects the start of a backward.

        A backward without a gradient makes no step if ``params_replaced`` is set: other tensors
        were in the places of all parameters.
        """
    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Sets the weight of the next forward: a number, or a tensor with one element.

        A number is 0 or more, and finite.
        """
    def prepare_for_backward(self) -> None:
        """Makes the next backward average, even if its forward was not synchronized."""
    def remove_hooks(self) -> None:
        """Removes all hooks from the parameters."""
    def yield_to(self, owner: Reducer) -> None:
        """Lets ``owner`` average the parameters, until it is gone or ``take_back()`` is called.

        All settings stay.
        """
    def check_can_yield(self) -> None:
        """Raises the error that ``yield_to()`` would raise. The reducer does not yield."""
    def take_back(self) -> None:
        """Averages the parameters again. The other reducers must yield."""
    @property
    def yielded(self) -> bool:
        """Whether another reducer averages the parameters."""
    def reset(self) -> None:
        """Prepares the reducer for a new step after a step that failed."""
    def set_static_graph(self) -> None:
        """Promises that all later steps have the same graph."""
    def set_divisor(self, divisor: int | None) -> None:
        """Sets the divisor of gradients, from the next step on. None: the world size."""
    def announce_joined_step(self, averages: bool) -> None:
        """Sets what was announced to ranks without inputs. A backward that differs raises."""
    def leave_join(self) -> None:
        """Ends the comparison of backwards with announcements."""
    def set_sample_rate(self, sample_rate: int) -> None:
        """Sets the number of steps between two reports, after the first ten steps."""
    def set_collective(
        self,
        process_group: dist.ProcessGroup,
        transport: Backend | None,
        num_steps: int | None = None,
    ) -> None:
        """Averages over other ranks, as if this reducer had made ``num_steps`` steps."""
    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the all-reduce by ``hook(state, bucket)``. Allowed once."""
    def set_builtin_comm_hook(
        self, type: dist.BuiltinCommHookType, process_group: dist.ProcessGroup
    ) -> None:
        """Replaces the all-reduce by a hook in C++. Allowed once."""
    def set_mixed_precision(
        self,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
        process_group: dist.ProcessGroup,
    ) -> None:
        """Sums gradients in ``reduce_dtype``. Excludes a communication hook.

        Gradients arrive in ``compute_dtype``. None: the dtype of the parameter.
        """
    def set_sparse_rows(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Sets the rows in which sparse gradients have entries, from the next step on.

        Each parameter index has a tensor of int64, ascending and unique. If one tensor is
        refused, no rows change.
        """
    def set_manual_finalization(self, required: bool) -> None:
        """Sets whether ``finalize_backward()`` ends each step, instead of the end of backward."""
    def finalize_backward(self) -> None:
        """Waits for the buckets of the step, and writes the averaged gradients back."""
    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the next ``finalize_backward()`` must come after backward has returned."""
    def set_check_finite(self, enabled: bool) -> None:
        """Sets whether backward raises if a gradient of any rank is not finite."""
    def add_recording(self, recording: Recording) -> None:
        """Adds later events to ``recording``."""
    def remove_recording(self, recording: Recording) -> None:
        """Adds no further events to ``recording``."""
    def number_as_constructed(self) -> None:
        """Numbers this reducer. All ranks make this call together after construction."""
    def set_after_sync(self, callback: Callable[[], None] | None) -> None:
        """Sets a function to call after each synchronized backward, on the thread that ends it."""
    @property
    def arrival_order(self) -> list[int]:
        """The arrival order from which the buckets were rebuilt. Empty before the rebuild."""
    @property
    def used_by_ranks(self) -> list[int]:
        """For each parameter, the number of ranks that used it in the last agreed step."""
    @property
    def last_error(self) -> str:
        """The text of the last error of a step or a setting. Empty without an error."""
    @property
    def report(self) -> StepReport:
        """The report on the last sampled step."""
    @property
    def num_steps(self) -> int:
        """The number of finished synchronized steps."""
    def mark_waited(self) -> None:
        """The script has waited for the averages of the last step."""
    @property
    def num_steps_waited(self) -> int | None:
        """The number of steps that the script has waited for. None: it does not always wait."""
    @property
    def num_steps_averaged(self) -> int:
        """The number of steps whose averages are known to be right, also after an abort."""
    @property
    def recorded(self) -> bool:
        """Whether a recording is active."""
    @property
    def sync_enabled(self) -> bool:
        """Whether the next backward is synchronized."""
    @sync_enabled.setter
    def sync_enabled(self, value: bool) -> None: ...
    @property
    def graph_was_static(self) -> bool:
        """Whether every step so far used the same parameters the same number of times."""
    @property
    def phase(self) -> Phase: ...
    @property
    def plan(self) -> BucketPlan: ...
