"""The transport of buckets: shared memory in place of a gloo group whose ranks are on one host."""

from __future__ import annotations

import logging
import os
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm.process_group import is_alone, is_written_in_python, rank_of_job
from ddpx.comm.shm import ShmOptions
from ddpx.comm.state_sync import highest

Transport = _C.ShmBackend

VARIABLE = "DDPX_TRANSPORT"
CHOICES = ("auto", "group", "shm")

_CPU = torch.device("cpu")
# A rank may fail before its peers can see it. The peers then use the group after this time.
_LONGEST_RENDEZVOUS = timedelta(seconds=20)
# Of each peer: its connection, its memory and its process.
_FILES_PER_RANK = 3
_MOST_LOCAL_RANKS = 256

_logger = logging.getLogger("ddpx.comm")
# None: the ranks of the group have tried to share memory, and cannot.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport | None] = (
    weakref.WeakKeyDictionary()
)


def checked_choice(argument: object) -> str:
    """Returns the choice in force: ``argument``, the environment's choice, or ``"auto"``.

    Raises:
        ValueError: No such choice exists.
    """
    if argument is not None:
        name, choice = "transport", argument
    else:
        name, choice = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if not isinstance(choice, str) or choice not in CHOICES:
        raise ValueError(
            f"{name}={choice!r} is not a transport. Pass 'auto' (shared memory where the ranks of "
            "a gloo group can share memory), 'group' (the process group) or 'shm' (shared memory, "
            f"or an error). Set the transport by ReducerDDP(transport=...) or by {VARIABLE}."
        )
    return choice


def connect(choice: str, group: dist.ProcessGroup, device: torch.device) -> Transport | None:
    """Returns the transport of ``group``, which is made in the first call for this group.

    A collective call. All ranks return a transport, or all return None. All wrappers of the group
    share the transport. It ends with the group.

    Args:
        choice: The same on all ranks, see :func:`checked_choice`.
        group: The ranks.
        device: The device of the gradients.

    Raises:
        ValueError: The choice is ``"shm"``, but ranks cannot share memory.
    """
    if choice == "group" or is_alone(group) or name_of(None, group, device) == "shm":
        return None
    gloo = _gloo_of(group) if device.type == "cpu" else None
    if gloo is not None and group not in _transports:
        _transports[group] = _share_memory(group, gloo)
    transport = of(group)
    if choice == "shm" and transport is None:
        raise _no_shared_memory(group, device, gloo is None)
    return transport


def of(group: dist.ProcessGroup) -> Transport | None:
    """Returns the transport that :func:`connect` has made for the group."""
    return _transports.get(group)


def name_of(transport: Transport | None, group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the transport in use: ``"shm"``, or the backend of the group for the device."""
    if transport is not None:
        return "shm"
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # a group written in Python may have no backend
        return group.name()


def _gloo_of(group: dist.ProcessGroup) -> dist.ProcessGroupGloo | None:
    """None for other backends, and for torch's wrapper with TORCH_DISTRIBUTED_DEBUG=DETAIL.

    None for a group written in Python, too: its own calls may do more than those of its backend.
    """
    if is_written_in_python(group):
        return None
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _share_memory(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> Transport | None:
    options = ShmOptions()
    transport = None
    with health.collective_call(group):
        if not _all_can(_why_no_files(group.size()), group):
            return None
        cause = None
        try:
            transport = _C.ShmBackend(
                dist.PrefixStore("ddpx/transport", group.get_group_store()),
                group.rank(),
                group.size(),
                min(gloo.options._timeout, _LONGEST_RENDEZVOUS),
                gloo,
                options.chosen_order(),
                options.chosen_identity(),
            )
            if len(transport.hosts) > 1:
                cause = f"the ranks are on {len(transport.hosts)} hosts"
        except (RuntimeError, MemoryError) as error:
            cause = str(error)
        return transport if _all_can(cause, group) else None


def _why_no_files(num_ranks: int) -> str | None:
    """Returns why this process cannot open the files of a transport. None if it can.

    Peers of a rank that fails in the rendezvous itself would wait for that rank.
    """
    files = []
    try:
        for _ in range(_FILES_PER_RANK * min(num_ranks, _MOST_LOCAL_RANKS)):
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return str(error.strerror)
    finally:
        for file in files:
            os.close(file)
    return None


def _all_can(cause: str | None, group: dist.ProcessGroup) -> bool:
    """Whether no rank has a cause that keeps it from sharing memory. One such rank logs its cause.

    A collective call.
    """
    witness = highest(-1 if cause is None else group.rank(), group, _CPU)
    if witness == group.rank():
        _logger.warning(
            "[ddpx rank %d] gradients are averaged over gloo, because ranks cannot share memory: "
            "%s. Set %s=group to omit the attempt.",
            rank_of_job(group),
            cause,
            VARIABLE,
        )
    return witness < 0


# ---- errors --------------------------------------------------------------------------------------


def _no_shared_memory(
    group: dist.ProcessGroup, device: torch.device, wrong_group: bool
) -> ValueError:
    if wrong_group:
        cause = (
            f"the gradients are on {device}, and the backend of the process group is "
            f"{name_of(None, group, device)}. Shared memory takes the place of a gloo group for "
            "gradients on the CPU, unless TORCH_DISTRIBUTED_DEBUG=DETAIL is set"
        )
    else:
        cause = "ranks cannot share memory. The log of one rank has the cause"
    return ValueError(f"transport='shm' cannot be used: {cause}. Pass transport='auto'.")
