"""Going on after ranks were lost, with those that are left and without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ddpx import _C, params, state_sync
from ddpx.errors import nobody_watches
from ddpx.health.failure import RankFailure, RankMismatch
from ddpx.recovery import errors
from ddpx.recovery.meeting import ACCEPTED, READY, Agreement, Meeting
from ddpx.recovery.regroup import Regrouping
from ddpx.settings import seconds

if TYPE_CHECKING:
    from ddpx.module import ReducerDDP

_BETWEEN_LOOKS_S = 0.005


class Stateful(Protocol):
    """An optimizer, a learning-rate schedule, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Shrunk:
    """What has become of a group that lost ranks.

    Attributes:
        step: the one to make next, as told by ``step=``; else the number of synchronised backwards
            that this wrapper has made.
        rank: this rank in the new group.
        world_size: of the new group.
        lost: the ranks that are not in it, as they were numbered before.
        survivors: by new rank, the rank before.
        caught_up: this rank's state was replaced by that of one which was a step ahead.
    """

    step: int
    rank: int
    world_size: int
    lost: tuple[int, ...]
    survivors: tuple[int, ...]
    caught_up: bool


def shrink(
    model: ReducerDDP, *stateful: Stateful, step: int | None = None, timeout_s: float = 30.0
) -> Shrunk:
    """Goes on without the ranks that were lost; to be called by every survivor after RankFailure.

    The default process group is destroyed, and with it all others; a new one of the survivors takes
    its place, in which they keep their order. ``model`` averages over it from here on, with first
    buckets as after wrapping. Ranks that had not finished the step in which a rank was lost get
    parameters, buffers and the states of ``stateful`` from one that had; if none had, it has to be
    made again. Gradients are set to None.

    All parameters have to be on the CPU: on a device, the host counts a step before its all-reduces
    have ended, and a rank with an aborted one could become the source of state.

    A rank that is lost meanwhile is left out, too. Survivors have to be on one machine, and to live
    through the failure: a launcher has to spare them, as ``ddpx run --keep-survivors`` does.

    Args:
        model: the only wrapper of its process group, which is the default one or has all its ranks.
        stateful: what changes with every step besides the model, all of it: optimizers, schedules,
            scalers.
        step: the next one for this rank: as many optimizer steps as are in its parameters. Needed
            where a step is not one synchronised backward, and for a job that went on from a
            checkpoint to get its own numbers back.
        timeout_s: seconds to wait for other survivors.

    Raises:
        RuntimeError: nobody was lost, as after RankMismatch; survivors did not come in time, and
            which; this wrapper cannot go over to another group (the text says why), as one with
            parameters on a device.
        NotImplementedError: ranks of several machines; a process group of some ranks only.
    """
    step = None if step is None else index(step)
    seconds("timeout_s", timeout_s)
    monitor = _monitor_of_failure(model, step)
    reason = _why_not(model, stateful)
    if reason is not None:
        raise errors.cannot_shrink(reason)
    model.reset()
    num_steps = model.reducer.num_steps
    move = _Move(model, stateful, monitor, num_steps if step is None else step, timeout_s)
    try:
        return move.run()
    except BaseException:
        move.meeting.give_up()
        raise


