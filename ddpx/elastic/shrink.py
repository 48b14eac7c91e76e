"""``shrink``: training continues after ranks were lost, without a restart."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, health, params
from ddpx.comm import state_sync, transport
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.fronts.lookup import front_of
from ddpx.ddp.replica import ownership
from ddpx.elastic import errors, state_check
from ddpx.elastic.regroup import Regrouping, abort_other_groups
from ddpx.elastic.survivor_agreement import (
    ACCEPTED,
    POLL_INTERVAL_S,
    READY,
    Agreement,
    Rendezvous,
    SurvivorState,
)
from ddpx.errors import no_failure_detector
from ddpx.health.failure import RankFailure, RankMismatch, RankStalled
from ddpx.settings import seconds

_MOST_TIMEOUT_S = 86400.0
# torch reads the variable when a group is made. Another value lets its watchdog end this process
# about a minute after an error of NCCL.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Stateful(Protocol):
    """An optimizer, a learning-rate schedule or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Shrunk:
    """The new process group, as :func:`shrink` returns it.

    Attributes:
        step: The next step. The number counts as ``step=`` of :func:`shrink` counts. Without
            ``step=``, the number of synchronized backwards of this wrapper.
        rank: The rank of this process in the new group.
        world_size: The number of ranks in the new group.
        lost: The lost ranks, by their old numbers.
        survivors: For each new rank, the old rank.
        caught_up: True if this rank took over the state of another rank. The other rank was a step
            ahead, or the state of this rank was wrong.

    Example:
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 is killed in this step
        ... except ddpx.RankFailure:
        ...     shrunk = ddpx.shrink(model, optimizer)
        >>> shrunk.rank, shrunk.world_size, shrunk.lost
        (0, 1, (1,))
    """

    step: int
    rank: int
    world_size: int
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    caught_up: bool


def shrink(
    model: nn.Module,
    *stateful: Stateful,
    step: int | None = None,
    timeout_s: float | timedelta = 30.0,
) -> Shrunk:
    """Continues training without the lost ranks. Every survivor calls this.

    To be called after :class:`ddpx.RankFailure` or :class:`ddpx.RankStalled`.

    The call destroys all process groups. A new default process group contains the survivors in
    their old order. ``model`` averages over the new group from here on. Its buckets are those of a
    new wrapper. Gradients are set to None.

    If only some survivors finished the step of the failure, the others get parameters, buffers and
    the states of ``stateful`` from a survivor that finished the step. If no survivor finished the
    step, the training loop repeats the step. ``step`` of the result is the next step in both
    cases. A rank that is lost during the call is left out, too.

    Over NCCL, the host queues the optimizer's step behind all-reduces that may be aborted. A
    survivor whose parameters may contain the gradients of such an all-reduce gets the state of a
    survivor whose parameters do not. A loop that calls :func:`ddpx.wait_for_gradients` before
    ``optimizer.step()`` has such survivors. If the forward broadcasts buffers, only rank 0 counts
    as such a survivor: an aborted broadcast may have changed the buffers of other ranks.

    Requirements:

    - All survivors are on one machine.
    - The launcher does not kill survivors. ``ddpx run --keep-survivors`` is such a launcher.
    - All parameters are on one device.
    - Over NCCL, ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` is set before the process group is made.
      ``ddpx run --keep-survivors`` sets it.

    Args:
        model: The only wrapper or replicated module of its process group. The process group
            contains all ranks.
        stateful: All other objects that change with every step: optimizers, schedules, scalers.
        step: The next step of this rank, which is the number of optimizer steps in its
            parameters. Default: the number of synchronized backwards. Pass the number if a step
            is not one synchronized backward, or if the job continues from a checkpoint.
        timeout_s: The time to wait for other survivors, in seconds or as a timedelta. Default 30 s,
            at most a day.

    Returns:
        A :class:`Shrunk`, with the new rank and the next step.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: ``step`` is negative, or ``timeout_s`` is below 0.001 s.
        RuntimeError: No rank was lost, as after RankMismatch. Or survivors did not call in time.
            The text names these ranks. Or this wrapper cannot change its process group. The text
            names the reason. Or no survivor has a state that is known to be right.
        NotImplementedError: Ranks are on several machines, or the process group of ``model`` has
            only some of the ranks.

    Example:
        >>> try:
        ...     model(inputs).sum().backward()  # rank 1 is killed in this step
        ...     optimizer.step()
        ... except ddpx.RankFailure:
        ...     shrunk = ddpx.shrink(model, optimizer)
        >>> shrunk.step, shrunk.world_size
        (0, 1)
        >>> model(inputs).sum().backward()  # the step again, on the only survivor
        >>> model.module.weight.grad
        tensor([[8., 8., 8., 8.]])
    """
    step = None if step is None else _number_of_step(step)
    timeout_s = min(seconds("timeout_s", timeout_s), _MOST_TIMEOUT_S)
    _check_stateful(stateful)
    front = front_of(model)
    monitor = _monitor_of_failure(front, step)
    if front._ddpx.search is not None:
        front._ddpx.search.stop()  # ends its recording; the new group begins a new search
    reason = _why_not(front, stateful)
    if reason is not None:
        raise RuntimeError(
            "ddpx.shrink() cannot move this wrapper to another process group: "
            f"{reason}. {errors.FROM_CHECKPOINT}"
        )
    if front._ddpx.device.type != "cpu":
        abort_other_groups(front.process_group)  # ddpx has aborted the wrapper's group
        torch.accelerator.synchronize(front._ddpx.device)
    front.reducer.reset()
    num_steps = state_check.num_applied_steps(front)
    state = SurvivorState(
        step=num_steps if step is None else step,
        num_steps=num_steps,
        is_right=state_check.is_right(front, num_steps),
    )
    move = _Move(front, stateful, monitor, state, timeout_s)
    try:
        return move.run()
    except BaseException:
        move.rendezvous.give_up()
        raise


