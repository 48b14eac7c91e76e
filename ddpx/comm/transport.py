"""The transport of buckets in place of a gloo group: shared memory, and lanes between hosts."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm.collectives import all_reduce
from ddpx.comm.process_group import is_alone, is_written_in_python, rank_of_job, ranks_of_job
from ddpx.comm.shm import ShmOptions, check_same_order, connect_lanes

Transport = _C.ShmBackend

VARIABLE = "DDPX_TRANSPORT"
CHOICES = ("auto", "group", "shm")

_CPU = torch.device("cpu")
# A rank may fail before its peers can see it. The peers then use the group after this time.
_LONGEST_RENDEZVOUS = timedelta(seconds=20)
# Of each peer: its connection, its memory and its process.
_FILES_PER_RANK = 3
_MOST_LOCAL_RANKS = 256
_MOST_NAMED_RANKS = 3
_TEXT_BYTES = 1000  # of the text of one rank
_REMEDIES = {  # by the phase that fails
    "open files": "Raise the limit of open files (ulimit -n).",
    "rendezvous": "Remove the cause.",
    "connection of hosts": "Open the ports between hosts; GLOO_SOCKET_IFNAME selects a network.",
}

_logger = logging.getLogger("ddpx.comm")


@dataclass(frozen=True)
class _Attempt:
    """The result of the attempt to make a transport for a group. The same on all ranks.

    Attributes:
        transport: None: the group averages gradients.
        num_hosts: The number of hosts of the ranks. 0 if a rank has a fault.
        faults: The ranks that cannot use shared memory, each with the phase and the cause, and the
            remedy.
    """

    transport: Transport | None = None
    num_hosts: int = 0
    faults: str = ""

    def serves(self, choice: str) -> bool:
        """Whether a wrapper with this choice uses the transport: ``auto`` keeps gloo's bits."""
        return self.transport is not None and (choice == "shm" or self.num_hosts == 1)


_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, _Attempt] = weakref.WeakKeyDictionary()


def checked_choice(argument: object) -> str:
    """Returns the choice in force: ``argument``, the environment's choice, or ``"auto"``.

    Raises:
        ValueError: No such choice, or no such order of DDPX_SHM_ORDER, exists.
    """
    if argument is not None:
        name, choice = "transport", argument
    else:
        name, choice = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if not isinstance(choice, str) or choice not in CHOICES:
        raise ValueError(
            f"{name}={choice!r} is not a transport. Pass 'auto' (shared memory where all ranks of "
            "a gloo group can share memory), 'group' (the process group) or 'shm' (shared memory "
            "within hosts, or an error). Set the transport by ReducerDDP(transport=...) or by "
            f"{VARIABLE}."
        )
    if choice != "group":
        ShmOptions().chosen_order()  # before ranks wait for each other
    return choice


def connect(choice: str, group: dist.ProcessGroup, device: torch.device) -> Transport | None:
    """Returns the transport of ``group``, which is made in the first call for this group.

    A collective call. All ranks return a transport, or all return None. All wrappers of the group
    share the transport. It ends with the group. Over several hosts, only the choice ``"shm"`` gets
    a transport, since its order of summation is not gloo's.

    Args:
        choice: The same on all ranks, see :func:`checked_choice`.
        group: The ranks.
        device: The device of the gradients.

    Raises:
        RuntimeError: Ranks have different orders of DDPX_SHM_ORDER.
        ValueError: The choice is ``"shm"``, but a rank cannot use shared memory.
    """
    if choice == "group" or is_alone(group) or name_of(None, group, device) == "shm":
        return None
    gloo = _gloo_of(group) if device.type == "cpu" else None
    if gloo is None:
        if choice == "shm":
            raise _wrong_group(group, device)
        return None
    attempt = _attempts.get(group)
    is_declined = attempt is not None and attempt.transport is None and attempt.num_hosts > 1
    if attempt is None or (choice == "shm" and is_declined):
        attempt = _attempts[group] = _try(choice, group, gloo)
        if choice == "auto" and attempt.transport is None and group.rank() == 0:
            _log_reason(group, attempt)
    if attempt.serves(choice):
        return attempt.transport
    if choice == "shm":
        raise ValueError(
            f"transport='shm' cannot be used: {attempt.faults} With transport='auto', the process "
            "group takes the place of shared memory."
        )
    return None


