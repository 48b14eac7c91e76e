"""Searches of few steps, for tests that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import ddpx
from ddpx.planning import ReduceCost
from ddpx.planning import search as searches
from ddpx.planning.candidates import DEFAULT, Buckets, ReadyGradient
from ddpx.planning.gain import Gain
from ddpx.planning.training import Schedule

SHORT = Schedule(warm_up=4, arrivals=2, measured=1, screening_rounds=1, pairs=4)
STEPS = SHORT.most_steps + 1  # of a training in which a search ends


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


def small_module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def searched(**options: Any) -> ddpx.ReducerDDP:
    return ddpx.ReducerDDP(small_module(), bucket_cap_mb="auto", **options)


def train(model: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()


def report_of(model: Any) -> ddpx.PlanReport:
    report = ddpx.plan_report(model)
    assert report is not None
    return report
