"""The matrix: what happens to one host or rank of a training, and what ranks must report then.

The table ``TROUBLES`` is meant to be edited.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bulk_traffic
from host_ranks import RankedHosts
from tracing import Debugger

# Ranks for each host. Rank 0, with the store, is on the first host.
TOPOLOGIES = {"2x2": (2, 2), "3x1": (1, 1, 1)}
# Backends of the group; the last one is a gloo group whose buckets use transport="shm".
TRANSPORTS = ("gloo", "shm", "gloo+shm")
_STALL_S = 12.0  # longer than the time until a rank that waits warns
_USER = 60_000  # the first of the users that ranks become

End = Callable[[], object]
Begin = Callable[[RankedHosts, int], End]
Settings = Callable[[int, bool], dict[str, Any]]


# ---- troubles: each function begins one at the victim, and returns what ends it ------------------


def _nothing(hosts: RankedHosts, victim: int) -> End:
    return lambda: None


def _kill_host(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).kill()
    return lambda: None


def _kill_rank(hosts: RankedHosts, victim: int) -> End:
    os.kill(hosts.pid_of(victim), signal.SIGKILL)
    return lambda: None


def _kill_ranks(hosts: RankedHosts, victim: int) -> End:
    for rank in hosts.ranks_beside(victim):
        _kill_rank(hosts, rank)
    return lambda: None


def _cut_link(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).link_down()
    return hosts.host_of(victim).link_up


def _freeze_host(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).freeze()
    return hosts.host_of(victim).thaw


def _stop_rank(hosts: RankedHosts, victim: int) -> End:
    os.kill(hosts.pid_of(victim), signal.SIGSTOP)
    return lambda: os.kill(hosts.pid_of(victim), signal.SIGCONT)


def _attach_debugger(hosts: RankedHosts, victim: int) -> End:
    return Debugger(hosts.pid_of(victim)).detach


def _slow_link(hosts: RankedHosts, victim: int) -> End:
    """Every 4 s, 3 MB of other traffic wait in the link's queues for 3 s."""
    hosts.host_of(victim).limit_rate(8, queue_s=5)
    for sender, receiver in [(0, victim), (victim, 0)]:
        bursts = (hosts.host_of(receiver).address, 3_000_000, 4.0)
        hosts.start_beside(sender, f"bulk{sender}", bulk_traffic.send_bursts, *bursts)
    return lambda: None


def _slow_store(hosts: RankedHosts, victim: int) -> End:
    hosts.make_store_slow()
    return lambda: None


# ---- settings of ranks ---------------------------------------------------------------------------


def _plain(**settings: Any) -> Settings:
    return lambda rank, is_victim: settings


_DEFAULTS = _plain()


def _stalling(seconds: float, **settings: Any) -> Settings:
    """The victim computes for this time in one step."""
    return lambda rank, is_victim: {**settings, "compute_s": seconds * is_victim}


def _users(rank: int, is_victim: bool) -> dict[str, Any]:
    return {"uid": _USER + rank, "compute_s": _STALL_S * is_victim}


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """One row of the matrix.

    Attributes:
        name: A name for test IDs.
        what: The trouble, in words.
        begin: Begins the trouble at the victim.
        report_limit_s: All survivors raise RankFailure within this time. None: no rank may raise.
        lasts_s: The duration of a harmless trouble. A frozen host continues after this time.
        whole_host: Whether the victim is all ranks of a host. Otherwise it is the first of them.
        names_all: Whether a report must name all lost ranks, unless they are on the machine of the
            store. Otherwise it names some of them.
        both_sides: Whether the lost ranks live and must report, too.
        warned_of: Whether a rank must log a warning that names the victim.
        settings: The settings of a rank, given its number and whether it is the victim.
        store_delay_s: The delay of a slow store, in each direction.
        victims: "store" is the host of rank 0, "other" is the last host.
    """

    name: str
    what: str
    begin: Begin = _nothing
    report_limit_s: float | None = None
    lasts_s: float = 0.0
    whole_host: bool = True
    names_all: bool = False
    both_sides: bool = False
    warned_of: bool = False
    settings: Settings = _DEFAULTS
    store_delay_s: float = 0.0
    victims: tuple[str, ...] = ("store", "other")
    topologies: tuple[str, ...] = ("2x2", "3x1")


_OTHER = {"victims": ("other",)}
_WITH_NEIGHBOURS = {"topologies": ("2x2",)}  # alone on its host, a stopped rank is a frozen host
_RANK = {"whole_host": False, **_WITH_NEIGHBOURS}
_STOPPED = {"lasts_s": 25, "warned_of": True, **_RANK, **_OTHER}
_QUIET = {"lasts_s": _STALL_S, **_OTHER}

