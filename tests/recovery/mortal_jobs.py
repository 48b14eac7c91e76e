"""Small trainings whose ranks die at given moments, and their results."""

from __future__ import annotations

import copy
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import late_device
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddpx
from ddpx.cli.guard import NCCL_SURVIVAL
from ddpx.ddp.fronts.lookup import front_of
from ddpx.elastic import survivor_agreement
from ddpx.elastic.regroup import Recipe
from ddpx.testing.rank_pool import choose_gpu, forking_context

shrink = sys.modules["ddpx.elastic.shrink"]  # the package also has a function of this name

TIME_LIMIT_S = 60.0
_CONTEXT = forking_context()

PHASES = (
    "forward",
    "backward",  # before any bucket is launched
    "in flight",
    "waiting",
    "hook",
    "before optimizer",
    "optimizer",
)

# The rank does not come, and ends after the others have given it up.
LATE = "late"
TIMEOUT = timedelta(seconds=40)  # of process groups
_STALL_ERROR_S = 2.0

# In ddpx.shrink(). Only the leading rank makes decisions.
SHRINK_PHASES = ("came", "decided", "accepted", "with a group", "ready")

State = dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """A kill. ``rank`` is the number of the rank at the start of the job."""

    rank: int
    step: int
    phase: str


@dataclass(frozen=True)
class Job:
    """The parameters of a training, the same on all ranks.

    Attributes:
        start: The initial state and its step. None: made from the seed.
        until: The step before which the training ends.
        stop_before_optimizer: A rank that waits between backward and optimizer.
        device: "cpu", "late" or "cuda".
        waits: Whether ranks call :func:`ddpx.wait_for_gradients`.
        front: The wrapper, or :func:`ddpx.replicate`.
        other_group: Whether each step makes a call of another group, and waits for no result.
    """

    world_size: int
    backend: str
    until: int
    kills: tuple[Kill, ...] = ()
    start: tuple[int, State] | None = None
    with_hook: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    stop_before_optimizer: int | None = None
    device: str = "cpu"
    waits: bool = False
    front: Callable[..., nn.Module] = ddpx.ReducerDDP
    other_group: bool = False


@dataclass
class Report:
    """The results of a rank that came to its end."""

    losses: list[tuple[int, int, float]] = field(default_factory=list)  # step, world size, loss
    shrunk: list[ddpx.Shrunk] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # after each loss, and at the end
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


# ---- on a rank -----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.on_hidden: Callable[[torch.Tensor], Any] | None = None
        self.on_forward: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.on_forward is not None:
            self.on_forward()
        if self.on_hidden is not None and hidden.requires_grad:
            hidden.register_hook(self.on_hidden)
        return self.third(torch.tanh(self.second(hidden)))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _die_in_shrink(phase: str) -> None:
    if phase == "with a group":
        shrink._Move._fetch_state = lambda *args: die()
        return
    write = survivor_agreement.Rendezvous._write

    def write_and_die(
        self: survivor_agreement.Rendezvous, state: survivor_agreement.SurvivorState
    ) -> None:
        write(self, state)
        stages = {
            "came": survivor_agreement.ARRIVED,
            "accepted": survivor_agreement.ACCEPTED,
            "ready": survivor_agreement.READY,
        }
        if state.agreement is not None if phase == "decided" else state.stage == stages[phase]:
            die()

    survivor_agreement.Rendezvous._write = write_and_die


