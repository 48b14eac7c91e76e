"""transport="shm" over a gloo group of two emulated hosts with two ranks each."""

from __future__ import annotations

import time
from collections.abc import Iterator

import features_between_hosts
import pytest
from emulated_hosts import CannotEmulate
from host_ranks import Event, RankedHosts

NUM_RANKS = 4
LIMIT_S = 60.0  # of one feature; all features take about 10 s on two idle cores
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def hosts() -> Iterator[RankedHosts]:
    """The ranks run all features, one after another."""
    try:
        with RankedHosts((2, 2)) as hosts:
            for rank in range(NUM_RANKS):
                setting = (rank, NUM_RANKS, hosts.host_of(0).address)
                hosts.start_beside(rank, f"rank{rank}", features_between_hosts.run, *setting)
            yield hosts
    except CannotEmulate as reason:
        pytest.skip(f"hosts cannot be emulated here: {reason}")


def _ends(hosts: RankedHosts, feature: str) -> list[Event]:
    """The events of a feature, of the ranks that have ended it."""
    events = [event for rank in range(NUM_RANKS) for event in hosts.events(rank)]
    return [event for event in events if event["event"] == feature]


@pytest.mark.parametrize("feature", features_between_hosts.FEATURES)
def test_feature(hosts: RankedHosts, feature: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    errors: list[str] = []
    ends: list[Event] = []
    while len(ends) < NUM_RANKS and not errors and time.monotonic() < deadline:
        time.sleep(0.05)
        ends = _ends(hosts, feature)
        errors = [event["error"] for event in ends if event["error"]]
    outputs = [hosts.output(rank) for rank in range(NUM_RANKS)]
    assert not errors, "\n".join([*dict.fromkeys(errors), *outputs])
    assert len(ends) == NUM_RANKS, "\n".join([f"{feature} ended on {len(ends)} ranks", *outputs])
