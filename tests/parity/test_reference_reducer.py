"""Compares the reference reducer of docs/internals.md with torch's DDP, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import CAPS, CASES_BY_NAME, MODES, Comparison, compare_wrapper
from parity_models import Branches, Mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.testing import compare_traces, record_training
from ddpx.testing.compare import summarize

SCRIPTS = Path(__file__).resolve().parents[2] / "docs" / "internals"
# at the end of the path, since scripts there have the names of common modules
sys.path.append(str(SCRIPTS))

from reference_reducer import ReferenceDDP  # noqa: E402

REFERENCE_MODES = ("default", "find unused")  # the reference has neither views nor a static graph
CASES = (
    "MLP",
    "tied embeddings",
    "accumulation with no_sync",
    "sync every second step",
    "kept gradients",
    "unused per rank and step",
    "unused per rank",
    "unused per rank, kept gradients",
    "unused in some micro-batches",
)


def compare_all(mode: str) -> dict[str, Comparison]:
    """Runs on every rank: all cases that the mode supports, with all caps."""
    return {
        f"{case_name}, {caps_name}": comparison
        for case_name in CASES
        if mode in CASES_BY_NAME[case_name].modes
        for caps_name, comparison in compare_wrapper(ReferenceDDP, case_name, mode).items()
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full_only), 3])
@pytest.mark.parametrize("mode", REFERENCE_MODES)
def test_bits_match(ranks, world_size, mode):
    per_rank = ranks(world_size).run(compare_all, mode, timeout=50)
    num_cases = sum(mode in CASES_BY_NAME[name].modes for name in CASES)
    assert len(per_rank[0]) == num_cases * len(CAPS) >= 5 * len(CAPS)
    for name in per_rank[0]:
        total = summarize([comparisons[name] for comparisons in per_rank])
        assert total.num_tensors > 0
        assert total.identical, f"{name}:\n" + "\n".join(total.differences[:20])


def test_length():
    """The file has at most 150 lines, as docs/internals.md says."""
    assert len((SCRIPTS / "reference_reducer.py").read_text().splitlines()) <= 150


def use_branch_in_no_sync_only(model: nn.Module, number: int) -> None:
    with model.no_sync():
        model(torch.randn(6, 24), True).square().mean().backward()
    model(torch.randn(6, 24), False).square().mean().backward()


def compare_use_in_no_sync() -> Comparison:
    traces = [
        record_training(
            Branches,
            lambda module, wrapper=wrapper: wrapper(module, find_unused_parameters=True),
            use_branch_in_no_sync_only,
        )
        for wrapper in (DistributedDataParallel, ReferenceDDP)
    ]
    return compare_traces(*traces)


def test_param_used_in_no_sync_only_is_averaged(ranks):
    for comparison in ranks(2).run(compare_use_in_no_sync, timeout=30):
        comparison.raise_if_different()


def plans(mode: str) -> list[tuple[Any, Any]]:
    """Runs on every rank: the plans of the reference and of ReducerDDP in three steps.

    ReducerDDP rebuilds in forward, as DDP does, so plans are read after the forward.
    """
    pairs = []
    for caps in CAPS.values():
        reference = ReferenceDDP(Mlp(), **MODES[mode], **caps)
        ours = ReducerDDP(Mlp(), **MODES[mode], **caps)
        for _ in range(3):
            losses = [model(torch.randn(6, 24)).sum() for model in (reference, ours)]
            pairs.append((reference.plan, ours.reducer.plan.buckets))
            for loss in losses:
                loss.backward()
    return pairs


@pytest.mark.parametrize("mode", REFERENCE_MODES)
def test_plans_are_those_of_reducer_ddp(ranks, mode):
    for pairs in ranks(2).run(plans, mode, timeout=30):
        for reference, ours in pairs:
            assert reference == ours


class CountingDDP(ReferenceDDP):
    """Counts the buckets that were launched before the end of backward."""

    def _on_backward_end(self) -> None:
        self.num_launched_early = len(self.works)
        super()._on_backward_end()


def num_launched_early() -> tuple[int, int]:
    model = CountingDDP(Branches(), bucket_cap_mb=0.001, find_unused_parameters=True)
    model(torch.randn(6, 24), dist.get_rank() == 0).sum().backward()
    return model.num_launched_early, len(model.plan)


def test_unreached_params_hold_up_no_bucket(ranks):
    for num_early, num_buckets in ranks(2).run(num_launched_early, timeout=30):
        assert num_early == num_buckets > 1


def error_and_grads() -> tuple[str, list[torch.Tensor | None]]:
    model = ReferenceDDP(Branches())
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(6, 24), dist.get_rank() == 0).sum().backward()
    return str(caught.value), [param.grad for param in model.params]


def test_missing_gradient_raises_on_its_rank_and_leaves_ranks_equal(ranks):
    (left_error, left), (right_error, right) = ranks(2).run(error_and_grads, timeout=30)
    assert left_error.endswith("[4, 5, 6, 7]")
    assert right_error.endswith("[2, 3, 4, 5]")
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