class Trainer:
    """One rank's part of a job."""

    def __init__(self, job: Job, first_rank: int) -> None:
        self.job = job
        self.first_rank = first_rank
        torch.manual_seed(7)
        self.net = Net().to(job.device)
        self.model = job.front(self.net, bucket_cap_mb=0.001, **job.options)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.dies_in_hook = False
        if job.with_hook:
            ddpx.register_comm_hook(self.model, None, self._hook)
        self.other_group = None
        if job.other_group:
            # The end of a gloo group waits for its call until the timeout, if a peer still holds
            # the connection.
            timeout = timedelta(seconds=15)
            self.other_group = dist.new_group(backend=job.backend, timeout=timeout)
        self.step = 0
        if job.start is not None:
            self.step, state = job.start
            self._load(state)
        self.report = Report()
        if any(kill.phase == LATE for kill in job.kills):
            ddpx.set_stall_timeout(error=_STALL_ERROR_S)

    def run(self) -> Report:
        while self.step < self.job.until:
            try:
                self._make_step()
                self.step += 1
            except (ddpx.RankFailure, ddpx.RankStalled) as failure:
                self.report.errors.append(f"{type(failure).__name__}: {failure}")
                self._shrink()
        self.report.states.append(self._state())
        return self.report

    def _shrink(self) -> None:
        for kill in self.job.kills:
            if kill.rank == self.first_rank and kill.phase in SHRINK_PHASES:
                _die_in_shrink(kill.phase)
        start = time.monotonic()
        shrunk = ddpx.shrink(
            self.model,
            self.optimizer,
            self.schedule,
            step=None if self.job.waits else self.step,
            timeout_s=20,
        )
        self.report.seconds.append(time.monotonic() - start)
        self.step = shrunk.step
        self.other_group = None  # destroyed
        self.report.shrunk.append(shrunk)
        self.report.states.append(self._state())
        assert dist.get_rank() == shrunk.rank and dist.get_world_size() == shrunk.world_size
        assert all(param.grad is None for param in self.model.parameters())
        assert Recipe.of(front_of(self.model).process_group).timeout == TIMEOUT
        if self.job.device == "cpu":
            expected = "shm" if shrunk.world_size > 1 else self.job.backend
            assert front_of(self.model).reducer.transport == expected

    def _make_step(self) -> None:
        phase = next(
            (k.phase for k in self.job.kills if (k.rank, k.step) == (self.first_rank, self.step)),
            "",
        )
        self.net.on_forward = die if phase == "forward" else None
        self.net.on_hidden = self._on_hidden(phase)
        self.dies_in_hook = phase == "hook"
        generator = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        x = torch.randn(6, 8, generator=generator).to(self.job.device)
        y = torch.randn(6, 4, generator=generator).to(self.job.device)
        loss = nn.functional.mse_loss(self.model(x), y)
        if phase == "backward":
            loss.register_hook(lambda grad: die())
        if phase == LATE:
            time.sleep(2 * _STALL_ERROR_S)
            die()
        if phase == "waiting":
            threading.Timer(0.3, die).start()
        self.report.losses.append((self.step, dist.get_world_size(), loss.item()))
        loss.backward()
        if phase == "before optimizer":
            die()
        if phase == "optimizer":
            with torch.no_grad():
                self.net.first.weight.add_(1)
            die()
        self._look_after_peers()
        if self.other_group is not None:
            dist.all_reduce(loss.detach(), group=self.other_group, async_op=True)
        if self.job.waits:
            ddpx.wait_for_gradients(self.model)
        self.optimizer.step()
        self.net.num_batches += 1
        self.schedule.step()
        self.optimizer.zero_grad()

    def _on_hidden(self, phase: str) -> Callable[[torch.Tensor], Any] | None:
        if phase == "in flight":
            return lambda grad: die()
        waits = any(k.phase == "waiting" and k.step == self.step for k in self.job.kills)
        if waits and not phase and dist.get_rank() == min(_survivors(self.job)):
            return lambda grad: time.sleep(0.8)  # so that the rank that dies waits for this one
        return None

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.dies_in_hook and bucket.index() == 1:
            die()
        return allreduce_hook(state, bucket)

    def _look_after_peers(self) -> None:
        if self.job.stop_before_optimizer != self.first_rank:
            return
        monitor = front_of(self.model).reducer.monitor
        while self.job.kills[0].step == self.step and monitor is not None and not monitor.failed:
            time.sleep(0.01)
        if monitor is not None:
            monitor.raise_if_failed()

    def _state(self) -> State:
        parts = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}
        state = {name: dict(part.state_dict()) for name, part in parts.items()}
        return copy.deepcopy(_on_cpu(state))

    def _load(self, state: State) -> None:
        # tensors sent by multiprocessing are in memory shared with other ranks
        state = copy.deepcopy(state)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def _survivors(job: Job) -> list[int]:
    return [rank for rank in range(job.world_size) if rank not in {k.rank for k in job.kills}]


def train(job: Job, rank: int) -> Report:
    return Trainer(job, rank).run()


# ---- around the ranks ----------------------------------------------------------------------------


def run_job(job: Job, function: Callable[[Job, int], Any] = train) -> dict[int, Any]:
    """Runs ``function(job, rank)`` on each rank, and returns the results of ranks that came to
    their end.

    A rank that neither ends nor is killed fails the test.
    """
    with tempfile.TemporaryDirectory(prefix="ddpx-recovery-") as folder:
        processes = [
            _CONTEXT.Process(
                target=_serve, args=(job, rank, folder, function, list(sys.path)), daemon=True
            )
            for rank in range(job.world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIME_LIMIT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:
            processes[rank].kill()
            processes[rank].join()
        errors = [
            f"rank {rank}:\n{path.read_text()}"
            for rank in range(job.world_size)
            if (path := Path(folder, f"error{rank}")).exists()
        ]
        assert not late and not errors, f"{job}\nlate: ranks {late}\n" + "\n".join(errors)
        killed = {kill.rank for kill in job.kills}
        for rank, process in enumerate(processes):
            expected = -signal.SIGKILL if rank in killed else 0
            assert process.exitcode == expected, f"{job}: rank {rank}: {process.exitcode}"
        return {
            rank: torch.load(Path(folder, f"report{rank}"), weights_only=False)
            for rank in range(job.world_size)
            if rank not in killed
        }


def _serve(
    job: Job, rank: int, folder: str, function: Callable[[Job, int], Any], path: list[str]
) -> None:
    sys.path[:] = path
    faulthandler.dump_traceback_later(TIME_LIMIT_S - 5)  # shows where a rank waits
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        _enter_device(job, rank)
        dist.init_process_group(
            job.backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=job.world_size,
            timeout=TIMEOUT,
        )
        torch.save(function(job, rank), Path(folder, f"report{rank}"))
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _enter_device(job: Job, rank: int) -> None:
    if job.device == "late":
        controls = late_device.load()
        controls.set_failures_hang(True)
        controls.set_hold(late_device.milliseconds(5))
        torch.accelerator.set_device_index(0)
    elif job.device == "cuda":
        os.environ |= {**NCCL_SURVIVAL, "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        choose_gpu(rank, job.world_size)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_on_cpu(value) for value in state)
    return state


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Compares two states, bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{where}: off by {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where
