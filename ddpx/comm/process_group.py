"""The process group that a wrapper averages over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddpx import errors


def resolve_group(
    process_group: dist.ProcessGroup | None, device_mesh: Any = None
) -> dist.ProcessGroup:
    """The group that was asked for, or the default one.

    Raises:
        TypeError: it is no process group, or the mesh no mesh.
        ValueError: there is none, it was destroyed, this rank is not in it, a group and a mesh are
            given, or the mesh has several dimensions.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise errors.group_and_mesh()
        if not isinstance(device_mesh, DeviceMesh):
            raise errors.not_a_mesh(device_mesh)
        if device_mesh.ndim != 1:
            raise errors.not_a_1d_mesh(device_mesh)
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise errors.no_process_group()
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise errors.rank_not_in_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise errors.not_a_process_group(process_group)
    if _was_destroyed(process_group):
        raise errors.group_destroyed()
    return process_group


def _was_destroyed(process_group: dist.ProcessGroup) -> bool:
    try:
        process_group.group_name  # noqa: B018
    except RuntimeError:
        return False  # written in Python, past torch's own books
    return process_group not in dist.distributed_c10d._world.pg_map
