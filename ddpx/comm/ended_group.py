"""The place of a process group that has ended, in a wrapper that another wrapper has replaced."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist


class EndedGroup(dist.ProcessGroup):
    """Has the rank and the size of a group that has ended, and nothing else.

    A group holds threads, connections and shared memory for as long as a wrapper refers to it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]

    def allreduce(self, *arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError(
            "the process group of this ReducerDDP has ended, and a later ReducerDDP averages the "
            "parameters. Call the later wrapper, or wrap the module again."
        )

    broadcast = allgather = allreduce