def of(group: dist.ProcessGroup) -> Transport | None:
    """Returns the transport that :func:`connect` has made for the group."""
    attempt = _attempts.get(group)
    return None if attempt is None else attempt.transport


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
    None for a group without a store, over which ranks could find each other.
    """
    if is_written_in_python(group) or group.get_group_store() is None:
        return None
    try:
        backend = group._get_backend(_CPU)
    except RuntimeError:
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _try(choice: str, group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> _Attempt:
    """Ranks find out whether they can use shared memory. A collective call."""
    options = ShmOptions()
    store = dist.PrefixStore(f"ddpx/transport/{choice}", group.get_group_store())
    timeout = min(gloo.options._timeout, _LONGEST_RENDEZVOUS)
    made: list[Transport] = []

    order = options.chosen_order()

    def share_memory() -> None:
        made.append(
            _C.ShmBackend(
                store,
                group.rank(),
                group.size(),
                timeout,
                gloo,
                order,
                options.chosen_identity(),
                ranks_of_job(group),
            )
        )

    def connect_hosts() -> None:
        # The devices of the group, over which the hosts have reached each other.
        devices = gloo.options._devices  # type: ignore[attr-defined]  # not in torch's stub
        connect_lanes(made[0], store, timeout, devices)

    with health.collective_call(group):
        check_same_order(
            order, group.rank(), group.size(), lambda orders: all_reduce(orders, group)
        )
        # With several hosts, a rank has a second set of files for stage 3 of an all-reduce.
        num_files = _FILES_PER_RANK * min(group.size(), _MOST_LOCAL_RANKS) * (1 + (choice == "shm"))
        faults = _faults("open files", lambda: _open_files(num_files), group)
        faults = faults or _faults("rendezvous", share_memory, group)
        if faults:
            return _Attempt(faults=faults)
        num_hosts = len(made[0].hosts)
        if num_hosts > 1 and choice == "auto":
            return _Attempt(num_hosts=num_hosts)
        if num_hosts > 1:
            faults = _faults("connection of hosts", connect_hosts, group)
            if faults:
                return _Attempt(faults=faults)
        return _Attempt(made[0], num_hosts)


def _open_files(num_files: int) -> None:
    """Raises OSError if this process cannot open the files of a transport.

    Peers of a rank that fails in the rendezvous itself would wait for that rank.
    """
    files = []
    try:
        for _ in range(num_files):
            files.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for file in files:
            os.close(file)


def _faults(phase: str, run: Callable[[], None], group: dist.ProcessGroup) -> str:
    """Runs a phase of an attempt. Returns the ranks on which the phase raised, with their causes.

    A collective call, which returns the same text on all ranks, with the remedy. Empty: no rank has
    a fault.
    """
    rank = group.rank()
    cause = ""
    try:
        run()
    except (RuntimeError, MemoryError, OSError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    found = torch.zeros(group.size(), dtype=torch.int32, device=_CPU)
    found[rank] = bool(cause)
    ranks = all_reduce(found, group).nonzero().flatten().tolist()
    if not ranks:
        return ""
    # Over the group, since a rank without files may not reach the store.
    named = ranks[:_MOST_NAMED_RANKS]
    rows = torch.zeros(len(named), _TEXT_BYTES, dtype=torch.uint8, device=_CPU)
    if rank in named:
        text = f"{phase} failed on rank {rank_of_job(group)}: {cause}".encode()[:_TEXT_BYTES]
        rows[named.index(rank), : len(text)] = torch.tensor([*text], dtype=torch.uint8, device=_CPU)
    texts = [bytes(row.tolist()).rstrip(b"\0.") for row in all_reduce(rows, group)]
    faults = b"; ".join(texts).decode(errors="replace")
    if others := ranks[len(named) :]:
        noun = "rank" if len(others) == 1 else "ranks"
        faults += f"; also on {noun} {', '.join(map(str, others))} of the group"
    return f"{faults}. {_REMEDIES[phase]}"


def _log_reason(group: dist.ProcessGroup, attempt: _Attempt) -> None:
    if attempt.faults:
        reason = f"ranks cannot share memory: {attempt.faults}"
    else:
        reason = (
            f"the ranks are on {attempt.num_hosts} hosts. Set {VARIABLE}=shm to use shared memory "
            "within hosts: steps are faster, but sums over three or more ranks are rounded "
            "differently."
        )
    _logger.warning(
        "[ddpx rank %d] gradients are averaged over gloo, because %s Set %s=group to omit the "
        "attempt.",
        rank_of_job(group),
        reason,
        VARIABLE,
    )


def _wrong_group(group: dist.ProcessGroup, device: torch.device) -> ValueError:
    return ValueError(
        f"transport='shm' cannot be used: the gradients are on {device}, and the backend of the "
        f"process group is {name_of(None, group, device)}. Shared memory takes the place of a gloo "
        "group that has a store, for gradients on the CPU, unless TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "is set. Pass transport='auto'."
    )
