"""``_set_sparse_metadata``: sparse gradients are summed as dense blocks of known rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_thread_gloo import one_thread_group
from torch import nn

from ddpx import ReducerDDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3, sparse=True)
        self.other = nn.Embedding(5, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids) * self.other(ids % 5))


IDS = [[1, 3, 3, 7], [7, 1, 2, 0], [9, 9, 9, 3]]  # row numbers by rank


def _check_sums() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with_rows, without = (ReducerDDP(Net(), process_group=one_thread_group()) for _ in range(2))
    without.module.load_state_dict(with_rows.module.state_dict())
    for step in range(3):
        ids = torch.tensor(IDS[(rank + step) % world_size])
        everyone = torch.tensor(IDS[:world_size]).flatten()
        with_rows._set_sparse_metadata({"embedding.weight": everyone})
        for model in (with_rows, without):
            model.zero_grad()
            model(ids).square().sum().backward()
        rows = with_rows.module.embedding.weight.grad
        assert rows.is_sparse and rows.is_coalesced()
        assert rows.indices()[0].tolist() == sorted(set(everyone.tolist()))
        for ours, plain in zip(
            with_rows.module.parameters(), without.module.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad.to_dense(), plain.grad.to_dense())


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_those_without_rows(ranks, world_size):
    ranks(world_size).run(_check_sums)


def _check_rows_of_several_calls() -> None:
    model = ReducerDDP(Net())
    model._set_sparse_metadata({"embedding.weight": torch.tensor([1, 3])})
    model._set_sparse_metadata({"other.weight": torch.tensor([1, 2, 3])})
    for each in (model, copy.deepcopy(model)):
        each.zero_grad()
        each(torch.tensor([1])).sum().backward()
        found = [
            layer.weight.grad.indices()[0].tolist()
            for layer in (each.module.embedding, each.module.other)
        ]
        assert found == [[1, 3], [1, 2, 3]]


def test_rows_of_several_calls_are_kept_in_a_copy(ranks):
    ranks(2).run(_check_rows_of_several_calls)


def _check_rows_set_within_a_step() -> None:
    rank = dist.get_rank()
    model = ReducerDDP(Net(), process_group=one_thread_group())
    first, second = torch.tensor([1, 3, 7, 2, 0]), torch.tensor([4, 5])
    model._set_sparse_metadata({"embedding.weight": first})
    handle = model.module.head.weight.register_hook(  # the head's gradient arrives first
        lambda _: model._set_sparse_metadata({"embedding.weight": second})
    )
    model(torch.tensor(IDS[rank])).sum().backward()
    rows = model.module.embedding.weight.grad
    assert rows.indices()[0].tolist() == sorted(first.tolist())
    assert rows.to_dense()[7].count_nonzero() == 3  # the row has contributions of both ranks
    handle.remove()
    model.zero_grad()
    model(second).sum().backward()
    assert model.module.embedding.weight.grad.indices()[0].tolist() == [4, 5]


def test_rows_that_are_set_within_a_step_are_for_the_next(ranks):
    ranks(2).run(_check_rows_set_within_a_step)


def _check_impossible_rows() -> None:
    model = ReducerDDP(Net(), process_group=one_thread_group())
    for rows in ([-7, 1, 2], [1, 2, 10], [1, 2**40]):
        with pytest.raises(
            RuntimeError, match=r"row index (-7|10|\d{13}) of parameter 'embedding.weight' is"
        ):
            model._set_sparse_metadata({"embedding.weight": torch.tensor(rows)})
    index = [name for name, _ in model.module.named_parameters()].index("embedding.weight")
    for rows in ([2, 1], [1, 1]):
        with pytest.raises(
            RuntimeError,
            match=r"row index 1 of .* the row does not exist, or the index is not greater",
        ):
            model.reducer.set_sparse_rows({index: torch.tensor(rows)})
    model(torch.tensor([2, 3])).sum().backward()
    assert model.module.embedding.weight.grad.to_dense()[2:4].count_nonzero() == 6


def test_rows_that_the_parameter_does_not_have_are_errors(ranks):
    """torch would write to any address that the rows give."""
    ranks(2).run(_check_impossible_rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"head.weight": torch.tensor([0])},
        {"other.weight": [0]},
        {"other.weight": torch.tensor([99])},
    ],
)
def test_one_wrong_entry_changes_no_rows(ranks, wrong):
    ranks(2).run(_check_one_wrong_entry, wrong)


def _check_one_wrong_entry(wrong: dict[str, Any]) -> None:
    model = ReducerDDP(Net(), process_group=one_thread_group())
    before = torch.tensor([1, 2])
    model._set_sparse_metadata({"embedding.weight": before})
    with pytest.raises((ValueError, AttributeError, RuntimeError)):
        model._set_sparse_metadata({"embedding.weight": torch.tensor([3]), **wrong})
    (rows,) = model.reducer.settings.sparse_rows.values()
    assert rows.equal(before)
    model(before).sum().backward()
    assert model.module.embedding.weight.grad.indices()[0].tolist() == [1, 2]


def _check_stray_row() -> None:
    model = ReducerDDP(Net(), process_group=one_thread_group())
    model._set_sparse_metadata({"embedding.weight": torch.tensor([1, 2, 3])})
    ids = torch.tensor([1, 8] if dist.get_rank() == 0 else [1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"embedding.weight.*row 8.*_set_sparse_metadata"):
            model(ids).sum().backward()
    else:
        model(ids).sum().backward()
    model.zero_grad()
    model(torch.tensor([2, 3])).sum().backward()
    grad = model.module.embedding.weight.grad
    assert grad.indices()[0].tolist() == [1, 2, 3]


def test_a_row_that_was_not_named_is_an_error_on_its_rank(ranks):
    ranks(2).run(_check_stray_row)
