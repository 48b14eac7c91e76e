"""``shrink``: training continues after ranks were lost, without a restart."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpx import _C, params
from ddpx.comm import state_sync, transport
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.fronts.lookup import front_of
from ddpx.elastic import errors, state_check
from ddpx.elastic.preconditions import (
    Stateful,
    check_stateful,
    monitor_of_failure,
    number_of_step,
    why_not,
)
from ddpx.elastic.regroup import Regrouping, abort_other_groups
from ddpx.elastic.survivor_agreement import (
    ACCEPTED,
    POLL_INTERVAL_S,
    READY,
    Agreement,
    Rendezvous,
    SurvivorState,
)
from ddpx.settings import seconds

_MOST_TIMEOUT_S = 86400.0


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
    step = None if step is None else number_of_step(step)
    timeout_s = min(seconds("timeout_s", timeout_s), _MOST_TIMEOUT_S)
    check_stateful(stateful)
    front = front_of(model)
    monitor = monitor_of_failure(front, step)
    if front._ddpx.search is not None:
        front._ddpx.search.stop()  # ends its recording; the new group begins a new search
    reason = why_not(front, stateful)
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
                # All members must read the agreement first.
                self.rendezvous.reach(agreement, ACCEPTED)
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
