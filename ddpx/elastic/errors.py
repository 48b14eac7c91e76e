"""Every text of an error of this package."""

from __future__ import annotations

from collections.abc import Mapping

_FROM_CHECKPOINT = "Restart from a checkpoint (torchrun --max-restarts)."
_WHY_NOT_SHRINK = {
    "device": "not all parameters of the wrapper are on the CPU. A device may still be running a "
    "step that the host has counted, so no rank knows which rank has the last complete step",
    "hook": "its communication hook or mixed_precision keeps the process group that existed when "
    "it was set",
    "optimizer in backward": "its optimizer runs inside backward, so some parameters may have made "
    "the step and others not",
    "join": "it is inside join(), where ranks may be at different batches",
    "mesh": "it was made with a device_mesh, and the mesh would still contain the lost ranks",
    "recording": "it is being recorded, and a recording needs the same ranks in all steps. Leave "
    "the ddpx.record() block first, or unset DDPX_TIMELINE",
    "sharded optimizer": "a ZeroRedundancyOptimizer keeps a part of its state on each rank, and "
    "the parts of the lost ranks are lost",
    "several wrappers": "there is another ReducerDDP, which would be left without a process group",
}


def cannot_shrink(reason: str) -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() cannot move this wrapper to another process group: "
        f"{_WHY_NOT_SHRINK[reason]}. {_FROM_CHECKPOINT}"
    )


def shrink_without_loss() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() was called, but no rank of this wrapper's process group is lost. Call "
        "ddpx.shrink() on every surviving rank, after ddpx.RankFailure."
    )


def shrink_after_mismatch() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() removes lost ranks, but no rank is lost. Ranks made different collective "
        "calls (ddpx.RankMismatch), and the parameters of ranks may differ now. "
        f"{_FROM_CHECKPOINT}"
    )


def shrink_needs_step() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() was called after an error that did not come from forward or backward of the "
        "wrapper. ddpx.shrink() cannot tell whether the optimizer made the last step on this rank. "
        "Pass step=, the number of optimizer steps that the parameters of this rank contain."
    )


def shrink_of_part(size: int, world_size: int) -> NotImplementedError:
    return NotImplementedError(
        "ddpx.shrink() needs a wrapper over all ranks, but this wrapper's process group has "
        f"{size} of {world_size} ranks. {_FROM_CHECKPOINT}"
    )


def shrink_between_hosts(rank: int, host: str) -> NotImplementedError:
    return NotImplementedError(
        f"ddpx.shrink() works among the ranks of one machine, but rank {rank} is on another "
        f"machine ({host}). {_FROM_CHECKPOINT}"
    )


def shrink_without_page(rank: int) -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() cannot read the state of rank {rank}: the kernel does not permit it. The "
        f"process of rank {rank} may belong to another user. {_FROM_CHECKPOINT}"
    )


def shrink_timed_out(timeout_s: float, doing: Mapping[int, str | None]) -> RuntimeError:
    """``doing``: by rank, of those that have not come, what they were last seen doing."""
    late = ", ".join(
        f"rank {rank} (" + (f"last seen in {seen})" if seen else "state unknown)")
        for rank, seen in sorted(doing.items())
    )
    return RuntimeError(
        f"ddpx.shrink() waited {timeout_s:g} s, but some ranks did not call ddpx.shrink(): {late}. "
        "Call ddpx.shrink() on every surviving rank, after ddpx.RankFailure. Pass a larger "
        "timeout_s= to wait longer."
    )


def shrink_without_state(step: int) -> RuntimeError:
    return RuntimeError(
        f"one rank is at step {step} already and other ranks are not. ddpx.shrink() got only the "
        f"model, and cannot bring the other ranks to step {step}. Pass all objects that change in "
        "every step: ddpx.shrink(model, optimizer, scheduler)."
    )


def shrink_failed() -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() could not make a process group of the surviving ranks. {_FROM_CHECKPOINT}"
    )
