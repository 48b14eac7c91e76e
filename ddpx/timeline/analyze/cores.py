"""Ranks that share too few cores."""

from __future__ import annotations

from dataclasses import dataclass

from ddpx.errors import count
from ddpx.timeline.model import Recording


@dataclass(frozen=True)
class SharedCores:
    """More threads than cores on a host.

    Attributes:
        host: The host.
        ranks: The ranks that may use no other cores.
        num_threads: The number of threads of all these ranks.
        num_cores: The number of cores.
    """

    host: str
    ranks: tuple[int, ...]
    num_threads: int
    num_cores: int

    @property
    def threads_each(self) -> int:
        """The number of threads for which the cores would suffice. 0 if there are more ranks."""
        return self.num_cores // len(self.ranks)

    def __str__(self) -> str:
        ranks = count(len(self.ranks), "rank")
        if self.threads_each:
            ranks += f" with {self.num_threads} threads in all"
        share = "shares" if len(self.ranks) == 1 else "share"
        return f"{ranks} {share} {count(self.num_cores, 'core')} of host {self.host}"


def shared_cores(recording: Recording) -> list[SharedCores]:
    """Returns the cores that have more threads to run than cores, each set of cores once."""
    found: dict[tuple[str, tuple[int, ...]], SharedCores] = {}
    for rank, cores in recording.cores.items():
        host = recording.hosts[rank]
        sharing = tuple(
            other
            for other, theirs in recording.cores.items()
            if recording.hosts[other] == host and set(theirs) <= set(cores)
        )
        num_threads = sum(recording.num_threads.get(other, 1) for other in sharing)
        if num_threads > len(cores):
            found[host, cores] = SharedCores(host, sharing, num_threads, len(cores))
    return list(found.values())
