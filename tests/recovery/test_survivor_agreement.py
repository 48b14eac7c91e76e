"""The rendezvous of survivors decides who continues, and with whose state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddpx.elastic.state_check import why_no_state
from ddpx.elastic.survivor_agreement import ACCEPTED, Agreement, Rendezvous, SurvivorState


class _Monitor:
    """The status pages as one rank sees them.

    Args:
        rank: The rank.
        pages: The page of each rank, which all ranks share.
    """

    def __init__(self, rank: int, pages: list[dict[str, Any] | None]) -> None:
        self.rank = rank
        self._pages = pages

    def ranks(self) -> list[dict[str, Any] | None]:
        return list(self._pages)

    def publish_agreement(self, text: str) -> None:
        page = self._pages[self.rank]
        assert page is not None
        page["agreement"] = text


def _page(**fields: Any) -> dict[str, Any]:
    alive = {"alive": True, "ending": False, "local": True, "host": "here"}
    return {**alive, "agreement": "", "doing": "backward", **fields}


def _rendezvous(rank: int, pages: list[Any], state: SurvivorState | None = None) -> Rendezvous:
    state = state or SurvivorState(3, 3, True)
    return Rendezvous(_Monitor(rank, pages), len(pages), state, timeout_s=10)  # type: ignore[arg-type]


def _agreement_of(states: list[SurvivorState]) -> Agreement:
    """The agreement of ranks with these states, which is the same on all ranks."""
    pages = [_page() for _ in states]
    ranks = [_rendezvous(rank, pages, state) for rank, state in enumerate(states)]
    with ThreadPoolExecutor(len(states)) as threads:
        agreements = list(threads.map(Rendezvous.agree, ranks))
    assert agreements.count(agreements[0]) == len(states)
    return agreements[0]


RIGHT_STATES: dict[str, tuple[list[tuple[int, int, bool]], int | None, int, int, bool]] = {
    "all the same": ([(3, 5, True), (3, 5, True)], 0, 3, 5, True),
    "the first is behind": ([(2, 5, True), (3, 4, True), (3, 4, True)], 1, 3, 4, False),
    "the last is ahead": ([(2, 5, True), (3, 4, True), (3, 6, True)], 2, 3, 6, False),
    "the first is wrong": ([(3, 5, False), (3, 5, True)], 1, 3, 5, False),
    "a wrong one is ahead": ([(4, 6, False), (3, 5, True), (3, 5, True)], 1, 3, 5, False),
    "all are wrong": ([(3, 5, False), (3, 5, False)], None, 0, 0, False),
}


@pytest.mark.parametrize("case", RIGHT_STATES.values(), ids=RIGHT_STATES)
def test_the_source_has_the_newest_right_state(case: Any) -> None:
    states, source, step, num_steps, same_state = case
    found = _agreement_of([SurvivorState(*state) for state in states])
    assert found.members == tuple(range(len(states)))
    assert (found.source, found.step, found.num_steps) == (source, step, num_steps)
    assert found.same_state is same_state
    assert (why_no_state(found, [object()]) is None) is (source is not None)
    assert (why_no_state(found, []) is None) is same_state


@pytest.mark.parametrize("end", [{"alive": False}, {"ending": True}], ids=str)
def test_a_rank_that_ends_is_no_member(end: dict[str, bool]) -> None:
    """The rank may have arrived before."""
    pages = [_page(), _page(), _page()]
    _rendezvous(1, pages)._begin_round(0)
    pages[1].update(end)
    with ThreadPoolExecutor(2) as threads:
        agreements = list(threads.map(Rendezvous.agree, (_rendezvous(r, pages) for r in (0, 2))))
    assert [agreement.members for agreement in agreements] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("page", "kind", "text"),
    [
        (_page(local=False, host="there"), NotImplementedError, r"rank 1 is on .*\(there\)"),
        (_page(agreement=None), RuntimeError, "cannot read the state of rank 1"),
        (_page(), RuntimeError, r"did not call ddpx.shrink\(\): rank 1 \(last seen in backward\)"),
        (_page(doing=None), RuntimeError, r"rank 1 \(state unknown\)"),
        (None, RuntimeError, r"rank 1 \(state unknown\)"),
    ],
    ids=["of another machine", "not readable", "stays away", "does nothing known", "no page"],
)
def test_errors(page: dict[str, Any] | None, kind: type[Exception], text: str) -> None:
    rendezvous = _rendezvous(0, [_page(), page])
    rendezvous._timeout_s = 0.05
    with pytest.raises(kind, match=text):
        rendezvous.agree()


def test_a_rank_that_gives_up_leaves_the_round() -> None:
    """An accepted agreement stays readable, because other ranks may rely on it."""
    pages = [_page(), _page()]
    gives_up = _rendezvous(0, pages)
    gives_up._begin_round(0)
    gives_up.give_up()
    assert SurvivorState.from_text(pages[0]["agreement"]).round == -1
    agreement = Agreement((0, 1), 1, 0, 3, 3, True)
    gives_up._write(SurvivorState(3, 3, True, 0, ACCEPTED, agreement))
    gives_up.give_up()
    assert SurvivorState.from_text(pages[0]["agreement"]).agreement == agreement
