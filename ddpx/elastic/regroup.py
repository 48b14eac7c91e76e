"""Replaces process groups that have lost ranks by process groups of the survivors."""

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
    """The arguments with which a process group was made."""

    backend: str
    timeout: timedelta
    options: Any
    device_id: torch.device | None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Recipe:
        """Reads the arguments from an existing group."""
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
    """Makes a new default group, and a new group of the wrapper if that is another group.

    Args:
        group: The process group of the wrapper.

    Raises:
        NotImplementedError: The ranks of ``group`` are not all ranks of the default group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        world = dist.group.WORLD
        if world is None:  # an earlier attempt has destroyed the group
            raise errors.shrink_failed()
        if group.size() != world.size():
            raise NotImplementedError(
                "ddpx.shrink() needs a wrapper over all ranks, but this wrapper's process group "
                f"has {group.size()} of {world.size()} ranks. {errors.FROM_CHECKPOINT}"
            )
        self._default = Recipe.of(world)
        self._own = None if group is world else Recipe.of(group)

    def make(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> dist.ProcessGroup:
        """Destroys all groups of this process, and makes new groups with this timeout."""
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
        """Gives the new groups the timeouts of the old groups."""
        assert dist.group.WORLD is not None
        for made, recipe in ((dist.group.WORLD, self._default), (group, self._own)):
            if recipe is not None:
                for backend in _backends(made):
                    # gloo and NCCL of torch 2.11 have only the older name.
                    set_timeout = getattr(backend, "set_timeout", None)
                    (set_timeout or backend._set_default_timeout)(recipe.timeout)


def abort_other_groups(group: dist.ProcessGroup) -> None:
    """Aborts the calls on a device of all groups but ``group``. Lost ranks never end them."""
    for other in list(c10d._world.pg_map):
        if other is not group and any(device.type != "cpu" for device in other._device_types):
            _C.abort_group(other)


def destroy_groups() -> None:
    """Destroys all groups of this process, without a wait for pending work.

    gloo's threads wait for live ranks. The waits end when the live ranks destroy their groups, too.
    """
    if dist.is_initialized():
        last = [dist.group.WORLD, *c10d._world.pg_map]
        dist.destroy_process_group()
        threading.Thread(target=last.clear, name="ddpx-old-group", daemon=True).start()
    # Group names contain this count, and must be the same on all ranks after a failed attempt.
    c10d._world.group_count = 0


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _timeout(backend: Any) -> timedelta | None:
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def _backend_name(group: dist.ProcessGroup) -> str:
    """The backend as a short name if possible, so that ``dist.get_backend()`` does not change."""
    config = str(dist.get_backend_config(group))
    name = str(dist.get_backend(group))
    try:
        same = str(c10d.BackendConfig(dist.Backend(name))) == config
    except ValueError:
        same = False
    return name if same else config