def _number_of_step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(f"step must be an integer or None, but got {step!r}.")
    if index(step) < 0:
        raise ValueError(f"step={step!r} is negative. Pass the number of optimizer steps so far.")
    return index(step)


def _check_stateful(stateful: Sequence[object]) -> None:
    """Checks before anything is changed: the methods are called only if survivors differ."""
    for item in stateful:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise TypeError(
                    f"ddpx.shrink() got {type(item).__name__}, which has no {method}(). Pass each "
                    "optimizer, schedule and scaler as an argument of its own: "
                    "ddpx.shrink(model, optimizer, scheduler)."
                )


class _Move:
    """The change from the old process group to a new one, in several attempts if necessary."""

    def __init__(
        self,
        model: Front,
        stateful: Sequence[Stateful],
        monitor: _C.Monitor,
        state: SurvivorState,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._stateful = stateful
        self._monitor = monitor
        self._world_size = model.process_group.size()
        # The time limit of each part of an attempt. Other ranks wait for a rank whose part fails.
        self._attempt = timedelta(seconds=timeout_s / 4)
        self._regrouping = Regrouping(model.process_group)
        self.rendezvous = Rendezvous(monitor, self._world_size, state, timeout_s)

    def run(self) -> Shrunk:
        """Makes attempts until the survivors have a group.

        Raises:
            RuntimeError: All attempts failed.
        """
        cause: Exception | None = None
        for _ in range(self._world_size + 2):  # every other rank may be lost during an attempt
            agreement = self.rendezvous.agree()
            refusal = state_check.why_no_state(agreement, self._stateful)
            if refusal is not None:
                self.rendezvous.reach(
                    agreement, ACCEPTED
                )  # all members must read the agreement first
                raise refusal
            if not self.rendezvous.reach(agreement, ACCEPTED):
                continue
            try:
                group = self._make_group(agreement)
                take_over = self._fetch_state(agreement, group)
            except RuntimeError as error:
                cause = error.with_traceback(None)  # frames of the traceback hold groups
                continue
            if self.rendezvous.reach(agreement, READY):
                self._regrouping.finish(group)
                return self._finish(agreement, group, take_over)
        raise errors.shrink_failed() from cause

    def _make_group(self, agreement: Agreement) -> dist.ProcessGroup:
        group = self._regrouping.make(
            self.rendezvous.store(agreement, self._attempt.total_seconds()),
            agreement.members.index(self._monitor.rank),
            len(agreement.members),
            self._attempt,
        )
        # From here on the new group detects lost ranks. For this, all ranks must have published
        # their state in this group.
        monitor = _C.monitor_of(group)
        if monitor is not None:
            monitor.introduce()
            self._await_published_state(monitor, agreement)
        transport.connect(self._model._ddpx.options.transport, group, self._model._ddpx.device)
        return group

    def _await_published_state(self, monitor: _C.Monitor, agreement: Agreement) -> None:
        deadline = time.monotonic() + self._attempt.total_seconds()
        while sum(bool(state) for state in monitor.ranks()) < len(agreement.members):
            if time.monotonic() > deadline or not self.rendezvous.all_live(agreement):
                raise errors.shrink_failed()
            time.sleep(POLL_INTERVAL_S)

    def _fetch_state(
        self, agreement: Agreement, group: dist.ProcessGroup
    ) -> Callable[[], None] | None:
        """Fetches the state of the source.

        Returns:
            A function that takes over the fetched state, which is called when all ranks are ready.
            None if this rank has the state already.
        """
        if agreement.same_state:
            return None
        model = self._model
        assert agreement.source is not None  # see why_no_state()
        source = agreement.members.index(agreement.source)
        state = params.module_state(model.module, model.parameters_to_ignore, with_buffers=True)
        fetched = [tensor.clone() for tensor in state]
        state_sync.broadcast(fetched, group, source)
        file = io.BytesIO()
        torch.save([item.state_dict() for item in self._stateful], file)
        sent: list[Any] = [file.getvalue()]
        dist.broadcast_object_list(sent, src=source)
        if model._ddpx.device.type != "cpu":
            torch.accelerator.synchronize(model._ddpx.device)
            monitor = _C.monitor_of(group)
            if monitor is not None:
                monitor.raise_if_failed()  # the broadcasts may have been aborted
        if group.rank() == source:
            return None

        # The source's device may not be this rank's.
        dicts = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)

        def take_over() -> None:
            with torch.no_grad():
                for tensor, new in zip(state, fetched, strict=True):
                    tensor.copy_(new)
            for item, saved in zip(self._stateful, dicts, strict=True):
                item.load_state_dict(saved)

        return take_over

    def _finish(
        self, agreement: Agreement, group: dist.ProcessGroup, take_over: Callable[[], None] | None
    ) -> Shrunk:
        if take_over is not None:
            take_over()
        move_to(self._model, group, agreement.num_steps)
        self._monitor.retire()
        members = agreement.members
        return Shrunk(
            step=agreement.step,
            rank=group.rank(),
            world_size=len(members),
            lost=tuple(rank for rank in range(self._world_size) if rank not in members),
            survivors=members,
            caught_up=take_over is not None,
        )


