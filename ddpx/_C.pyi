"""The C++ core; bound in csrc/bindings/. tests/unit/test_stub.py checks this file against it."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

class Phase:
    """The phases of a reducer; docs/architecture.md draws them."""

    IDLE: ClassVar[Phase]
    REBUILDING: ClassVar[Phase]
    COLLECTING: ClassVar[Phase]
    DRAINING: ClassVar[Phase]
    FAILED: ClassVar[Phase]
    __members__: ClassVar[dict[str, Phase]]
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...

def transition(from_: Phase, to: Phase) -> Phase:
    """Returns ``to`` if a reducer may go there from ``from_``; RuntimeError naming both if not."""

class GraphMode:
    """What the reducer may assume of the autograd graph from step to step."""

    DEFAULT: ClassVar[GraphMode]
    FIND_UNUSED: ClassVar[GraphMode]
    STATIC: ClassVar[GraphMode]
    @property
    def name(self) -> str: ...

class ParamMeta:
    """What a bucket plan needs to know of a param."""

    def __init__(self, param: torch.Tensor, expect_sparse: bool = False) -> None: ...
    @property
    def numel(self) -> int: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def expect_sparse(self) -> bool: ...

class BucketCaps:
    """Bucket sizes in bytes; ``listed_bytes``, if not empty, goes bucket by bucket."""

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
    """Which gradient lies in which bucket, in launch order."""

    @staticmethod
    def initial(params: Sequence[ParamMeta], caps: BucketCaps, mode: GraphMode) -> BucketPlan: ...
    @staticmethod
    def by_arrival(
        params: Sequence[ParamMeta], caps: BucketCaps, arrival_order: Sequence[int]
    ) -> BucketPlan: ...
    @property
    def buckets(self) -> list[list[int]]:
        """Param indices of each bucket."""

class ReducerParam:
    """A param whose gradient is to be reduced."""

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
        """A param that autograd knows as ``leaf``, and whose part ``shard`` lies in buckets.

        Args:
            pull: makes ``shard.grad`` the local part of ``leaf.grad``.
            push: makes ``leaf.grad`` one whose local part is ``shard.grad``.
        """

class Precision:
    """Dtypes of gradients, where they are not the params' own."""

    def __init__(
        self,
        *,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        local: torch.dtype | None = None,
        averaged: torch.dtype | None = None,
    ) -> None:
        """As they arrive, are summed, wait for more (if that is wider), and reach the user."""

class StepTimes:
    """Nanoseconds; 0 where nothing was measured."""

    @property
    def forward(self) -> int: ...
    @property
    def backward(self) -> int: ...
    @property
    def comm(self) -> int: ...
    @property
    def overlap(self) -> int: ...

class StepReport:
    """When the parts of a sampled step began and ended, on the host's clock."""

    @property
    def step(self) -> int:
        """Counted from 0; -1 before the first sampled step has ended."""
    @property
    def num_launches(self) -> int:
        """How many buckets were communicated."""
    @property
    def times(self) -> StepTimes: ...
    @property
    def mean(self) -> StepTimes: ...
    @property
    def moments(self) -> list[int]: ...

class Doing:
    """``health::Doing`` of ``csrc/health/activity.h``: what a rank is doing."""

    CONSTRUCTING: ClassVar[Doing]
    CONSTRUCTION: ClassVar[Doing]
    OUTSIDE: ClassVar[Doing]
    REBUILDING: ClassVar[Doing]
    BUFFERS: ClassVar[Doing]
    FORWARD: ClassVar[Doing]
    BACKWARD: ClassVar[Doing]
    HOOK: ClassVar[Doing]
    BROKEN_HOOK: ClassVar[Doing]
    SETTLING: ClassVar[Doing]
    WAITING: ClassVar[Doing]
    AGREEING: ClassVar[Doing]
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...

class FailureKind:
    """``health::FailureKind`` of ``csrc/health/failure.h``."""

    DEAD: ClassVar[FailureKind]
    LEFT: ClassVar[FailureKind]
    STALLED: ClassVar[FailureKind]
    MISMATCH: ClassVar[FailureKind]
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...

class Casualty:
    """``health::Casualty`` of ``csrc/health/failure.h``: a rank that is lost."""

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
    """``health::RankReport`` of ``csrc/health/failure.h``: a failure as one rank meets it."""

    @property
    def kind(self) -> FailureKind: ...
    @property
    def casualties(self) -> list[Casualty]: ...
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
    def text(self) -> str: ...

