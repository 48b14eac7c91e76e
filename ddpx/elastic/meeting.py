"""How the survivors of a lost rank agree on who goes on, and from whose state.

They meet on their status pages, which need no rank but the two that write and read, and which
outlive their writers. Each has one note there, its :class:`Note`, that nobody else writes.
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

_BETWEEN_LOOKS_S = 0.005
_TIME_TO_CONNECT = timedelta(seconds=1)  # then it is looked whether anybody serves the store

# How far a rank has come in a round.
CAME, ACCEPTED, READY = range(3)


@dataclass(frozen=True)
class Agreement:
    """What the leader of a round decides.

    Attributes:
        members: those that go on, by their ranks in the old group, ascending.
        port: of the new store, on this machine.
        source: the member whose state counts, by its old rank.
        step: to be made next.
        num_steps: that the source's reducer has made.
        same_state: all have the source's.
    """

    members: tuple[int, ...]
    port: int
    source: int
    step: int
    num_steps: int
    same_state: bool


@dataclass(frozen=True)
class Note:
    """What a survivor lets the others know.

    Attributes:
        round: of the meeting; another one begins whenever a rank is lost in the course of one.
        stage: CAME, ACCEPTED or READY.
        step: the next one for this rank.
        num_steps: that its reducer has made.
        agreement: if this rank led the round.
    """

    round: int
    stage: int
    step: int
    num_steps: int
    agreement: Agreement | None = None

    @classmethod
    def from_text(cls, text: str) -> Note | None:
        if not text:
            return None
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
    note: Note | None
    doing: str | None


class Meeting:
    """One survivor's part in it. Every wait raises RuntimeError after ``timeout_s`` seconds, and
    names who has not come."""

    def __init__(
        self, monitor: _C.Monitor, world_size: int, step: int, num_steps: int, timeout_s: float
    ) -> None:
        self._monitor = monitor
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._note = Note(-1, CAME, step, num_steps)
        self._store: dist.Store | None = None

    def agree(self) -> Agreement:
        """Begins a round, and ends when it has an agreement that this rank is a member of."""
        self._deadline = time.monotonic() + self._timeout_s
        self._begin_round(self._note.round + 1)
        while True:
            peers, unknown = self._look()
            notes = {rank: peer.note for rank, peer in peers.items() if not peer.gone}
            newest = max((note.round for note in notes.values() if note), default=0)
            if newest > self._note.round:
                self._begin_round(newest)
            absent = [
                rank for rank, note in notes.items() if not note or note.round != self._note.round
            ]
            leader = min([*notes, self._monitor.rank])
            # Who has accepted what a leader decided that died since will begin another round.
            busy = [rank for rank, note in notes.items() if note and note.stage != CAME]
            if leader == self._monitor.rank:
                if not (absent or busy or unknown):
                    return self._decide({rank: note for rank, note in notes.items() if note})
            elif leader not in absent:
                note = notes[leader]
                agreement = note.agreement if note else None
                if agreement is not None and self._monitor.rank in agreement.members:
                    self._store = None
                    return agreement
            awaited = busy if leader == self._monitor.rank else [leader]
            self._pause(absent or unknown or awaited, peers)

    def reach(self, agreement: Agreement, stage: int) -> bool:
        """Waits until all members have come as far. False if one never will: another round is due.

        All members get the same answer for READY, the last stage: one that dies behind it has left
        its note, and will be missed by the new group.
        """
        self._deadline = time.monotonic() + self._timeout_s
        self._write(replace(self._note, stage=stage))
        while True:
            peers, _ = self._look()
            late = []
            for rank in agreement.members:
                if rank == self._monitor.rank:
                    continue
                peer = peers[rank]
                here = peer.note is not None and peer.note.round == self._note.round
                if here and peer.note is not None and peer.note.stage >= stage:
                    if peer.gone and stage != READY:
                        return False
                elif peer.gone or (peer.note is not None and peer.note.round > self._note.round):
                    return False
                else:
                    late.append(rank)
            if not late:
                return True
            self._pause(late, peers)

    def all_live(self, agreement: Agreement) -> bool:
        """Whether no member was lost since."""
        peers, _ = self._look()
        return not any(peers[rank].gone for rank in agreement.members if rank in peers)

    def store(self, agreement: Agreement, timeout_s: float) -> dist.Store:
        """The new group's, which the leader's process serves.

        Raises:
            RuntimeError: it cannot be reached.
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
        """Lets the others know that this rank does not come any more. What it has accepted stays to
        be read, since they may count on it."""
        if self._note.stage == CAME:
            self._monitor.write_note("")

    # ---- this rank's note ----------------------------------------------------------------------

    def _begin_round(self, number: int) -> None:
        self._store = None
        self._write(replace(self._note, round=number, stage=CAME, agreement=None))

    def _write(self, note: Note) -> None:
        self._note = note
        self._monitor.write_note(json.dumps(asdict(note)))

    def _decide(self, others: dict[int, Note]) -> Agreement:
        notes = {**others, self._monitor.rank: self._note}
        newest = max(note.progress for note in notes.values())
        store = _tcp_store(0, is_master=True)
        agreement = Agreement(
            members=tuple(sorted(notes)),
            port=store.port,
            source=min(rank for rank, note in notes.items() if note.progress == newest),
            step=newest[0],
            num_steps=newest[1],
            same_state=all(note.step == newest[0] for note in notes.values()),
        )
        self._write(replace(self._note, agreement=agreement))
        self._store = store
        return agreement

    # ---- the others' ---------------------------------------------------------------------------

    def _look(self) -> tuple[dict[int, _Peer], list[int]]:
        """The other ranks, and those of which nothing is known yet."""
        peers: dict[int, _Peer] = {}
        unknown = []
        for rank, seen in enumerate(self._monitor.ranks()):
            if rank == self._monitor.rank:
                continue
            if not seen:
                unknown.append(rank)
                continue
            if not seen["local"]:
                raise _shrink_between_hosts(rank, seen["host"])
            if seen["note"] is None and seen["alive"]:
                raise _shrink_without_page(rank)
            gone = not seen["alive"] or seen["ending"]
            peers[rank] = _Peer(gone, Note.from_text(seen["note"] or ""), seen["doing"])
        return peers, unknown

    def _pause(self, awaited: Iterable[int], peers: dict[int, _Peer]) -> None:
        if time.monotonic() > self._deadline:
            doing = {rank: peers[rank].doing if rank in peers else None for rank in awaited}
            raise _shrink_timed_out(self._timeout_s, doing)
        time.sleep(_BETWEEN_LOOKS_S)


