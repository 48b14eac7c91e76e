"""Every text of an error of this package."""

from __future__ import annotations

from collections.abc import Mapping

_FROM_CHECKPOINT = "Start again from a checkpoint (torchrun --max-restarts)."
_WHY_NOT_SHRINK = {
    "device": "not all of its parameters are on the CPU; a device may still be at work on a step "
    "that the host has counted, so that nobody knows which rank has the last complete step",
    "hook": "its communication hook or mixed_precision holds the process group that it was made "
    "with",
    "optimizer in backward": "its optimizer runs within backward, so that some parameters have "
    "made the step already and others have not",
    "join": "it is within join(), where ranks may be at different batches",
    "mesh": "it was made with a device_mesh, which would go on naming the lost ranks",
    "recording": "it is being recorded, and recordings are of ranks that stay the same; leave the "
    "ddpx.record() block first, or unset DDPX_TIMELINE",
    "sharded optimizer": "a ZeroRedundancyOptimizer keeps a part of its state on each rank, and "
    "those of lost ranks are lost",
    "several wrappers": "there is another ReducerDDP, which would be left without a process group",
}


def cannot_shrink(reason: str) -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() cannot take this wrapper to another process group: "
        f"{_WHY_NOT_SHRINK[reason]}. {_FROM_CHECKPOINT}"
    )


def shrink_without_loss() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() was called, but no rank of this wrapper's process group is lost. Call it "
        "on every survivor, after ddpx.RankFailure."
    )


def shrink_after_mismatch() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() goes on without lost ranks, but none is lost: ranks made different "
        "collective calls (ddpx.RankMismatch), and their parameters may differ by now. "
        f"{_FROM_CHECKPOINT}"
    )


def shrink_needs_step() -> RuntimeError:
    return RuntimeError(
        "ddpx.shrink() was called after an error that came from elsewhere than the wrapper's "
        "forward or backward, so that it cannot know whether the optimizer has made the last step "
        "on this rank. Pass step=, the number of steps that are in its parameters."
    )


def shrink_of_part(size: int, world_size: int) -> NotImplementedError:
    return NotImplementedError(
        f"ddpx.shrink() takes a wrapper over all ranks; this one's process group has {size} of "
        f"{world_size}. {_FROM_CHECKPOINT}"
    )


def shrink_between_hosts(rank: int, host: str) -> NotImplementedError:
    return NotImplementedError(
        f"ddpx.shrink() works among the ranks of one machine, and rank {rank} is on another one "
        f"({host}). {_FROM_CHECKPOINT}"
    )


def shrink_without_page(rank: int) -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() cannot meet rank {rank}: its memory may not be read, as that of another "
        f"user's process. {_FROM_CHECKPOINT}"
    )


def shrink_timed_out(timeout_s: float, doing: Mapping[int, str | None]) -> RuntimeError:
    """``doing``: by rank, of those that have not come, what they were last seen doing."""
    late = "; ".join(
        f"rank {rank}, " + (f"last seen in {seen}" if seen else "of which nothing is known")
        for rank, seen in sorted(doing.items())
    )
    return RuntimeError(
        f"ddpx.shrink() has waited {timeout_s:g} s for: {late}. Call it on every rank that lives, "
        "after ddpx.RankFailure; timeout_s= waits longer."
    )


def shrink_without_state(step: int) -> RuntimeError:
    return RuntimeError(
        f"one rank is at step {step} already and others are not, and ddpx.shrink() was given "
        "nothing to bring them there but the model. Pass what changes with every step: "
        "ddpx.shrink(model, optimizer, scheduler)."
    )


def shrink_failed() -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() could not make a process group of the survivors. {_FROM_CHECKPOINT}"
    )
