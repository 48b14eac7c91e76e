"""Trainings in which one rank fails at a chosen place, and the reports of the other ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fault_ranks import (
    announce,
    await_announcement,
    await_that,
    crash,
    is_stopped,
    let_meet,
    mark,
    stop_for,
    text_of,
    was_announced,
)
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.comm import state_sync

# The step with the fault. The buckets are laid out in the steps before it.
STEP = 2
_LAST_STEP = 5
STALL_S = 3.0
RAISE_S = 1.5
CAUSE = "no such sample"

FAULTS = ("kill", "segfault", "exit", "exception", "stall", "stall, raise", "stop, raise")
PHASES = (
    "before wrapping",
    "construction",
    "forward",
    "gradient hook",
    "bucket in flight",
    "waiting",
    "communication hook",
    "between steps",
)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "check finite": {},
}


@dataclass(frozen=True)
class Case:
    """One training and its fault.

    Attributes:
        victim: The rank with the fault. Negative numbers count from the end.
        hosts: 1 or 2. With 2, the second half of the ranks is on another simulated host.
    """

    fault: str
    phase: str
    transport: str = "gloo"
    world_size: int = 2
    victim: int = -1
    mode: str = "default"
    hosts: int = 1

    @property
    def victim_rank(self) -> int:
        return self.victim % self.world_size

    @property
    def identities(self) -> str:
        half = (self.world_size + 1) // 2
        return "" if self.hosts == 1 else "A" * half + "B" * (self.world_size - half)

    @property
    def device(self) -> str:
        return "cuda" if self.transport == "nccl" else "cpu"

    @property
    def at_construction(self) -> bool:
        return self.phase in ("before wrapping", "construction")

    @property
    def raises(self) -> bool:
        """Whether ranks that wait for the victim raise an error."""
        return "raise" in self.fault

    @property
    def environment(self) -> dict[str, str]:
        if self.raises and self.at_construction:
            return {"DDPX_STALL_ERROR": str(RAISE_S)}
        return {"DDPX_STALL_WARN": "0.5"} if self.fault == "stall" else {}

    def is_warning(self, text: str) -> bool:
        """Whether a message warns of the victim in the step of its fault."""
        # The machine may delay the victim in another step, too.
        in_step = self.at_construction or f" s in step {STEP}, phase " in text
        return in_step and f"missing: rank {self.victim_rank}, " in text

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in vars(self).values())


@dataclass(frozen=True)
class Report:
    """The report of a live rank.

    Attributes:
        kind: The type of the exception. Empty if the rank trained to the end.
        at_s: The time of the report by time.monotonic().
        logged: Event and message of each record of the logger "ddpx.health".
        reason: ``reason`` of the exception.
    """

    kind: str
    text: str
    at_s: float
    ranks: tuple[int, ...]
    reported_by: int
    host: str
    what: str
    cause: str
    last_seen: str
    step: int
    phase: str
    bucket: int | None
    params: tuple[str, ...]
    logged: tuple[tuple[str, str], ...]
    reason: str = ""


class _Layers(nn.Module):
    """Three layers and a buffer, with a place in forward for a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("num_calls", torch.zeros(1))
        self.in_forward: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        for layer in self.layers:
            x = layer(x).relu()
        if self.in_forward is not None:
            self.in_forward()
        return x


