"""Puts a process group of fewer ranks in the place of one that has lost some."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddpx import _C
from ddpx.comm.shm import ShmOptions
from ddpx.elastic import errors

_ORDER_NAMES = {_C.ShmOrder.GLOO: "gloo", _C.ShmOrder.FIXED: "fixed"}


@dataclass(frozen=True)
class Recipe:
    """What a process group was made with."""

    backend: str
    timeout: timedelta
    options: Any
    device_id: torch.device | None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Recipe:
        backends = _backends(group)
        shm = next((b for b in backends if isinstance(b, _C.ShmBackend)), None)
        timeouts = [b.timeout if isinstance(b, _C.ShmBackend) else _timeout(b) for b in backends]
        return cls(
            _backend_name(group),
            max((t for t in timeouts if t is not None), default=c10d.default_pg_timeout),
            None if shm is None else ShmOptions(order=_ORDER_NAMES[shm.order]),
            group.bound_device_id,
        )


class Regrouping:
    """The default group anew, and the wrapper's if that is another one with the same ranks.

    Raises:
        NotImplementedError: the wrapper's group has other ranks than the default group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        world = dist.group.WORLD
        if world is None:  # an earlier attempt has destroyed it
            raise errors.shrink_failed()
        if group.size() != world.size():
            raise _shrink_of_part(group.size(), world.size())
        self._default = Recipe.of(world)
        self._own = None if group is world else Recipe.of(group)

    def make(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Destroys all groups that there are, and makes new ones with this timeout."""
        destroy_groups()
        recipe = self._default
        dist.init_process_group(
            recipe.backend,
            store=dist.PrefixStore("ddpx/shrink", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            pg_options=recipe.options,
            device_id=recipe.device_id,
        )
        if self._own is not None:
            recipe = self._own
            own = dist.new_group(backend=recipe.backend, timeout=timeout, pg_options=recipe.options)
            assert own is not None
            return own
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def finish(self, group: dist.ProcessGroup) -> None:
        """From here on calls may take as long as they might in the old groups."""
        assert dist.group.WORLD is not None
        for made, recipe in ((dist.group.WORLD, self._default), (group, self._own)):
            if recipe is not None:
                for backend in _backends(made):
                    # torch 2.11's gloo and NCCL know the older name only.
                    set_timeout = getattr(backend, "set_timeout", None)
                    (set_timeout or backend._set_default_timeout)(recipe.timeout)


def destroy_groups() -> None:
    """All of this process. Does not wait for what is under way in them: gloo's threads wait for
    ranks that live, which go away when those have done the same."""
    if dist.is_initialized():
        last = [dist.group.WORLD, *c10d._world.pg_map]
        dist.destroy_process_group()
        threading.Thread(target=last.clear, name="ddpx-old-group", daemon=True).start()
    # A first try that failed half way has used up a name, which has to be the same on all ranks.
    c10d._world.group_count = 0


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _timeout(backend: Any) -> timedelta | None:
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def _backend_name(group: dist.ProcessGroup) -> str:
    """The short one if it means the same, so that ``dist.get_backend()`` says what it said."""
    config = str(dist.get_backend_config(group))
    name = str(dist.get_backend(group))
    try:
        same = str(c10d.BackendConfig(dist.Backend(name))) == config
    except ValueError:
        same = False
    return name if same else config


# ---- errors --------------------------------------------------------------------------------------


def _shrink_of_part(size: int, world_size: int) -> NotImplementedError:
    return NotImplementedError(
        "ddpx.shrink() needs a wrapper over all ranks, but this wrapper's process group has "
        f"{size} of {world_size} ranks. {errors.FROM_CHECKPOINT}"
    )