class HealthLevel:
    """``health::Level`` of ``csrc/health/journal.h``."""

    INFO: ClassVar[HealthLevel]
    WARNING: ClassVar[HealthLevel]
    ERROR: ClassVar[HealthLevel]
    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...

class HealthRecord:
    """``health::Record`` of ``csrc/health/journal.h``: one fact."""

    @property
    def level(self) -> HealthLevel: ...
    @property
    def event(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def fields(self) -> dict[str, str]: ...
    @property
    def token(self) -> int:
        """Of the status page of the rank that it is about."""

class Monitor:
    """One rank's lookout over its group; see ``csrc/health/monitor.h``."""

    @property
    def rank(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    @property
    def has_raised(self) -> bool:
        """``RankFailure``, on this rank."""
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
    def note(self, doing: Doing) -> None: ...
    def ranks(self) -> list[dict[str, Any]]:
        """By rank, what is known of it; empty for this rank and those that were not met."""
    def name_ranks(self, in_job: list[int]) -> None:
        """By rank in the group: that in the job, for texts."""
    def write_note(self, text: str) -> None:
        """For the other ranks of this machine."""
    def retire(self) -> None:
        """Another group has taken this one's place."""
    def stack_of(self, rank: int, timeout: timedelta) -> str | None: ...

def lowered(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``param`` in ``dtype``; its gradient stays in it where the param's ``grad_dtype`` is None."""

def is_deaf(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether its calls go on waiting when the group is aborted, as gloo's on CPU do."""

def wait(work: dist.Work, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """For a call on tensors of ``device``; RankFailure as soon as the group has failed."""

def monitor_of(process_group: dist.ProcessGroup) -> Monitor | None:
    """Made at the first call; None if there is nobody to watch."""

def next_health_record() -> HealthRecord | None:
    """Waits; None once the journal was closed."""

def open_health_journal() -> None: ...
def close_health_journal() -> None: ...
def answer_stack_request(token: int, stack: str) -> None: ...
def explain_error(said: str) -> None:
    """See :meth:`Monitor.explain_error`; of all groups."""

def fail_rank(cause: str) -> None:
    """This rank's script ends with an error: its peers are told, in all groups that are watched."""

def leave_groups() -> None:
    """This rank's script has come to its end."""

def set_patience(warn_s: float | None, raise_s: float | None, with_stacks: bool) -> None:
    """None: never."""

class ShmOrder:
    """In which order the ranks' values of an element are summed."""

    GLOO: ClassVar[ShmOrder]
    FIXED: ClassVar[ShmOrder]
    @property
    def name(self) -> str: ...

class ShmBackend(Backend):
    """A backend of torch's over shared memory; see ``csrc/shm_backend/shm_backend.h``."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        inner: Backend,
        order: ShmOrder,
        host_identity: str,
    ) -> None: ...
    def set_leaders(self, leaders: Backend) -> None:
        """A backend of the first rank of each host, to be given to those."""
    @property
    def hosts(self) -> list[list[int]]:
        """The ranks that share memory, host by host."""
    def set_timeout(self, timeout: timedelta) -> None: ...
    @property
    def order(self) -> ShmOrder: ...
    @property
    def timeout(self) -> timedelta: ...
    @property
    def resident_bytes(self) -> int:
        """Of memory that buckets lie in."""

def steady_now() -> int:
    """Nanoseconds on the clock of recordings, which the ranks of one host share."""

class EventKind:
    """What an event of a recording is; ``csrc/observe/event_log.h`` says what its index means."""

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
    """A plan, and the first step that it holds for."""

    @property
    def first_step(self) -> int: ...
    @property
    def plan(self) -> BucketPlan: ...

class Recording:
    """A ring of events, which a reducer fills."""

    def __init__(self, capacity: int, device: torch.device, max_steps: int = 0) -> None:
        """Notes ``max_steps`` steps, or all if 0; the newest ``capacity`` events are kept."""
    def collect(self) -> None:
        """Takes in what a device has done by now."""
    def close(self) -> None:
        """To be called when nothing more comes; waits for a device."""
    def events(self) -> torch.Tensor:
        """int64, one row an event, oldest first: time in ns, step, kind, index."""
    @property
    def plans(self) -> list[PlanInForce]: ...
    @property
    def capacity(self) -> int:
        """How many events there is room for."""
    @property
    def num_added(self) -> int:
        """How many events came, with those that were overwritten since."""
    @property
    def device_error_ns(self) -> int:
        """How far times of a device may be off the host's."""

class Reducer:
    """Packs gradients into buckets as they arrive and all-reduces them while backward runs."""

    def __init__(
        self,
        params: Sequence[ReducerParam],
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        mode: GraphMode,
        gradient_as_bucket_view: bool,
        batched_copy: bool = False,
        skip_unused_buckets: bool = False,
        bystanders: Sequence[ReducerParam] = ...,
        gate: int | None = None,
        precision: Precision = ...,
    ) -> None: ...
    def prepare_forward(self) -> bool:
        """At the start of a forward that records a graph; True if the buckets were rebuilt."""
    def rebuild_buckets(self) -> bool:
        """The rebuild alone, if it is due; True if it was."""
    def shadow_step(self) -> None:
        """Makes the collective calls of a step without gradients of this rank."""
    def begin_forward(self) -> None:
        """The module's forward begins only now, after a wait."""
    def watch_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """With the outputs of forward: lets the reducer notice where a backward starts."""
    def prepare_for_backward(self) -> None:
        """The next backward averages, also if its forward ran while synchronisation was off."""
    def remove_hooks(self) -> None:
        """Takes all hooks off the params."""
    def reset(self) -> None:
        """Makes a reducer whose last step went wrong ready again."""
    def set_static_graph(self) -> None:
        """From here on the graph is the same in every step."""
    def set_divisor(self, divisor: int | None) -> None:
        """From the next step on, what gradients are divided by; the world size if None."""
    def announce_joined_step(self, averages: bool) -> None:
        """What ranks without inputs were told; a backward that does otherwise raises."""
    def leave_join(self) -> None:
        """Backwards are not compared with announcements any more."""
    def set_sample_rate(self, sample_rate: int) -> None:
        """Every how many steps ``report`` is renewed, after the first ten."""
    def set_collective(
        self, process_group: dist.ProcessGroup, num_steps: int | None = None
    ) -> None:
        """Goes over to other ranks, as if this one had made ``num_steps`` steps."""
    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Hands every bucket to ``hook(state, bucket)`` instead of the all-reduce; once."""
    def set_builtin_comm_hook(
        self, type: dist.BuiltinCommHookType, process_group: dist.ProcessGroup
    ) -> None:
        """Hands every bucket to a hook in C++ instead of the all-reduce; once."""
    def set_mixed_precision(
        self,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
        process_group: dist.ProcessGroup,
    ) -> None:
        """Gradients arrive in ``compute_dtype`` (None: their parameter's), and are summed in
        ``reduce_dtype``; takes the place of a communication hook."""
    def set_sparse_rows(self, param_index: int, rows: torch.Tensor) -> None:
        """From the next step on, in which rows (int64, ascending, unique) the sparse gradient of a
        param has entries."""
    def set_check_finite(self, enabled: bool) -> None:
        """Whether backward raises if a gradient of any rank is not finite."""
    def refuse_capture(self) -> None:
        """While the current CUDA stream is captured into a graph: RuntimeError if a step reads on
        the host."""
    def add_recording(self, recording: Recording) -> None:
        """From here on what happens is noted in ``recording``, too."""
    def remove_recording(self, recording: Recording) -> None:
        """Not any more."""
    def number_as_constructed(self) -> None:
        """All ranks have just constructed this wrapper together."""
    def continue_from(self, older: Reducer) -> None:
        """Its recordings go on here, and so does its count of steps."""
    def set_after_sync(self, callback: Callable[[], None]) -> None:
        """Called after each synchronised backward, on the thread that ends it."""
    @property
    def arrival_order(self) -> list[int]:
        """By which the buckets were rebuilt; empty before."""
    @property
    def used_by_ranks(self) -> list[int]:
        """Per param, how many ranks used it in the last step that they agreed about."""
    @property
    def last_error(self) -> str:
        """Of a step or setting that was at fault; empty if there was none."""
    @property
    def report(self) -> StepReport:
        """Of the last sampled step."""
    @property
    def num_steps(self) -> int:
        """Synchronised steps that came to their end."""
    @property
    def recorded(self) -> bool:
        """Whether anyone records it."""
    @property
    def sync_enabled(self) -> bool:
        """Whether the next backward is synchronised."""
    @sync_enabled.setter
    def sync_enabled(self, value: bool) -> None: ...
    @property
    def graph_was_static(self) -> bool:
        """Whether every step so far used the same params equally often."""
    @property
    def phase(self) -> Phase: ...
    @property
    def plan(self) -> BucketPlan: ...