class _Training:
    """The training of one rank. The victim fails when it reaches the place of its fault."""

    def __init__(self, case: Case, wrap: Callable[..., nn.Module], whole_stall: bool) -> None:
        self.case = case
        self.wrap = wrap
        self.whole_stall = whole_stall
        self.is_victim = dist.get_rank() == case.victim_rank
        self.step = 0
        self.happened = False
        self.trouble = threading.Thread(target=self._trouble_while_waiting)

    def come_to(self, phase: str, step: int = STEP) -> None:
        if self.is_victim and phase == self.case.phase and step == STEP and not self.happened:
            self.happened = True
            self.get_into_trouble()

    def get_into_trouble(self) -> None:
        fault = self.case.fault
        mark("fault")
        if fault == "exception":
            raise ValueError("no such sample")
        if fault.startswith("stall"):
            time.sleep(STALL_S)
            mark("awake")
        elif fault.startswith("stop"):
            stop_for(STALL_S)
            mark("awake")
        else:
            crash(fault)

    def _stall(self) -> None:
        others = set(range(dist.get_world_size())) - {dist.get_rank()}
        end = time.monotonic() + STALL_S
        while self.whole_stall or not all(was_announced(_reported(rank)) for rank in others):
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        if self.case.raises:
            time.sleep(0.5)  # this rank hears of the failure; its calls might still succeed

    def run(self) -> None:
        dist.barrier()  # a death in the middle of init_process_group() is not a case for ddpx
        self.come_to("before wrapping")
        module = _Layers().to(self.case.device)
        model = self._wrapped(module)
        self._place_trouble(module, model)
        if not self.case.at_construction:
            let_meet(model)
        for self.step in range(_LAST_STEP):
            if self.step == STEP and self.case.raises:
                # Not earlier: the machine may make any rank late, and a report must not name such a
                # rank.
                dist.barrier()
                ddpx.set_stall_timeout(error=RAISE_S)
            self.come_to("between steps", self.step)
            loss = model(torch.ones(2, 64, device=self.case.device)).sum()
            loss.backward()
            if self.case.device != "cpu":
                loss.item()  # as scripts do; the host waits for the device

    def _wrapped(self, module: nn.Module) -> nn.Module:
        broadcast = state_sync.broadcast

        def broadcast_late(*args: Any) -> None:
            self.come_to("construction")
            broadcast(*args)

        state_sync.broadcast = broadcast_late
        model = self.wrap(module, bucket_cap_mb=0.02, **MODES[self.case.mode])
        if self.case.mode == "check finite":
            model.set_check_finite()
        return model

    def _place_trouble(self, module: _Layers, model: nn.Module) -> None:
        module.in_forward = lambda: self.come_to("forward", self.step)
        first, last = module.layers[0].weight, module.layers[-1].weight
        last.register_hook(lambda grad: self.come_to("gradient hook", self.step))
        # The buckets of the later layers have been launched when the first layer's gradient
        # arrives.
        first.register_hook(lambda grad: self.come_to("bucket in flight", self.step))
        if self.case.phase == "waiting":
            first.register_hook(lambda grad: self._wait_or_be_late(model))
        if self.case.phase == "communication hook":
            # No annotations: DDP evaluates annotations, and refuses strings.
            model.register_comm_hook(None, lambda state, bucket: self._hook(bucket))

    def _wait_or_be_late(self, model: nn.Module) -> None:
        """The victim waits for a late rank, until another thread causes its fault."""
        if self.step != STEP:
            return
        if self.is_victim:
            self.trouble.start()
        elif dist.get_rank() == (self.case.victim_rank + 1) % self.case.world_size:
            self._outlast_victim(model)

    def _trouble_while_waiting(self) -> None:
        await_announcement("the victim waits")
        self.get_into_trouble()

    def _outlast_victim(self, model: nn.Module) -> None:
        if not isinstance(model, ReducerDDP):  # ranks of DDP do not publish their state
            time.sleep(0.3)
            announce("the victim waits")
            time.sleep(0.3)
            return

        def victim() -> ddpx.RankStatus:
            return next(
                each for each in ddpx.peer_status(model) if each.rank == self.case.victim_rank
            )

        waiting = f"step {STEP}, phase waiting for buckets"
        await_that(lambda: waiting in str(victim().doing), "the victim does not wait")
        announce("the victim waits")
        monitor = ddpx._C.monitor_of(model.process_group)
        assert monitor is not None
        # The end of a dead rank. shm may end a call without a rank that has done its part.
        await_that(lambda: monitor.failed or is_stopped(victim().pid), "there is no trouble")

    def _hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 1:
            self.come_to("communication hook", self.step)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def _reported(rank: int) -> str:
    return f"rank {rank} has reported the victim"


class _Collected(logging.Handler):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        event, text = getattr(record, "event", ""), record.getMessage()
        self.records.append((event, text))
        if event == "stalled" and self.case.is_warning(text):
            announce(_reported(dist.get_rank()))

    def await_end_of_stall(self) -> None:
        """Waits until the health monitor has seen the end of the stall, and the log thread has
        written it."""
        deadline = time.monotonic() + 10
        while self._in_stall() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _in_stall(self) -> bool:
        events = [event for event, _ in self.records if event in ("stalled", "stall_over")]
        return events[-1:] == ["stalled"]


def train(
    case: Case, wrap: Callable[..., nn.Module] = ReducerDDP, whole_stall: bool = False
) -> Report:
    """Runs on every rank.

    Args:
        wrap: ddpx or, for comparison, torch's DDP.
        whole_stall: A stall lasts for ``STALL_S``. Otherwise it ends early, when all other ranks
            have warned of the victim or raised.
    """
    collected = _Collected(case)
    logger = logging.getLogger("ddpx.health")
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    training = _Training(case, wrap, whole_stall)
    error: BaseException | None = None
    try:
        training.run()
    except Exception as raised:
        if training.is_victim and "no such sample" in str(raised):
            raise
        error = raised
        announce(_reported(dist.get_rank()))
    at_s = time.monotonic()
    if training.trouble.ident is not None:
        training.trouble.join()  # the thread may not have recorded its wake-up yet
    collected.await_end_of_stall()
    return _report(error, at_s, tuple(collected.records))


def _report(
    error: BaseException | None, at_s: float, logged: tuple[tuple[str, str], ...]
) -> Report:
    text = "" if error is None else text_of(error)
    if not isinstance(error, ddpx.RankError):
        kind = "" if error is None else type(error).__name__
        return Report(kind, text, at_s, (), -1, "", "", "", "", -1, "", None, (), logged)
    first = error.lost[0]
    return Report(
        type(error).__name__,
        text,
        at_s,
        error.lost_ranks,
        error.reported_by,
        first.host,
        first.what,
        first.error,
        first.last_seen,
        error.step,
        error.phase,
        error.bucket,
        error.params,
        logged,
        error.reason,
    )
