"""The rendezvous of the survivors of a lost rank: they agree on members and on a source of state.

Survivors communicate through their status pages. A page has one writer, needs no third rank, and
can be read after its writer has ended. Each survivor publishes one :class:`SurvivorState` there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from ddpx import _C
from ddpx.elastic import errors

POLL_INTERVAL_S = 0.005
_TIME_TO_CONNECT = timedelta(seconds=1)  # between checks that the leader is alive

# The stages of a rank in a round, in order.
ARRIVED, ACCEPTED, READY = range(3)


@dataclass(frozen=True)
class Agreement:
    """The decision of the leader of a round.

    Attributes:
        members: The ranks that continue, by their old numbers, in ascending order.
        port: The port of the new store, on this machine.
        source: The member whose state all members take over, by its old number. None: no member has
            a state that is known to be right.
        step: The next step.
        num_steps: The number of steps of the source's reducer.
        same_state: Whether all members have the state of the source.
    """

    members: tuple[int, ...]
    port: int
    source: int | None
    step: int
    num_steps: int
    same_state: bool


@dataclass(frozen=True)
class SurvivorState:
    """The state that a survivor publishes.

    Attributes:
        step: The next step of this rank.
        num_steps: The number of steps of this rank's reducer.
        is_right: Whether the parameters and buffers contain no results of aborted calls.
        round: The number of the round. A new round begins if a rank is lost during a round.
        stage: ARRIVED, ACCEPTED or READY.
        agreement: The decision, if this rank leads the round.
    """

    step: int
    num_steps: int
    is_right: bool
    round: int = -1
    stage: int = ARRIVED
    agreement: Agreement | None = None

    @classmethod
    def from_text(cls, text: str) -> SurvivorState:
        """Reads the state that a rank has published. Without a text, the rank is in no round."""
        if not text:
            return cls(step=0, num_steps=0, is_right=False)
        fields = json.loads(text)
        agreement = fields.pop("agreement")
        if agreement is not None:
            agreement["members"] = tuple(agreement["members"])
            agreement = Agreement(**agreement)
        return cls(**fields, agreement=agreement)

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, self.num_steps


@dataclass(frozen=True)
class _Peer:
    gone: bool
    state: SurvivorState
    doing: str | None


class Rendezvous:
    """The part of one survivor in the rendezvous.

    Every wait raises RuntimeError after ``timeout_s`` seconds. The error names the missing ranks.
    """

    def __init__(
        self, monitor: _C.Monitor, world_size: int, state: SurvivorState, timeout_s: float
    ) -> None:
        self._monitor = monitor
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._own = state
        self._store: dist.Store | None = None

    def agree(self) -> Agreement:
        """Begins a round. Returns the first agreement that has this rank as a member."""
        self._deadline = time.monotonic() + self._timeout_s
        self._begin_round(self._own.round + 1)
        while True:
            peers, unknown = self._read_peers()
            states = {rank: peer.state for rank, peer in peers.items() if not peer.gone}
            newest = max((state.round for state in states.values()), default=0)
            if newest > self._own.round:
                self._begin_round(newest)
            missing = [rank for rank, state in states.items() if state.round != self._own.round]
            leader = min([*states, self._monitor.rank])
            # A rank that accepted the decision of a leader that died begins a new round later.
            busy = [rank for rank, state in states.items() if state.stage != ARRIVED]
            if leader == self._monitor.rank:
                if not (missing or busy or unknown):
                    return self._decide(states)
            elif leader not in missing:
                agreement = states[leader].agreement
                if agreement is not None and self._monitor.rank in agreement.members:
                    self._store = None
                    return agreement
            awaited = busy if leader == self._monitor.rank else [leader]
            self._pause(missing or unknown or awaited, peers)

    def reach(self, agreement: Agreement, stage: int) -> bool:
        """Waits until all members have reached ``stage``.

        Returns:
            False if a member will not reach the stage, so that a new round is necessary. All
            members get the same answer for READY. A rank that dies after READY is detected by the
            new group.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._write(replace(self._own, stage=stage))
        while True:
            peers, _ = self._read_peers()
            late = []
            for rank in agreement.members:
                if rank == self._monitor.rank:
                    continue
                peer, state = peers[rank], peers[rank].state
                if state.round == self._own.round and state.stage >= stage:
                    if peer.gone and stage != READY:
                        return False
                elif peer.gone or state.round > self._own.round:
                    return False
                else:
                    late.append(rank)
            if not late:
                return True
            self._pause(late, peers)

    def all_live(self, agreement: Agreement) -> bool:
        """Whether all members are alive."""
        peers, _ = self._read_peers()
        return not any(peers[rank].gone for rank in agreement.members if rank in peers)

    def store(self, agreement: Agreement, timeout_s: float) -> dist.Store:
        """Returns the store of the new group. The process of the leader serves the store.

        Raises:
            RuntimeError: The store cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        while self._store is None:
            try:
                self._store = _tcp_store(agreement.port, is_master=False)
            except RuntimeError:
                if time.monotonic() > deadline or not self.all_live(agreement):
                    raise
        self._store.set_timeout(timedelta(seconds=timeout_s))
        return self._store

    def give_up(self) -> None:
        """Tells the other survivors that this rank does not continue.

        An accepted agreement stays readable, because other ranks may rely on it.
        """
        if self._own.stage == ARRIVED:
            self._monitor.publish_agreement("")

    # ---- the state of this rank ----------------------------------------------------------------

    def _begin_round(self, number: int) -> None:
        self._store = None
        self._write(replace(self._own, round=number, stage=ARRIVED, agreement=None))

    def _write(self, state: SurvivorState) -> None:
        self._own = state
        self._monitor.publish_agreement(json.dumps(asdict(state)))

    def _decide(self, others: dict[int, SurvivorState]) -> Agreement:
        states = {**others, self._monitor.rank: self._own}
        right = {rank: state.progress for rank, state in states.items() if state.is_right}
        newest = max(right.values(), default=(0, 0))
        store = _tcp_store(0, is_master=True)
        agreement = Agreement(
            members=tuple(sorted(states)),
            port=store.port,
            source=min((rank for rank in right if right[rank] == newest), default=None),
            step=newest[0],
            num_steps=newest[1],
            same_state=all(state.is_right and state.step == newest[0] for state in states.values()),
        )
        self._write(replace(self._own, agreement=agreement))
        self._store = store
        return agreement

    # ---- the states of other ranks -------------------------------------------------------------

    def _read_peers(self) -> tuple[dict[int, _Peer], list[int]]:
        """Returns the states of other ranks, and the ranks whose state is unknown."""
        peers: dict[int, _Peer] = {}
        unknown = []
        for rank, seen in enumerate(self._monitor.ranks()):
            if rank == self._monitor.rank:
                continue
            if not seen:
                unknown.append(rank)
                continue
            if not seen["local"]:
                raise NotImplementedError(
                    f"ddpx.shrink() works among the ranks of one machine, but rank {rank} is on "
                    f"another machine ({seen['host']}). {errors.FROM_CHECKPOINT}"
                )
            if seen["agreement"] is None and seen["alive"]:
                raise RuntimeError(
                    f"ddpx.shrink() cannot read the state of rank {rank}: the kernel does not "
                    f"permit it. The process of rank {rank} may belong to another user. "
                    f"{errors.FROM_CHECKPOINT}"
                )
            gone = not seen["alive"] or seen["ending"]
            peers[rank] = _Peer(
                gone, SurvivorState.from_text(seen["agreement"] or ""), seen["doing"]
            )
        return peers, unknown

    def _pause(self, awaited: Iterable[int], peers: dict[int, _Peer]) -> None:
        if time.monotonic() > self._deadline:
            doing = {rank: peers[rank].doing if rank in peers else None for rank in awaited}
            raise _shrink_timed_out(self._timeout_s, doing)
        time.sleep(POLL_INTERVAL_S)


def _tcp_store(port: int, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=is_master,
        timeout=_TIME_TO_CONNECT,
        wait_for_workers=False,
    )


# ---- errors --------------------------------------------------------------------------------------


def _shrink_timed_out(timeout_s: float, doing: Mapping[int, str | None]) -> RuntimeError:
    """``doing`` has the last known activity of each missing rank."""
    late = ", ".join(
        f"rank {rank} (" + (f"last seen in {seen})" if seen else "state unknown)")
        for rank, seen in sorted(doing.items())
    )
    return RuntimeError(
        f"ddpx.shrink() waited {timeout_s:g} s, but some ranks did not call ddpx.shrink(): {late}. "
        "Call ddpx.shrink() on every surviving rank, after ddpx.RankFailure or "
        "ddpx.RankStalled. Pass a larger timeout_s= to wait longer."
    )
