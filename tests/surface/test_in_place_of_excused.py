"""Stricter tests in place of those tests of torch that docs/divergences.md excuses."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both_wrappers import SMALL_CAP, WRAPPERS, Mlp, assert_same_on_all_ranks, mlp_step
from modes import MODES
from torch import nn

from ddpx import ReducerDDP
from ddpx._C import Phase


class _Pair(nn.Module):
    """A model with a part ``b`` that forward may leave out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Linear(dim, dim, bias=False)
        self.b = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, use_b: bool = False) -> torch.Tensor:
        return self.b(self.a(x)) if use_b else self.a(x)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"pair": _Pair(16), "table": nn.Embedding(8, 4)})
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer["pair"](x))


_UNUSED = ["outer.pair.b.weight", "outer.pair.b.bias", "outer.table.weight"]


def _check_nested(ignored: list[str], options: dict[str, Any]) -> None:
    """Each unused param is reported by its full name, in order, without others.

    All others are averaged.
    """
    torch.manual_seed(0)
    module = _Nested()
    twin = copy.deepcopy(module)
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = ReducerDDP(module, **options)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 16)
    expected = [name for name in _UNUSED if name not in ignored]
    for _ in range(3):  # from the first backward on, in each step
        model.zero_grad()
        with pytest.raises(RuntimeError) as caught:
            model(x).square().mean().backward()
        text = str(caught.value)
        names = ", ".join(f"'{name}'" for name in expected)
        assert f"{len(expected)} parameters got no gradient in this backward: {names}. " in text
        assert model._get_ddp_logging_data()["has_error"] == 1
        assert model._get_ddp_logging_data()["error"] == text
        assert model.reducer.phase == Phase.IDLE
    twin(x).square().mean().backward()
    for name, param in module.named_parameters():
        if name in _UNUSED:
            continue
        mean = twin.get_parameter(name).grad * 0.5
        dist.all_reduce(mean)
        assert torch.equal(param.grad, mean), name


@pytest.mark.parametrize("mode", ["default", "view"])
@pytest.mark.parametrize("ignored", [[], ["outer.table.weight"]], ids=["all", "one ignored"])
def test_unused_params_of_nested_modules_are_named(ranks, ignored, mode):
    ranks(2).run(_check_nested, ignored, MODES[mode])


def _check_control_flow(same: bool) -> None:
    """Used-maps equal those of DDP in each step.

    Without find_unused_parameters the backward raises.
    """
    rank = dist.get_rank()
    maps = []
    for cls in WRAPPERS:
        torch.manual_seed(0)
        model = cls(_Pair(16), find_unused_parameters=True)
        seen = []
        for number in range(6):
            model.zero_grad()
            use_b = number % 2 == 1 and (same or rank == 1)
            model(torch.randn(4, 16), use_b).sum().backward()
            seen.append(model.reducer._get_local_used_map().tolist())
        maps.append(seen)
    assert maps[0] == maps[1]
    assert maps[1][:2] == [[2, 0, 0], [2, 2, 2] if same else [2, 1, 1]]

    model = ReducerDDP(_Pair(16))
    for number in range(4):
        model.zero_grad()
        use_b = number % 2 == 1 and (same or rank == 1)
        loss = model(torch.randn(4, 16), use_b).sum()
        if use_b:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match=r"'b\.weight', 'b\.bias'"):
                loss.backward()
        assert_same_on_all_ranks(model.module.a.weight.grad)


@pytest.mark.parametrize("same", [True, False], ids=["same on all ranks", "by rank"])
def test_control_flow(ranks, same):
    ranks(2).run(_check_control_flow, same)


