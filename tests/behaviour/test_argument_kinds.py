"""Arguments as configuration files and libraries give them: None, and numbers of other types."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pytest
import torch
from ddp_arguments import ddp_takes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import compare_with_ddp

FLAGS = (
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "broadcast_buffers",
    "forward_sync_buffers",
)
TRUTHS = (None, 0, 1, 0.0, np.bool_(True), np.bool_(False), np.int64(1), torch.tensor(True))
CAPS = (np.int64(25), np.float32(0.5), torch.tensor(1), decimal.Decimal("0.5"), True, 0, -1, 10**6)
OTHERS: tuple[dict[str, Any], ...] = (
    {"bucket_cap_mb": None},
    {"bucket_cap_mb_list": None},
    {"bucket_cap_mb_list": []},
    {"bucket_cap_mb_list": (1, 2)},
    {"bucket_cap_mb_list": [np.int64(1), torch.tensor(2)]},
    {"device_ids": []},
    {"device_ids": ()},
    {"output_device": 0},
    {"output_device": None},
    {"device_ids": [], "output_device": ""},
    {"dim": np.int64(0)},
    {"dim": None},
    {"process_group": None, "device_mesh": None},
    {"mixed_precision": None},
)
ACCEPTED: tuple[dict[str, Any], ...] = (
    *({flag: value} for flag in FLAGS for value in TRUTHS),
    *({"bucket_cap_mb": cap} for cap in CAPS),
    *OTHERS,
)


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))


def _step(model: nn.Module, number: int) -> None:
    model(torch.randn(6, 64)).square().mean().backward()


def _is_comparable(options: dict[str, Any]) -> bool:
    """Whether DDP of the installed torch takes these options in the sense of a newer DDP."""
    if not ddp_takes(options):
        return False
    if ddp_takes(["forward_sync_buffers"]):
        return True
    try:
        DistributedDataParallel(_build(), **options)
    except AssertionError:
        return False  # for some kinds of bucket_cap_mb_list
    return options != {"broadcast_buffers": None}  # see docs/divergences.md


def _check_accepted() -> None:
    for options in filter(_is_comparable, ACCEPTED):
        comparison = compare_with_ddp(_build, _step, num_steps=3, **options)
        assert comparison.identical, (options, comparison.differences[:2])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_ddp_accepts_is_accepted(ranks):
    ranks(2).run(_check_accepted)


REFUSED: dict[str, tuple[Any, ...]] = {
    **{flag: ("False", [True], torch.ones(2), np.ones(2), object()) for flag in FLAGS},
    "bucket_cap_mb": (math.inf, -math.inf, math.nan, "25", torch.ones(2), [25], 1j),
    "bucket_cap_mb_list": (25, "25", [math.inf], ["25"], [1, -1], [[1]], 0.5),
    "device_ids": (0, "0", torch.device("cpu"), [0], [None], ["cpu"], np.array([1])),
    "output_device": (1, "cpu", torch.device("cpu")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_values_are_named(ranks, name):
    ranks(1).run(_check_refused, name)


def _check_refused(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises((TypeError, ValueError), match=name):
            ReducerDDP(_build(), **{name: value})
