"""Whole training steps in graphs: the bits of eager steps."""

from __future__ import annotations

from collections.abc import Iterator

import graph_cases as cases
import pytest
import torch
from device_ranks import on_nccl

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def _fixed_order_of_sums() -> Iterator[None]:
    """Ranks inherit these settings, with which cuBLAS and NCCL always sum in the same order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setenv("NCCL_ALGO", "Ring")
        patch.setenv("NCCL_PROTO", "Simple")
        yield


def _check(per_rank: list[cases.States], with_bare: bool = True) -> None:
    for eager, replayed, bare in per_rank:
        torch.testing.assert_close(replayed, eager, rtol=0, atol=0)
        torch.testing.assert_close(replayed, per_rank[0][1], rtol=0, atol=0)
        if with_bare:
            torch.testing.assert_close(replayed, bare, rtol=1e-3, atol=1e-4)


@on_nccl(1, 2)
@pytest.mark.parametrize("name", cases.CASES)
def test_replays_have_the_bits_of_eager_steps(device_ranks, device, world_size, name):
    if device == "late" and name in cases.NOT_ON_LATE:
        pytest.skip("the late device has neither autocast nor fused optimizers")
    ranks = device_ranks(device, world_size)
    _check(ranks.run(cases.trained, device, name), name not in cases.NOT_BARE)


@on_nccl()
@pytest.mark.parametrize("mode", ["default", "view", "static view"])
def test_a_module_that_was_graphed_before_wrapping(device_ranks, device, world_size, mode):
    ranks = device_ranks(device, world_size)
    _check(ranks.run(cases.trained_with_graphed_module, **cases.CASES[mode].options))
