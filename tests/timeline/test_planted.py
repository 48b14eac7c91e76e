"""Advice on real runs whose cause of waiting is known."""

from __future__ import annotations

import os

import pytest
from emulated_hosts import CannotEmulate
from planted import CAUSES, HEALTHY, recordings

from ddpx.timeline import Timeline
from ddpx.timeline.analyze.advice import diagnose

pytestmark = pytest.mark.timeout(400)

NUM_SEEDS, ENOUGH = 10, 9
# A part of the test records until one is right, since the machine may disturb one.
MOST_TRIES = 4


def _first_cause(timeline: Timeline) -> str:
    findings = diagnose(timeline.recording)
    return findings[0].cause if findings else HEALTHY


@pytest.mark.alone
@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_sentence_names_the_cause(cause, whole, ranks):
    if cause == "shared cores" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("fewer than two cores")
    try:
        if whole:
            made = recordings(cause, range(NUM_SEEDS), ranks)
            found = [_first_cause(timeline) for timeline in made]
            assert found.count(cause) >= ENOUGH, found
            return
        found = []
        while cause not in found:
            assert len(found) < MOST_TRIES, found
            (timeline,) = recordings(cause, range(len(found), len(found) + 1), ranks)
            found.append(_first_cause(timeline))
    except CannotEmulate as reason:
        pytest.skip(f"no namespaces: {reason}")
