"""Searches of few steps, for tests that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from ddpx.planning import ReduceCost
from ddpx.planning import search as searches
from ddpx.planning.candidates import DEFAULT, Buckets, ReadyGradient
from ddpx.planning.gain import Gain
from ddpx.planning.training import Schedule

SHORT = Schedule(warm_up=4, arrivals=2, measured=1, screening_rounds=1, pairs=4)


def _few_candidates(
    gradients: Sequence[ReadyGradient], default: Buckets, cost: ReduceCost
) -> dict[str, Buckets]:
    """Plans that differ from the default plan of a small model."""
    order = [index for bucket in default for index in bucket]
    return {
        DEFAULT: default,
        "best": tuple((index,) for index in order),
        "single bucket": (tuple(order[3:]), tuple(order[:3])),
    }


@contextmanager
def short_search() -> Iterator[None]:
    """A search of few steps. Each gain is certain, so that the plan often changes at the end."""
    with (
        patch.object(searches, "Schedule", lambda: SHORT),
        patch.object(searches, "candidates", _few_candidates),
        patch.object(Gain, "is_certain", property(lambda gain: True)),
    ):
        yield