class _Move:
    """From the old group to the new one, in as many attempts as it takes."""

    def __init__(
        self,
        model: ReducerDDP,
        stateful: Sequence[Stateful],
        monitor: _C.Monitor,
        step: int,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._stateful = stateful
        self._monitor = monitor
        self._world_size = model.process_group.size()
        # For each part of an attempt: others wait for who takes longer to see that it fails.
        self._attempt = timedelta(seconds=timeout_s / 4)
        self._regrouping = Regrouping(model.process_group)
        self.meeting = Meeting(monitor, self._world_size, step, model.reducer.num_steps, timeout_s)

    def run(self) -> Shrunk:
        cause: Exception | None = None
        for _ in range(self._world_size + 2):  # each of the others may be lost meanwhile
            agreement = self.meeting.agree()
            if not (agreement.same_state or self._stateful):
                self.meeting.reach(agreement, ACCEPTED)  # so that all get to know of it
                raise errors.shrink_without_state(agreement.step)
            if not self.meeting.reach(agreement, ACCEPTED):
                continue
            try:
                group = self._make_group(agreement)
                take_over = self._fetch_state(agreement, group)
            except RuntimeError as error:
                cause = error.with_traceback(None)  # whose frames hold groups
                continue
            if self.meeting.reach(agreement, READY):
                self._regrouping.finish(group)
                return self._finish(agreement, group, take_over)
        raise errors.shrink_failed() from cause

    def _make_group(self, agreement: Agreement) -> dist.ProcessGroup:
        group = self._regrouping.make(
            self.meeting.store(agreement, self._attempt.total_seconds()),
            agreement.members.index(self._monitor.rank),
            len(agreement.members),
            self._attempt,
        )
        # What is lost from here on is lost by the new group, which has to know its ranks for that.
        monitor = _C.monitor_of(group)
        if monitor is not None:
            self._await_introductions(monitor, agreement)
        return group

    def _await_introductions(self, monitor: _C.Monitor, agreement: Agreement) -> None:
        deadline = time.monotonic() + self._attempt.total_seconds()
        others = len(agreement.members) - 1
        while sum(bool(seen) for seen in monitor.ranks()) < others:
            if time.monotonic() > deadline or not self.meeting.all_live(agreement):
                raise errors.shrink_failed()
            time.sleep(_BETWEEN_LOOKS_S)

    def _fetch_state(
        self, agreement: Agreement, group: dist.ProcessGroup
    ) -> Callable[[], None] | None:
        """The source's state, and what puts it in place: not before it is sure to be complete."""
        if agreement.same_state:
            return None
        model = self._model
        source = agreement.members.index(agreement.source)
        state = params.module_state(model.module, model.parameters_to_ignore, with_buffers=True)
        fetched = [tensor.clone() for tensor in state]
        state_sync.broadcast(fetched, group, source)
        dicts: list[Any] = [[item.state_dict() for item in self._stateful]]
        dist.broadcast_object_list(dicts, src=source)
        if group.rank() == source:
            return None

        def take_over() -> None:
            with torch.no_grad():
                for tensor, new in zip(state, fetched, strict=True):
                    tensor.copy_(new)
            for item, saved in zip(self._stateful, dicts[0], strict=True):
                item.load_state_dict(saved)

        return take_over

    def _finish(
        self, agreement: Agreement, group: dist.ProcessGroup, take_over: Callable[[], None] | None
    ) -> Shrunk:
        if take_over is not None:
            take_over()
        self._model._go_over(group, agreement.num_steps)
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


def _monitor_of_failure(model: ReducerDDP, step: int | None) -> _C.Monitor:
    """The monitor of the model's group, which has lost ranks; from here on peers know that this
    rank does, too."""
    monitor = _C.monitor_of(model.process_group)
    if monitor is None:
        raise nobody_watches()
    # Else the error came from a call of the user's, perhaps between backward and optimizer step.
    raised_here = monitor.has_raised
    try:
        monitor.explain_error("")
    except RankMismatch:
        raise errors.shrink_after_mismatch() from None
    except RankFailure:
        if step is None and not raised_here:
            raise errors.shrink_needs_step() from None
        return monitor
    raise errors.shrink_without_loss()


def _all_on_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the host knows that a step has ended once it has made it."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _why_not(model: ReducerDDP, stateful: Sequence[Stateful]) -> str | None:
    """Why this wrapper cannot go over to another group; the same on every rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from ddpx import wrapped_params

    if not _all_on_cpu(model.module.parameters()):
        return "device"
    if model._hook_holds_group or model._hook_state_holds_group():
        return "hook"
    if model._steps_in_backward:
        return "optimizer in backward"
    if model._join_config.enable:
        return "join"
    if model.device_mesh is not None:
        return "mesh"
    if model.reducer.recorded:
        return "recording"
    if any(isinstance(item, ZeroRedundancyOptimizer) for item in stateful):
        return "sharded optimizer"
    if wrapped_params.others_than(model):
        return "several wrappers"
    return None
