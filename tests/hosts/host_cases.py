"""The matrix: what happens to one host or rank of a training, and what ranks must report then.

Two tables are meant to be edited: ``TROUBLES``, and ``NOT_YET``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from host_ranks import RankedHosts
from tracing import Debugger

# Ranks for each host. Rank 0, with the store, is on the first host.
TOPOLOGIES = {"2x2": (2, 2), "3x1": (1, 1, 1)}
TRANSPORTS = ("gloo", "shm")
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


def _cut_link(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).link_down()
    return lambda: None


def _freeze_host(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).freeze()
    return hosts.host_of(victim).thaw


def _stop_rank(hosts: RankedHosts, victim: int) -> End:
    os.kill(hosts.pid_of(victim), signal.SIGSTOP)
    return lambda: os.kill(hosts.pid_of(victim), signal.SIGCONT)


def _attach_debugger(hosts: RankedHosts, victim: int) -> End:
    return Debugger(hosts.pid_of(victim)).detach


def _slow_link(hosts: RankedHosts, victim: int) -> End:
    hosts.host_of(victim).limit_rate(8, queue_s=5)
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
        lasts_s: The duration of a harmless trouble. A frozen host continues after all have
            reported, but not earlier.
        lost: The ranks that survivors lose: those of the victim's "host", or the "rank".
        names_all: Whether a report must name all lost ranks. Otherwise it names some of them.
        both_sides: Whether the lost ranks live and must report, too.
        settings: The settings of a rank, given its number and whether it is the victim.
        store_delay_s: The delay of a slow store, in each direction.
        victims: "store" is the host of rank 0, "other" is the last host. A rank is the first of
            its host.
    """

    name: str
    what: str
    begin: Begin = _nothing
    report_limit_s: float | None = None
    lasts_s: float = 0.0
    lost: str = "host"
    names_all: bool = False
    both_sides: bool = False
    settings: Settings = _DEFAULTS
    store_delay_s: float = 0.0
    victims: tuple[str, ...] = ("store", "other")
    topologies: tuple[str, ...] = ("2x2", "3x1")


OTHER = ("other",)
# Alone on its host, a stopped rank is a frozen host.
WITH_NEIGHBOUR = ("2x2",)

TROUBLES = [
    Trouble("train", "none: weights equal DDP's", settings=_plain(num_steps=12), victims=OTHER),
    # A lost machine.
    Trouble("killed", "every process of a host killed", _kill_host, 8, names_all=True),
    Trouble("cut", "the link of a host cut", _cut_link, 20, both_sides=True),
    Trouble("frozen", "all processes of a host stopped", _freeze_host, 20, lasts_s=25),
    # A lost process. Its host lives, so ranks of several hosts survive and cannot shrink.
    Trouble(
        "one_killed",
        "one rank killed",
        _kill_rank,
        8,
        lost="rank",
        names_all=True,
        topologies=WITH_NEIGHBOUR,
    ),
    # No rank may be declared lost.
    Trouble("stopped", "one rank stopped", _stop_rank, lasts_s=25, topologies=WITH_NEIGHBOUR),
    Trouble("debugged", "a debugger", _attach_debugger, lasts_s=25, topologies=WITH_NEIGHBOUR),
    Trouble(
        "slow_link",
        "a link of 8 Mbit/s with long queues",
        _slow_link,
        lasts_s=25,
        settings=_plain(width=1024),
        victims=OTHER,
    ),
    Trouble(
        "computes_20s",
        "a rank computes for 20 s",
        lasts_s=20,
        settings=_stalling(20),
        victims=OTHER,
    ),
    Trouble("computes_60s", "a rank computes for 60 s", lasts_s=60, settings=_stalling(60)),
    Trouble(
        "undumpable",
        "ranks whose /proc entries cannot be opened",
        lasts_s=_STALL_S,
        settings=_stalling(_STALL_S, uid=_USER, dumpable=False),
        victims=OTHER,
        topologies=WITH_NEIGHBOUR,
    ),
    Trouble(
        "users",
        "each rank belongs to another user",
        lasts_s=_STALL_S,
        settings=_users,
        victims=OTHER,
        topologies=WITH_NEIGHBOUR,
    ),
    Trouble(
        "clones",
        "hosts with equal boot ID and PID namespace",
        lasts_s=_STALL_S,
        settings=_stalling(_STALL_S, cloned=True),
        victims=OTHER,
    ),
    Trouble(
        "slow_store",
        "a store that takes 3 s to answer",
        _slow_store,
        lasts_s=_STALL_S,
        settings=_stalling(_STALL_S),
        store_delay_s=1.5,
        victims=OTHER,
    ),
]

# The cases that today's failure detector does not pass, by pattern, with the reason.
NOT_YET: dict[str, str] = {}

# The cases that `make test` runs: each trouble once.
DEFAULT = {
    "train-2x2-shm-other",
    "killed-2x2-gloo-store",
    "cut-2x2-shm-other",
    "frozen-3x1-gloo-other",
    "one_killed-2x2-gloo-other",
    "stopped-2x2-shm-store",
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

    @property
    def not_yet(self) -> str | None:
        """The reason why this case may fail. None if it must pass."""
        reasons = (why for pattern, why in NOT_YET.items() if fnmatchcase(str(self), pattern))
        return next(reasons, None)


def all_cases() -> Iterator[Case]:
    for trouble in TROUBLES:
        for topology in trouble.topologies:
            for transport in TRANSPORTS:
                for victim in trouble.victims:
                    yield Case(trouble, topology, transport, victim)
