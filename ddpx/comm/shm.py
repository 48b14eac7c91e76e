"""The backend ``shm``: ranks on one host communicate through shared memory.

``import ddpx`` registers the backend with torch. ``init_process_group("shm")``,
``new_group(backend="shm")`` and ``init_process_group("cpu:shm,cuda:nccl")`` then work. The page
docs/shm.md explains the implementation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _DistributedBackendOptions

from ddpx import _C
from ddpx.errors import count

_ORDERS = {"gloo": _C.ShmOrder.GLOO, "fixed": _C.ShmOrder.FIXED}
_DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass
class ShmOptions:
    """Options of a process group: ``init_process_group("shm", pg_options=ShmOptions(...))``.

    Args:
        order: The order in which the values of the ranks are summed. ``"gloo"`` is the order of
            gloo on one host. The order then depends on the position of an element in the buffer,
            and results equal those of gloo bit for bit. ``"fixed"`` is the order of ranks.
            Gradients then do not depend on bucket sizes, unless ranks are on three or more hosts.
            Default: the value of ``DDPX_SHM_ORDER``, otherwise ``"gloo"``.
        host_identity: A text. Ranks with different texts do not share memory. Tests use this to
            simulate several hosts on one machine. Default: the value of
            ``DDPX_SHM_HOST_IDENTITY``, otherwise the same text on all ranks.

    The other fields belong to torch.

    Example:
        >>> options = ddpx.ShmOptions(order="fixed")
        >>> group = dist.new_group(backend="shm", pg_options=options)
        >>> model = ddpx.ReducerDDP(module, process_group=group)
        >>> model(inputs).sum().backward()
        >>> module.weight.grad
        tensor([[16., 16., 16., 16.]])
    """

    order: str | None = None
    host_identity: str | None = None
    # torch sets these fields of every options object.
    timeout: timedelta = field(default=_DEFAULT_TIMEOUT, repr=False)
    group_name: str = field(default="", repr=False)
    group_desc: str = field(default="", repr=False)
    global_ranks_in_group: list[int] = field(default_factory=list, repr=False)

    def chosen_order(self) -> _C.ShmOrder:
        """Returns the order in force: ``order``, the environment's order, or ``"gloo"``.

        Raises:
            ValueError: No such order exists.

        Example:
            >>> ddpx.ShmOptions(order="fixed").chosen_order().name
            'FIXED'
        """
        order = self.order or os.environ.get("DDPX_SHM_ORDER") or "gloo"
        if order not in _ORDERS:
            raise ValueError(
                f"the shm backend has no order {order!r}. Pass 'gloo' (the same bits as gloo) or "
                "'fixed' (sums in rank order, for any bucket size). Set the order by "
                "ddpx.ShmOptions(order=...) or by DDPX_SHM_ORDER."
            )
        return _ORDERS[order]

    def chosen_identity(self) -> str:
        """Returns the host identity in force: ``host_identity``, or the environment's identity.

        Example:
            >>> ddpx.ShmOptions(host_identity="first").chosen_identity()
            'first'
        """
        if self.host_identity is not None:
            return self.host_identity
        return os.environ.get("DDPX_SHM_HOST_IDENTITY", "")


def register() -> None:
    """Registers the backend with torch. A second call has no effect."""
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: _DistributedBackendOptions, shm_options: Any) -> _C.ShmBackend:
    """Makes a backend. torch calls this function on every rank of a new group."""
    if shm_options is None:
        shm_options = ShmOptions()
    if not isinstance(shm_options, ShmOptions):
        raise TypeError(
            "the shm backend takes a ddpx.ShmOptions as pg_options, but got "
            f"{type(shm_options).__name__}. Pass e.g. ddpx.ShmOptions(order='fixed'), or leave "
            "pg_options out."
        )
    # Checked before ranks connect. A rank that raises later would make its peers fail to connect.
    order, identity = shm_options.chosen_order(), shm_options.chosen_identity()
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout
    if timeout < timedelta(milliseconds=1):
        raise ValueError(
            f"the timeout of an shm group must be at least 1 ms, but is {timeout.total_seconds()} "
            "s. Pass a longer timeout, or none: torch's default is 30 minutes."
        )
    inner = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", store), rank, size, one_thread_options(timeout)
    )
    sum_of = inner.allreduce  # type: ignore[attr-defined]  # not in torch's stub
    check_same_order(order, rank, size, lambda orders: sum_of([orders]).wait())
    backend = _C.ShmBackend(
        dist.PrefixStore("shm", store),
        rank,
        size,
        timeout,
        inner,
        order,
        identity,
        options.global_ranks_in_group,
    )
    connect_lanes(backend, store, timeout)
    return backend


def check_same_order(
    order: _C.ShmOrder, rank: int, size: int, all_reduce: Callable[[torch.Tensor], object]
) -> None:
    """Compares the orders of summation of all ranks. A collective call.

    Args:
        order: The order of this rank.
        rank: The rank in its group.
        size: The number of ranks.
        all_reduce: Sums a tensor over all ranks, in place.

    Raises:
        RuntimeError: Ranks have different orders.
    """
    places = torch.zeros(size, dtype=torch.int32, device="cpu")
    places[rank] = list(_ORDERS.values()).index(order)
    all_reduce(places)
    by_order = {
        name: [str(rank) for rank, at in enumerate(places.tolist()) if at == place]
        for place, name in enumerate(_ORDERS)
    }
    if all(by_order.values()):
        text = "; ".join(
            f"{name!r} on {count(len(ranks), 'rank')} (rank {', '.join(ranks[:8])}"
            f"{', …' if len(ranks) > 8 else ''})"
            for name, ranks in by_order.items()
        )
        raise RuntimeError(
            f"ranks of the group have different orders of summation in shared memory: {text}. Set "
            "DDPX_SHM_ORDER, or ddpx.ShmOptions(order=...), to the same order on every rank."
        )


def connect_lanes(
    backend: _C.ShmBackend,
    store: dist.Store,
    timeout: timedelta,
    devices: list[dist.ProcessGroupGloo.Device] | None = None,
) -> None:
    """Connects the ranks of each lane between hosts. A collective call over all ranks.

    Args:
        devices: The network devices of this rank. Default: those that torch would choose for gloo.

    Raises:
        RuntimeError: A rank of another host does not connect in time.
    """
    for index, ranks in enumerate(backend.lanes):
        if backend.rank() in ranks:
            lane = dist.ProcessGroupGloo(
                dist.PrefixStore(f"lane{index}", store),
                ranks.index(backend.rank()),
                len(ranks),
                one_thread_options(timeout, devices),
            )
            backend.set_lane(index, lane)


def one_thread_options(
    timeout: timedelta, devices: list[dist.ProcessGroupGloo.Device] | None = None
) -> Any:
    """Options of a gloo group with one thread instead of torch's two threads.

    torch's threads write the name of the last operation to one string without a lock. A long name,
    such as that of a sparse all-reduce, then corrupts memory.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._timeout = timeout
    options._threads = 1
    options._devices = _devices() if devices is None else devices
    return options


def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """The devices that torch would choose for gloo."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if interfaces:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    return [dist.ProcessGroupGloo.create_default_device()]
