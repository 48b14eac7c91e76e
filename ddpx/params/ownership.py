"""Which wrapper averages which parameters, so that no two average the same ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn

from ddpx import errors
from ddpx.params.managed import ManagedParam


class Wrapper(Protocol):
    """What a wrapper has to offer here."""

    module: nn.Module
    process_group: dist.ProcessGroup

    def _managed(self) -> Sequence[ManagedParam]: ...
    def _yield_to(self, successor: Wrapper) -> None: ...


_live: weakref.WeakSet[Wrapper] = weakref.WeakSet()


def claim(wrapper: Wrapper, managed: Sequence[ManagedParam]) -> None:
    """Makes ``wrapper`` the one that averages ``managed``; an older one of the same module yields.

    So does one of a part of it, and one whose layers were replaced meanwhile.

    Raises:
        ValueError: another wrapper averages some of them together with others, or over other ranks.
    """
    mine = {id(param.tensor): param.name for param in managed}
    submodules = set(wrapper.module.modules())

    def conflicts(other: Wrapper, shared: str) -> bool:
        return shared == "some" and other.module not in submodules

    if any(conflicts(other, _shared(other, mine)) for other in _live):
        gc.collect()  # it may only be waiting to be collected
    for other in list(_live):
        shared = _shared(other, mine)
        if shared == "none" or other is wrapper:
            continue
        if conflicts(other, shared) or other.process_group is not wrapper.process_group:
            names = [mine[id(p.tensor)] for p in other._managed() if id(p.tensor) in mine]
            raise _params_wrapped_elsewhere(names)
        other._yield_to(wrapper)
    _live.add(wrapper)


def others_than(wrapper: Wrapper) -> list[Wrapper]:
    """Those that average parameters of their own."""
    if any(other is not wrapper and other._managed() for other in _live):
        gc.collect()  # they may only be waiting to be collected
    return [other for other in _live if other is not wrapper and other._managed()]


def _shared(other: Wrapper, mine: dict[int, str]) -> str:
    theirs = [id(param.tensor) in mine for param in other._managed()]
    return "all" if theirs and all(theirs) else "some" if any(theirs) else "none"


# ---- errors --------------------------------------------------------------------------------------


def _params_wrapped_elsewhere(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"another ReducerDDP already averages {errors.count_names(names, 'parameter')}. "
        "The other wrapper averages a different set of parameters, or uses another process group. "
        "Wrap one module that holds all parameters, or delete the other wrapper first."
    )
