"""Clocks of several ranks are combined into one."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from ddpx import ReducerDDP
from ddpx.comm.collectives import all_gather_json, all_gather_rows
from ddpx.timeline.record import clocks
from ddpx.timeline.record.clocks import Reading, error_of, read_clocks, to_rank_0


def _read_clocks() -> tuple[Reading, Reading]:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    return (
        read_clocks(group, device),
        read_clocks(group, device, identity=f"machine {group.rank()}"),
    )


def test_clocks_are_read(ranks):
    """The ranks share a clock, so that reading it as a foreign clock shows the error."""
    same, foreign = zip(*ranks(2).run(_read_clocks), strict=True)
    assert [(reading.offset_ns, reading.error_ns) for reading in same] == [(0, 0), (0, 0)]
    assert foreign[0].error_ns == 0
    assert 0 < foreign[1].error_ns < 50e6
    assert abs(foreign[1].offset_ns) <= foreign[1].error_ns


def _answer_late() -> float:
    """Rank 0 pauses before its answers for longer than ddpx polls for lost ranks."""
    group = dist.group.WORLD
    assert group is not None
    device, identity = torch.device("cpu"), f"machine {group.rank()}"
    ReducerDDP(torch.nn.Linear(2, 2))  # starts the failure detector
    if group.rank() == 0:
        all_gather_json(identity, group, device)
        time.sleep(0.7)
        clocks._answer(1, group, device)
        error_ns = 0.0
    else:
        error_ns = read_clocks(group, device, identity).error_ns
    dist.all_reduce(torch.zeros(1))  # the group still works
    return error_ns


def test_a_late_answer_breaks_no_group(ranks):
    assert 0 < ranks(2).run(_answer_late)[1] < 50e6


def test_the_shortest_round_trip_counts(monkeypatch):
    """Rank 0 answers at once, and its clock is 1000 ns ahead."""
    now = 0
    trips_ns = itertools.chain([80, 10], itertools.repeat(40))

    def send(message: torch.Tensor, **_: object) -> None:
        message.fill_(now + 1000)

    def recv(message: torch.Tensor, **_: object) -> None:
        nonlocal now
        now += next(trips_ns)

    monkeypatch.setattr(clocks._C, "steady_now", lambda: now)
    monkeypatch.setattr(clocks.dist, "send", send)
    monkeypatch.setattr(clocks.dist, "recv", recv)
    assert clocks._ask(None, torch.device("cpu")) == Reading(90, 995, 5)


def test_drift_is_evened_out():
    readings = (Reading(1000, 100.0, 5.0), Reading(3000, 200.0, 5.0))
    assert [to_rank_0(at, readings) for at in (1000, 2000, 3000)] == [1100, 2150, 3200]
    assert to_rank_0(2000, readings[:1]) == 2100


def test_drift_is_in_the_error():
    """A clock that was read once drifts by up to 0.1 ms per second.

    With two readings the drift is known.
    """
    once = (Reading(1_000_000_000, 100.0, 5_000.0),)
    assert error_of(1_000_000_000, once) == 5_000
    assert error_of(11_000_000_000, once) == pytest.approx(5_000 + 1_000_000)
    assert error_of(0, once) == 5_000  # there was no event after the reading
    twice = (*once, Reading(11_000_000_000, 90.0, 7_000.0))
    assert error_of(11_000_000_000, twice) == 7_000
    assert error_of(11_000_000_000, (Reading(0, 0.0, 0.0),)) == 0  # rank 0's own clock


def _gather(num_rows: list[int]) -> tuple[list[torch.Tensor], list[object]]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    rows = torch.arange(3 * num_rows[rank]).view(-1, 3) + 1000 * rank
    device = torch.device("cpu")
    return all_gather_rows(rows, group, device), all_gather_json(rank * ["é"], group, device)


@pytest.mark.parametrize("num_rows", [[2, 5], [0, 3], [0, 0]])
def test_rows_of_all_ranks(ranks, num_rows):
    for rows, values in ranks(2).run(_gather, num_rows):
        for rank, each in enumerate(rows):
            assert each.dtype == torch.int64
            numbers = [1000 * rank + i for i in range(3 * num_rows[rank])]
            assert each.shape == (num_rows[rank], 3) and each.flatten().tolist() == numbers
        assert values == [[], ["é"]]
