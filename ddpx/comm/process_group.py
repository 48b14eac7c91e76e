"""The process group that a wrapper averages over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def resolve_group(
    process_group: dist.ProcessGroup | None, device_mesh: Any = None
) -> dist.ProcessGroup:
    """Returns the process group that a wrapper was given, or the default process group.

    Args:
        process_group: The group. None: the group of ``device_mesh``, or the default group.
        device_mesh: A mesh of one dimension.

    Raises:
        TypeError: ``process_group`` or ``device_mesh`` has a wrong type.
        ValueError: No group exists, the group was destroyed, or this rank is not in the group.
        RuntimeError: Both arguments are given, or the mesh has several dimensions.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError(
                "Cannot specify both process_group and device_mesh arguments. Pass only one of "
                "the two."
            )
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(
                "device_mesh must be a torch.distributed.device_mesh.DeviceMesh or None, but got "
                f"{type(device_mesh).__name__}. Make a mesh with init_device_mesh(...)."
            )
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}. Pass the mesh dimension "
                "to average over, e.g. mesh['dp']."
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise ValueError(
                "ReducerDDP needs a process group, but no process group has been initialised. Call "
                "torch.distributed.init_process_group(...) first, or pass process_group=."
            )
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError(
            "this rank is not a member of the process group that was passed to ReducerDDP. "
            "Construct ReducerDDP only on the members of that group."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup or None, but got "
            f"{type(process_group).__name__}. Make a group with torch.distributed.new_group(...)."
        )
    if was_destroyed(process_group):
        raise ValueError(
            "process_group was destroyed by torch.distributed.destroy_process_group(). Make a new "
            "group with torch.distributed.new_group(...), or leave process_group out."
        )
    return process_group


def is_written_in_python(group: dist.ProcessGroup) -> bool:
    """Whether the class of the group is a Python class, so that its calls may do anything.

    Managed groups average over replicas of the job, although they have one rank. ddpx always calls
    such a group, and only through its methods.
    """
    return type(group) is not dist.ProcessGroup


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether calls of the group change nothing, because no other rank exists."""
    return not is_written_in_python(group) and group.size() == 1


def world_size(group: dist.ProcessGroup) -> int:
    """The number of ranks, as DDP's core reads it: ``size()`` of a Python class does not count."""
    return dist.ProcessGroup.size(group)


def rank_of_job(group: dist.ProcessGroup) -> int:
    """This rank in the job. Without a default group, the rank in ``group``."""
    return dist.get_rank() if dist.is_initialized() else group.rank()


def ranks_of_job(group: dist.ProcessGroup) -> list[int]:
    """The ranks of the job, by rank in ``group``. Empty if torch did not create the group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return []


def device_of_calls(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device for small collective calls, on which all ranks of the group agree.

    Args:
        group: The ranks.
        device: The device of the module of this rank. Another rank may have another one.
    """
    if is_written_in_python(group):
        return device
    types = [each.type for each in group._device_types]
    if "cpu" in types or not types:
        return torch.device("cpu")
    return device if device.type in types else torch.device(types[0])


def backend_name(group: dist.ProcessGroup) -> str:
    """The name of the backend. torch knows only the names of groups that it made itself."""
    try:
        return dist.get_backend(group)
    except ValueError:
        return group.name()


def made_by_torch(group: dist.ProcessGroup) -> bool:
    """Whether torch lists the group until it is destroyed. torch describes each such group."""
    return not is_written_in_python(group) and bool(group.group_desc)


def was_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether the script has destroyed the group."""
    return made_by_torch(group) and group not in dist.distributed_c10d._world.pg_map
