"""Finds the ranks whose state is known to be right after a loss."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ddpx.ddp.fronts.front import Front
from ddpx.elastic import errors
from ddpx.elastic.survivor_agreement import POLL_INTERVAL_S, Agreement

# The device's last steps before the abort become known within this time.
_DEVICE_STEPS_S = 0.5


def waits_in_each_step(model: Front) -> bool:
    """Whether the loop calls wait_for_gradients(), so that it applies only averages it has."""
    reducer = model.reducer
    waited = reducer.num_steps_waited
    return waited is not None and reducer.num_steps - waited in (0, 1)


def num_applied_steps(model: Front) -> int:
    """The number of steps whose averages the parameters may contain."""
    waited = model.reducer.num_steps_waited
    if waited is not None and waits_in_each_step(model):
        return waited
    return model.reducer.num_steps


def is_right(model: Front, num_steps: int) -> bool:
    """Whether parameters and buffers of this rank contain no results of aborted calls."""
    reducer = model.reducer
    monitor = reducer.monitor
    if monitor is not None and monitor.interrupted and not waits_in_each_step(model):
        return False  # the error may have been raised within the optimizer's step
    deadline = time.monotonic() + _DEVICE_STEPS_S
    while reducer.num_steps_averaged < num_steps and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    has_broadcasts = model.forward_sync_buffers and model.modules_buffers
    gets_buffers = has_broadcasts and model.process_group.rank() != 0
    if gets_buffers and model._ddpx.device.type != "cpu":
        return False
    if waits_in_each_step(model):
        return True
    return reducer.num_steps_averaged >= num_steps


def why_no_state(agreement: Agreement, stateful: Sequence[object]) -> RuntimeError | None:
    """The error if not all members can have the same right state. The same on all members."""
    if agreement.source is None:
        return RuntimeError(
            "no survivor has parameters that are known to be right: all-reduces of the last step "
            "were aborted on the device, and the optimizer's step may have been queued behind "
            f"them. {errors.FROM_CHECKPOINT} Call ddpx.wait_for_gradients(model) before "
            "optimizer.step(), so that ddpx.shrink() can continue after the next loss."
        )
    if agreement.same_state or stateful:
        return None
    return RuntimeError(
        f"only some ranks have the right state of step {agreement.step}. ddpx.shrink() got only "
        f"the model, and cannot bring the other ranks to step {agreement.step}. Pass all objects "
        "that change in every step: ddpx.shrink(model, optimizer, scheduler)."
    )
