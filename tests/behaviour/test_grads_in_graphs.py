"""A graph of the script keeps ``param.grad``: its backward uses the same values, or raises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slow_ddp as ref
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

VIEWS = {"gradient_as_bucket_view": True}
ARGUMENTS = {
    "default": {},
    "view": VIEWS,
    "static-view": {**VIEWS, "static_graph": True},
    "unused-view": {**VIEWS, "find_unused_parameters": True},
    "batched-view": {**VIEWS, "batched_grad_copy": True},
    "lazy-view": {**VIEWS, "lazy_bucket_allocation": True},
}


def _step(model: nn.Module, number: int) -> None:
    model.zero_grad(set_to_none=True)
    ref.seed(number)
    ref.loss_of(model(ref.data())).backward()


def _graphs(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per param: a leaf, its product with ``param.grad``, and the gradient of the leaf."""
    for param in model.parameters():
        assert param.grad is not None
        leaf = torch.ones_like(param).requires_grad_()
        yield leaf, (leaf * param.grad).sum(), param.grad.clone()


def _num_errors(graphs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
    """Runs the backward of each graph. Each raises, or gives the gradient of its leaf."""
    num_errors = 0
    for leaf, product, expected in graphs:
        try:
            product.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            num_errors += 1
        else:
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0)
    return num_errors


def _check(mode: str) -> None:
    arguments = ARGUMENTS[mode]
    model = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=ref.SMALL_CAP, **arguments)
    for number in range(3):  # a rebuild of the buckets is among these steps
        _step(model, number)
    graphs = list(_graphs(model))
    assert _num_errors(graphs) == 0  # at once
    graphs = list(_graphs(model))
    _step(model, 3)
    num_errors = _num_errors(graphs)
    # Memory of a lazy bucket is new in each step.
    overwrites = "gradient_as_bucket_view" in arguments and mode != "lazy-view"
    assert num_errors == (len(graphs) if overwrites else 0)


@pytest.mark.parametrize("mode", ARGUMENTS)
def test_backward_after_the_next_step(ranks, mode):
    ref.on_ranks(ranks, 2, _check, mode)


def _check_ddp() -> None:
    model = DistributedDataParallel(ref.build_same(ref.Net), **VIEWS)
    for number in range(3):
        _step(model, number)
    graphs = list(_graphs(model))
    _step(model, 3)
    assert _num_errors(graphs) == len(graphs)


def test_ddp_raises_too(ranks):
    ref.on_ranks(ranks, 2, _check_ddp)


def _check_same_backward(mode: str) -> None:
    """The next backward of the wrapper contains the graphs."""
    model = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=ref.SMALL_CAP, **ARGUMENTS[mode])
    for number in range(3):
        _step(model, number)
    graphs = list(_graphs(model))
    model.zero_grad(set_to_none=True)
    ref.seed(3)
    loss = ref.loss_of(model(ref.data()))
    try:
        # The engine runs nodes that were made later first.
        (sum(product for _, product, _ in graphs) + loss).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        for leaf, _, expected in graphs:
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ARGUMENTS)
def test_graph_within_the_next_backward(ranks, mode):
    ref.on_ranks(ranks, 2, _check_same_backward, mode)


def _check_manual() -> None:
    """A graph from before ``finalize_backward()`` has local gradients."""
    model = ReducerDDP(ref.build_same(ref.Net), bucket_cap_mb=ref.SMALL_CAP, **VIEWS)
    model.require_manual_backward_finalization = True
    for number in range(3):
        _step(model, number)
        graphs = list(_graphs(model))
        model.finalize_backward()
        assert _num_errors(graphs) == len(graphs)


def test_graph_before_finalize_backward(ranks):
    ref.on_ranks(ranks, 2, _check_manual)
