"""What ``shrink`` needs: checks of the arguments, of the failure and of the wrapper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index
from typing import Any, Protocol, SupportsIndex

import torch.distributed as dist

from ddpx import _C, health
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.replica import ownership
from ddpx.elastic import errors, state_check
from ddpx.errors import no_failure_detector
from ddpx.health.failure import RankFailure, RankMismatch, RankStalled

# torch reads the variable when a group is made. Another value lets its watchdog end this process
# about a minute after an error of NCCL.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Stateful(Protocol):
    """An optimizer, a learning-rate schedule or a gradient scaler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def number_of_step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise TypeError(f"step must be an integer or None, but got {step!r}.")
    if index(step) < 0:
        raise ValueError(f"step={step!r} is negative. Pass the number of optimizer steps so far.")
    return index(step)


def check_stateful(stateful: Sequence[object]) -> None:
    """Checks before anything is changed: the methods are called only if survivors differ."""
    for item in stateful:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise TypeError(
                    f"ddpx.shrink() got {type(item).__name__}, which has no {method}(). Pass each "
                    "optimizer, schedule and scaler as an argument of its own: "
                    "ddpx.shrink(model, optimizer, scheduler)."
                )


def monitor_of_failure(model: Front, step: int | None) -> _C.Monitor:
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


def why_not(model: Front, stateful: Sequence[Stateful]) -> str | None:
    """The reason why this wrapper cannot change its group. None if it can.

    The answer is the same on every rank.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    devices = sorted({str(param.device) for param in model.module.parameters()})
    if len(devices) > 1:
        return f"its parameters are on several devices ({', '.join(devices)})"
    uses_nccl = "nccl" in str(dist.get_backend_config(model.process_group))
    if uses_nccl and os.environ.get(_WATCHDOG) != "0":
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
