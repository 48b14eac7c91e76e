"""Ranks of several hosts, which know each other only through the store."""

from __future__ import annotations

import pytest
from fault_cases import Case, Report
from fault_ranks import Ending, again_if_held_up
from test_faults import check, run

pytestmark = pytest.mark.timeout(120)


def _reports(endings: list[Ending]) -> list[Report]:
    return [ending.value for ending in endings if ending.value is not None]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@again_if_held_up
def test_a_dead_rank(world_size: int, transport: str) -> None:
    case = Case("kill", "bucket in flight", transport, world_size, hosts=2)
    endings = run(case)
    check(case, endings)
    for report in _reports(endings):
        assert report.host.endswith("/B"), report


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@again_if_held_up
def test_rank_0_dies_with_the_store(world_size: int, transport: str) -> None:
    case = Case("kill", "gradient hook", transport, world_size, victim=0, hosts=2)
    check(case, run(case))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("victim", [0, -1])
@again_if_held_up
def test_an_exception(victim: int, transport: str) -> None:
    case = Case("exception", "forward", transport, 3, victim=victim, hosts=2)
    check(case, run(case))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_stall_is_warned_of(transport: str) -> None:
    case = Case("stall", "gradient hook", transport, 3, hosts=2)
    check(case, run(case))


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("phase", ["forward", "gradient hook", "between steps"])
@again_if_held_up
def test_a_stall_ends_patience(phase: str, transport: str) -> None:
    case = Case("stall, raise", phase, transport, 3, hosts=2)
    check(case, run(case))
