"""``_get_ddp_logging_data()``: DDP's fields, and sampled times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_wrappers import (
    SMALL_CAP,
    WRAPPERS,
    Mlp,
    Wrapper,
    mlp_step,
)
from modes import MODES
from torch import nn

from ddpx import ReducerDDP

# Fields that depend on time, and fields of DDP's own search for unused params.
_TIMES = ("time", "unused_parameter_size")


def _logging_data(cls: Callable[..., Wrapper], options: dict[str, Any]) -> list[dict]:
    """The logging data before the first step, and after each of four steps."""
    torch.manual_seed(0)
    model = cls(Mlp(), **options)
    data = [model._get_ddp_logging_data()]
    for _ in range(4):
        mlp_step(model)
        data.append(model._get_ddp_logging_data())
    return data


def _check_logging_data(options: dict[str, Any]) -> None:
    theirs, ours = (_logging_data(cls, options) for cls in WRAPPERS)
    # DDP records per-step values one step late, so only the first and last data are equal.
    for mine, other in ((ours[0], theirs[0]), (ours[-1], theirs[-1])):
        for key, value in other.items():
            if key in mine and not any(part in key for part in _TIMES):
                assert mine[key] == value, key
        # No order is recorded if buckets are never rebuilt. No search is made for unused params.
        not_here = {"unused_parameter_size"}
        if options.get("find_unused_parameters"):
            not_here.add("prev_iteration_grad_ready_order_indices")
        assert set(other) - set(mine) <= not_here
    final = ours[-1]
    now = time.time_ns()
    for data in (final, theirs[-1]):
        moments = [
            value for key, value in data.items() if "_time_start" in key or "_time_end" in key
        ]
        assert len(moments) == 5
        assert all(now - 600e9 < moment <= now for moment in moments), (moments, now)
    assert final["forward_compute_time"] > 0
    assert final["backward_compute_time"] >= final["backward_compute_comm_overlap_time"] >= 0
    assert final["backward_comm_time"] > 0
    assert final["avg_backward_compute_time"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_logging_data_has_ddps_fields(ranks, mode):
    ranks(2).run(_check_logging_data, MODES[mode] | SMALL_CAP)


def _check_first_buckets() -> None:
    """A second declaration of a static graph has no effect."""
    model = ReducerDDP(Mlp(), static_graph=True, average="sum", **SMALL_CAP)
    first = model._get_ddp_logging_data()["bucket_sizes"]
    for _ in range(3):
        model.zero_grad()
        mlp_step(model)
    model.reducer._set_static_graph()
    data = model._get_ddp_logging_data()
    assert data["bucket_sizes"] == first != data["rebuilt_bucket_sizes"]
    assert data["average"] == "sum"


def test_first_buckets(ranks):
    ranks(2).run(_check_first_buckets)


class _Slow(nn.Linear):
    """Each forward takes 5 ms longer than the one before."""

    num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        time.sleep(0.005 * self.num_forwards)
        return super().forward(x)


def _check_averages_of_times() -> None:
    model = ReducerDDP(_Slow(4, 4))
    times = []
    for _ in range(5):
        model(torch.ones(1, 4)).sum().backward()
        data = model._get_ddp_logging_data()
        times.append(data["forward_compute_time"])
    assert times[-1] > 1.5 * times[0]
    assert data["avg_forward_compute_time"] == pytest.approx(sum(times) / len(times), abs=1)


def test_averages_of_times(ranks):
    ranks(2).run(_check_averages_of_times)


def _check_sample_rate() -> None:
    for cls in WRAPPERS:
        model = cls(Mlp())
        model._set_ddp_runtime_logging_sample_rate(4)
        seen = []
        for _ in range(18):
            mlp_step(model)
            seen.append(model._get_ddp_logging_data()["iteration"])
        assert seen[:10] == list(range(10)), cls
        assert len(set(seen[10:])) == 3, (cls, seen)
        with pytest.raises(ValueError, match="equal or greater than 1"):
            model._set_ddp_runtime_logging_sample_rate(0)


def test_sample_rate(ranks):
    ranks(2).run(_check_sample_rate)