def move_to(front: Front, group: dist.ProcessGroup, num_steps: int) -> None:
    """Averages over ranks that have the same state, as after construction.

    Args:
        front: The front.
        group: The ranks.
        num_steps: The number of steps that these ranks have made.
    """
    front._ddpx.move_to(group, num_steps)
    front.require_forward_param_sync = True  # the last forward was one of the old group


def _monitor_of_failure(model: Front, step: int | None) -> _C.Monitor:
    """Returns the monitor of the model's group, which has lost ranks.

    Peers then see that this rank knows of the failure.
    """
    monitor = _C.monitor_of(model.process_group)
    if monitor is None:
        raise no_failure_detector()
    # If False, the error came from another call, maybe between backward and optimizer step.
    knows_steps = (
        monitor.has_raised
        and not health.failed_between_steps(model.process_group)
        and (not monitor.interrupted or state_check.waits_in_each_step(model))
    )
    try:
        monitor.explain_error("")
    except RankMismatch:
        raise RuntimeError(
            "ddpx.shrink() removes lost ranks, but no rank is lost. Ranks made different "
            "collective calls (ddpx.RankMismatch), and the parameters of ranks may differ now. "
            f"{errors.FROM_CHECKPOINT}"
        ) from None
    except (RankFailure, RankStalled):
        if step is None and not knows_steps:
            raise RuntimeError(
                "ddpx.shrink() was called after an error that did not come from forward or "
                "backward of the wrapper. ddpx.shrink() cannot tell whether the optimizer made the "
                "last step on this rank. Pass step=, the number of optimizer steps that the "
                "parameters of this rank contain."
            ) from None
        return monitor
    raise RuntimeError(
        "ddpx.shrink() was called, but no rank of this wrapper's process group is lost. Call "
        "ddpx.shrink() on every surviving rank, after ddpx.RankFailure or ddpx.RankStalled."
    )


def _uses_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend_config(group))


def _why_not(model: Front, stateful: Sequence[Stateful]) -> str | None:
    """The reason why this wrapper cannot change its group. None if it can.

    The answer is the same on every rank.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    devices = sorted({str(param.device) for param in model.module.parameters()})
    if len(devices) > 1:
        return f"its parameters are on several devices ({', '.join(devices)})"
    if _uses_nccl(model.process_group) and os.environ.get(_WATCHDOG) != "0":
        return (
            f"{_WATCHDOG} is not 0, so torch's watchdog ends this process about a minute after the "
            "loss. Set the variable to 0 before the process group is made, or start the script by "
            "`ddpx run --keep-survivors`"
        )
    if model._ddpx.comm_hook.has_group:
        return (
            "its communication hook or mixed_precision keeps the process group that existed when "
            "it was set"
        )
    if model._ddpx.comm_hook.runs_optimizer:
        return (
            "its optimizer runs inside backward, so some parameters may have made the step and "
            "others not"
        )
    if model._join_config.enable:
        return "it is inside join(), where ranks may be at different batches"
    if getattr(model, "device_mesh", None) is not None:
        return "it was made with a device_mesh, and the mesh would still contain the lost ranks"
    if model.reducer.recorded:
        return (
            "it is being recorded, and a recording needs the same ranks in all steps. Leave the "
            "ddpx.record() block first, or unset DDPX_TIMELINE"
        )
    if any(isinstance(item, ZeroRedundancyOptimizer) for item in stateful):
        return (
            "a ZeroRedundancyOptimizer keeps a part of its state on each rank, and the parts of "
            "the lost ranks are lost"
        )
    if ownership.others_than(model._ddpx):
        return (
            "there is another ReducerDDP or replicated module, which would be left without a "
            "process group"
        )
    return None