def _tcp_store(port: int, *, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=is_master,
        timeout=_TIME_TO_CONNECT,
        wait_for_workers=False,
    )


# ---- errors --------------------------------------------------------------------------------------


def _shrink_between_hosts(rank: int, host: str) -> NotImplementedError:
    return NotImplementedError(
        f"ddpx.shrink() works among the ranks of one machine, but rank {rank} is on another "
        f"machine ({host}). {errors.FROM_CHECKPOINT}"
    )


def _shrink_without_page(rank: int) -> RuntimeError:
    return RuntimeError(
        f"ddpx.shrink() cannot read the state of rank {rank}: the kernel does not permit it. The "
        f"process of rank {rank} may belong to another user. {errors.FROM_CHECKPOINT}"
    )


def _shrink_timed_out(timeout_s: float, doing: Mapping[int, str | None]) -> RuntimeError:
    """``doing``: by rank, of those that have not come, what they were last seen doing."""
    late = ", ".join(
        f"rank {rank} (" + (f"last seen in {seen})" if seen else "state unknown)")
        for rank, seen in sorted(doing.items())
    )
    return RuntimeError(
        f"ddpx.shrink() waited {timeout_s:g} s, but some ranks did not call ddpx.shrink(): {late}. "
        "Call ddpx.shrink() on every surviving rank, after ddpx.RankFailure. Pass a larger "
        "timeout_s= to wait longer."
    )