def _check_static_graph(first_with_b: bool) -> None:
    """Both kinds of changes are reported by name, in every step that makes them."""
    model = ReducerDDP(_Pair(16), static_graph=True)
    x = torch.randn(4, 16)
    for _ in range(2):
        model.zero_grad()
        model(x, first_with_b).sum().backward()
    for _ in range(3):
        model.zero_grad()
        with pytest.raises(RuntimeError) as caught:
            model(x, not first_with_b).sum().backward()
        text = str(caught.value)
        assert (
            "Your training graph has changed" in text or "your training graph has changed" in text
        )
        assert "'b.weight'" in text or "'b.bias'" in text
        assert "'a.weight'" not in text
        assert model._get_ddp_logging_data()["error"] == text
        model.zero_grad()
        model(x, first_with_b).sum().backward()  # the unchanged graph still works
        assert_same_on_all_ranks(model.module.a.weight.grad)


@pytest.mark.parametrize("first_with_b", [True, False], ids=["no longer used", "used later"])
def test_changed_static_graph(ranks, first_with_b):
    ranks(2).run(_check_static_graph, first_with_b)


def _events(options: dict[str, Any], num_steps: int) -> tuple[dict[str, int], int]:
    """The number of each event in profiled steps, and the number of buckets."""
    model = ReducerDDP(Mlp(), **options)
    for _ in range(3):  # until the buckets no longer change
        mlp_step(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(num_steps):
            mlp_step(model)
        # gloo's thread records the end of a call after it has released the waiting thread
        time.sleep(1.0)
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts, len(model.reducer.plan.buckets)


def _check_profile(mode: str, transport: str) -> None:
    """One all-reduce per bucket, no broadcast, and no search. Used-maps are not profiled."""
    counts, num_buckets = _events(MODES[mode] | SMALL_CAP | {"transport": transport}, 4)
    assert num_buckets > 1
    name = "gloo:all_reduce" if transport == "group" else "shm:all_reduce"
    assert counts[name] == 4 * num_buckets
    assert not [name for name in counts if "search_unused" in name or "broadcast" in name]


@pytest.mark.parametrize("transport", ["group", "shm"])
@pytest.mark.parametrize("mode", MODES)
def test_profile_shows_only_what_is_needed(ranks, mode, transport):
    ranks(2).run(_check_profile, mode, transport)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


def _check_one_rank_alone() -> None:
    """Evaluation on rank 0 alone does not communicate. A local backward must be requested."""
    model = ReducerDDP(_Normed())
    for _ in range(3):
        mlp_step(model)
    if dist.get_rank() == 0:
        model.module.eval()
        x = torch.randn(4, 16)
        with torch.no_grad():
            model.module(x)
        model.module(x)
        twin = copy.deepcopy(model.module)
        for each in (model, twin):
            each.zero_grad()
        with model.no_sync():
            model.module(x).square().mean().backward()
        twin(x).square().mean().backward()
        for ours, plain in zip(model.module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)
        model.module.train()
    dist.barrier()
    model.zero_grad()
    mlp_step(model)
    assert_same_on_all_ranks(*(param.grad for param in model.parameters()))


def test_one_rank_may_evaluate_alone(ranks):
    ranks(2).run(_check_one_rank_alone)


class _Table(nn.Module):
    """An embedding with sparse gradients that is not an nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, sparse: bool) -> torch.Tensor:
        return self.head(nn.functional.embedding(tokens, self.table, sparse=sparse))


def _check_sparse_error() -> None:
    """The error has the name, without torch's logger. The next step works and keeps the record."""
    model = ReducerDDP(_Table())
    assert "error" not in model._get_ddp_logging_data()
    with pytest.raises(RuntimeError) as caught:
        model(torch.arange(3), True).sum().backward()
    assert "gradient of parameter 'table' is a sparse" in str(caught.value)
    for _ in range(2):
        data = model._get_ddp_logging_data()
        assert (data["has_error"], data["error"]) == (1, str(caught.value))
        model.zero_grad()
        model(torch.arange(3) + dist.get_rank(), False).sum().backward()
        assert_same_on_all_ranks(*(param.grad for param in model.parameters()))


def test_sparse_error_is_logged(ranks):
    ranks(2).run(_check_sparse_error)