TROUBLES = [
    Trouble("train", "none: weights equal DDP's", settings=_plain(num_steps=12), **_OTHER),
    # A lost host.
    Trouble("killed", "a host ends with all its processes", _kill_host, 8, names_all=True),
    Trouble("ranks_killed", "all ranks of a host killed", _kill_ranks, 8, names_all=True),
    Trouble("cut", "link of a host cut", _cut_link, 20, both_sides=True),
    Trouble("frozen", "all processes of a host stopped", _freeze_host, 20, lasts_s=25),
    # A lost process. Its host lives, so ranks of two hosts survive and cannot shrink.
    Trouble("one_killed", "one rank killed", _kill_rank, 8, names_all=True, **_RANK),
    # No rank may be declared lost.
    Trouble("stopped", "one rank stopped for 25 s", _stop_rank, **_STOPPED),
    Trouble("debugged", "a debugger stops one rank for 25 s", _attach_debugger, **_STOPPED),
    # Without the store, other hosts cannot tell this from a stopped host.
    Trouble(
        "store_stopped",
        "the rank that serves the store stopped for 25 s",
        _stop_rank,
        20,
        lasts_s=25,
        victims=("store",),
        **_RANK,
    ),
    Trouble("cut_5s", "link of a host cut for 5 s", _cut_link, lasts_s=5),
    Trouble("frozen_5s", "all processes of a host stopped for 5 s", _freeze_host, lasts_s=5),
    Trouble(
        "slow_link",
        "packets wait for 3 s in queues of a slow link",
        _slow_link,
        lasts_s=25,
        settings=_plain(width=256),
        **_OTHER,
    ),
    Trouble(
        "computes_20s", "one rank computes for 20 s", lasts_s=20, settings=_stalling(20), **_OTHER
    ),
    Trouble("computes_60s", "one rank computes for 60 s", lasts_s=60, settings=_stalling(60)),
    Trouble(
        "undumpable",
        "ranks whose /proc entries cannot be opened, one 12 s late",
        settings=_stalling(_STALL_S, uid=_USER, dumpable=False),
        **_QUIET,
        **_WITH_NEIGHBOURS,
    ),
    Trouble(
        "users",
        "ranks of several users, one 12 s late",
        settings=_users,
        **_QUIET,
        **_WITH_NEIGHBOURS,
    ),
    Trouble(
        "clones",
        "hosts with equal boot ID and PID namespace, one rank 12 s late",
        settings=_stalling(_STALL_S, cloned=True),
        **_QUIET,
    ),
    Trouble(
        "slow_store",
        "a store that answers after 3 s, one rank 12 s late",
        _slow_store,
        settings=_stalling(_STALL_S),
        store_delay_s=1.5,
        **_QUIET,
    ),
]

# The cases that `make test` runs: each kind of trouble once, and losses with each transport.
DEFAULT = {
    "train-2x2-shm-other",
    "killed-2x2-gloo-store",
    "killed-2x2-gloo+shm-other",
    "ranks_killed-2x2-shm-store",
    "cut-2x2-shm-other",
    "cut-2x2-gloo+shm-store",
    "frozen-3x1-gloo-other",
    "one_killed-2x2-gloo-other",
    "one_killed-2x2-gloo+shm-other",
    "stopped-2x2-shm-other",
    "store_stopped-2x2-shm-store",
    "debugged-2x2-gloo-other",
    "slow_link-2x2-gloo-other",
    "computes_20s-3x1-shm-other",
    "undumpable-2x2-shm-other",
    "users-2x2-gloo-other",
    "clones-2x2-shm-other",
    "slow_store-3x1-gloo-other",
}


@dataclass(frozen=True)
class Case:
    trouble: Trouble
    topology: str
    transport: str
    victim: str

    def __str__(self) -> str:
        return f"{self.trouble.name}-{self.topology}-{self.transport}-{self.victim}"

    @property
    def ranks_per_host(self) -> tuple[int, ...]:
        return TOPOLOGIES[self.topology]

    @property
    def victim_rank(self) -> int:
        sizes = self.ranks_per_host
        return 0 if self.victim == "store" else sum(sizes) - sizes[-1]

    @property
    def in_default_run(self) -> bool:
        return str(self) in DEFAULT


def all_cases() -> Iterator[Case]:
    for trouble in TROUBLES:
        for topology in trouble.topologies:
            for transport in TRANSPORTS:
                for victim in trouble.victims:
                    yield Case(trouble, topology, transport, victim)
