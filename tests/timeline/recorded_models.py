"""Models to record, and properties of every recording."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.model import Step


def small_model(**options: Any) -> ReducerDDP:
    torch.manual_seed(0)
    return ReducerDDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), **options)


def train_step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def record_mode(options: dict[str, Any]) -> Timeline:
    model = small_model(**options)
    with ddpx.record(model) as timeline:
        for _ in range(4):
            train_step(model)
    return timeline


def check_order(step: Step) -> None:
    """Checks the order of events in a step."""
    for rank_step in step.ranks.values():
        assert rank_step.forwards
        assert rank_step.forwards[-1].end <= rank_step.backward.begin <= rank_step.backward.end
        assert rank_step.backward.end <= rank_step.end
        assert sorted(a.at for a in rank_step.arrivals) == [a.at for a in rank_step.arrivals]
        launches = []
        for layout, bucket in zip(step.layout, rank_step.buckets, strict=True):
            assert bucket is not None
            assert bucket.ready <= bucket.launched <= bucket.completed <= bucket.wait.end
            assert bucket.wait.end <= bucket.written_back <= rank_step.end
            members = [a.at for a in rank_step.arrivals if a.param in layout.params]
            assert all(at <= bucket.ready for at in members)
            launches.append(bucket.launched)
        assert launches == sorted(launches)
        figures = step_figures(rank_step)
        assert figures.communication == figures.overlapped + figures.exposed


def train_unaware(
    folder: str, steps: str | None = None, num_models: int = 1, **options: Any
) -> None:
    """Trains four steps of each model, as a script does that does not use timelines."""
    os.environ["DDPX_TIMELINE"] = folder
    if steps:
        os.environ["DDPX_TIMELINE_STEPS"] = steps
    try:
        models = [small_model(**options) for _ in range(num_models)]
        for model in models:
            for _ in range(4):
                train_step(model)
        del model, models
        gc.collect()
    finally:
        del os.environ["DDPX_TIMELINE"]
        os.environ.pop("DDPX_TIMELINE_STEPS", None)
