"""Makes sure that no two wrappers of this process average the same parameter in one backward.

Of several wrappers with the same parameters, the newest averages, or the wrapper whose forward ran
last outside the forward of another wrapper. All ranks run the same forwards, so all ranks decide
alike. A wrapper that has yielded keeps its reducer, with all settings.

An owner stands for its wrapper here.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Collection, Sequence, Set
from typing import Protocol

import torch.distributed as dist
from torch import nn

from ddpx import _C, errors
from ddpx.comm.process_group import made_by_torch, was_destroyed
from ddpx.params.managed import ManagedParam
from ddpx.reducer import Reducer


class Owner(Protocol):
    """The object of a wrapper that averages parameters: the members that this module uses."""

    group: dist.ProcessGroup

    @property
    def module(self) -> nn.Module: ...
    @property
    def name(self) -> str: ...
    @property
    def way_to_end(self) -> str: ...
    @property
    def reducer(self) -> Reducer: ...
    @property
    def param_ids(self) -> frozenset[int]: ...
    def is_part_of(self, modules: Collection[nn.Module]) -> bool: ...
    def averages(self) -> bool: ...
    def make_room(self) -> None: ...
    def yield_to(self, owner: Owner) -> None: ...


class Forwards(threading.local):
    """The owners whose forward runs on the calling thread. The outermost wrapper's is first."""

    def __init__(self) -> None:
        self.running: list[Owner] = []


forwards = Forwards()
_live: weakref.WeakSet[Owner] = weakref.WeakSet()


def earlier_owners(owner: Owner, managed: Sequence[ManagedParam]) -> list[Owner]:
    """The owners that average some of ``managed`` until ``owner`` does.

    These are older wrappers of the same module or of a part of the module, wrappers whose layers
    were replaced, and wrappers whose process groups have ended.

    Raises:
        ValueError: Another wrapper averages some of the parameters together with other parameters,
            or over another group that torch has made and not destroyed.
    """
    mine = {id(param.tensor): param.name for param in managed}
    submodules = set(owner.module.modules())

    def conflicts(other: Owner) -> bool:
        has_more = not other.param_ids <= mine.keys() and not other.is_part_of(submodules)
        other_ranks = other.group is not owner.group and made_by_torch(other.group)
        return other.averages() and (has_more or other_ranks) and not has_ended(other)

    if any(map(conflicts, _sharing(owner, mine.keys()))):
        gc.collect()  # the other wrapper may be garbage in a reference cycle
    others = _sharing(owner, mine.keys())
    for other in others:
        if conflicts(other):
            names = [name for param_id, name in mine.items() if param_id in other.param_ids]
            raise ValueError(
                f"another {other.name} already averages {errors.count_names(names, 'parameter')}. "
                "The other one averages a different set of parameters, or uses another process "
                f"group. Pass one module that holds all parameters, or first {other.way_to_end}."
            )
    return [other for other in others if other.averages() or has_ended(other)]


def take(owner: Owner) -> bool:
    """Makes ``owner`` the only one that averages its parameters.

    Returns:
        False: another wrapper has these parameters and further parameters. A backward through an
        output of that wrapper takes the parameters back.
    """
    others = _sharing(owner, owner.param_ids)
    for other in others:
        other.yield_to(owner)
    _live.add(owner)
    return all(other.param_ids <= owner.param_ids for other in others)


def others_than(owner: Owner) -> list[Owner]:
    """The other owners of this process that average parameters."""
    if _averaging_beside(owner):
        gc.collect()  # other wrappers may be garbage in a reference cycle
    return _averaging_beside(owner)


def _averaging_beside(owner: Owner) -> list[Owner]:
    return [other for other in list(_live) if other is not owner and other.averages()]


def has_ended(owner: Owner) -> bool:
    """Whether the process group of the wrapper was destroyed or aborted, or has lost ranks."""
    monitor: _C.Monitor | None = getattr(owner.reducer, "monitor", None)
    return (monitor is not None and monitor.failed) or was_destroyed(owner.group)


def _sharing(owner: Owner, param_ids: Set[int]) -> list[Owner]:
    """The other owners that have some of these parameters. A process may have many owners."""
    return [
        other
        for other in list(_live)
        if other is not owner and not other.param_ids.isdisjoint(param_ids)
    ]
