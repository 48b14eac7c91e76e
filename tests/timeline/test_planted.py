"""Advice on real runs whose cause of waiting is known."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from device_ranks import DeviceRanks
from emulated_hosts import CannotEmulate
from planted import CAUSES, Device, first_cause, record_plan, recordings

pytestmark = pytest.mark.timeout(400)

NUM_SEEDS, ENOUGH = 10, 9
# A part of the test records until one is right, since the machine may disturb one.
MOST_TRIES = 4


@pytest.mark.alone
@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_sentence_names_the_cause(cause, whole, ranks):
    if cause == "shared cores" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("fewer than two cores")
    try:
        if whole:
            made = recordings(cause, range(NUM_SEEDS), ranks)
            found = [first_cause(timeline) for timeline in made]
            assert found.count(cause) >= ENOUGH, found
            return
        found = []
        while cause not in found:
            assert len(found) < MOST_TRIES, found
            (timeline,) = recordings(cause, range(len(found), len(found) + 1), ranks)
            found.append(first_cause(timeline))
    except CannotEmulate as reason:
        pytest.skip(f"no namespaces: {reason}")


@pytest.fixture(scope="module")
def late_ranks(late_library: None) -> Iterator[DeviceRanks]:
    ranks = DeviceRanks("late", 2)
    yield ranks
    ranks.close()


@pytest.mark.alone
@pytest.mark.parametrize("cause", ["late start", "slow compute", "small buckets"])
def test_the_first_sentence_names_the_cause_on_a_device(cause, late_ranks):
    """The host queues the work of a step before the device does it."""
    device = Device("late", params_each=20)
    found: list[str] = []
    while cause not in found:
        assert len(found) < MOST_TRIES, found
        found.append(first_cause(late_ranks.run(record_plan, cause, len(found), device)[0]))
