"""Makes sure that no two wrappers of this process average the same parameter."""

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
    """The members of a wrapper that this module uses."""

    module: nn.Module
    process_group: dist.ProcessGroup

    def _managed(self) -> Sequence[ManagedParam]: ...
    def _yield_to(self, successor: Wrapper) -> None: ...


_live: weakref.WeakSet[Wrapper] = weakref.WeakSet()


def claim(wrapper: Wrapper, managed: Sequence[ManagedParam]) -> None:
    """Makes ``wrapper`` the only wrapper that averages ``managed``.

    An older wrapper of the same module, or of a part of the module, yields to ``wrapper``. An older
    wrapper also yields if its layers were replaced.

    Raises:
        ValueError: Another wrapper averages some of the parameters together with other parameters,
            or over other ranks.
    """
    mine = {id(param.tensor): param.name for param in managed}
    submodules = set(wrapper.module.modules())

    def conflicts(other: Wrapper, shared: str) -> bool:
        return shared == "some" and other.module not in submodules

    if any(conflicts(other, _shared(other, mine)) for other in _live):
        gc.collect()  # the other wrapper may be garbage in a reference cycle
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
    """The other wrappers of this process that average parameters."""
    if any(other is not wrapper and other._managed() for other in _live):
        gc.collect()  # other wrappers may be garbage in a reference cycle
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
