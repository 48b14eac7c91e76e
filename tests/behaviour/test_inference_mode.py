"""``torch.inference_mode()`` around parts of a training gives the bits of a training without it.

A gradient that the wrapper makes is a normal tensor, which the script may change outside that mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddpx
from ddpx import ReducerDDP

# Each has the parts of its steps that run in inference mode.
PLANS = {
    "construction": ("construction",),
    "each backward": ("", "backward", "backward", "backward"),
    "some backwards": ("construction", "backward", "", "backward", ""),
    "end of backward": ("", "end", "", "backward and end"),
    "evaluation first": ("", "evaluation", "", "evaluation", "backward"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "skip": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "lazy": {"lazy_bucket_allocation": True},
    "batched": {"batched_grad_copy": True},
    "float64 sums": {"reduce_dtype": torch.float64},
    "weights": {"average": "weights"},
    "sum": {"average": "sum"},
    "manual": {},
    "hook": {},
    "view, hook": {"gradient_as_bucket_view": True},
    "check finite": {},
    "kept gradients": {},
    "local steps": {},
}


def _mean_by_hand(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # The result is not the tensor of the bucket.
    return allreduce_hook(group, bucket).then(lambda future: future.value() * 1.0)


def _train(name: str, plan: tuple[str, ...]) -> list[torch.Tensor]:
    def context(*parts: str) -> AbstractContextManager[Any]:
        return torch.inference_mode() if part in parts else nullcontext()

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    part = plan[0]
    with context("construction"):
        model = ReducerDDP(module, bucket_cap_mb=0.0001, **OPTIONS[name])
        if "hook" in name:
            model.register_comm_hook(None, _mean_by_hand)
    if name == "manual":
        ddpx.set_manual_finalization(model)
    if name == "check finite":
        ddpx.set_check_finite(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    found = []
    for step, part in enumerate((*plan[1:], "")):
        x = torch.randn(5, 4)
        if part == "evaluation":
            module.eval()
            with torch.inference_mode():
                model(x)
            module.train()
            continue
        if name != "kept gradients":
            optimizer.zero_grad(set_to_none=name in ("sum", "weights"))
        if name == "weights":
            ddpx.set_weight(model, 1.0 + dist.get_rank())
        with model.no_sync() if name == "local steps" and step % 2 else nullcontext():
            loss = model(x).square().mean()
            with context("backward", "backward and end"):
                loss.backward()
        with context("end", "backward and end"):
            if name == "manual":
                model.finalize_backward()
        found += [param.grad.clone() for param in module.parameters()]
        optimizer.step()
    return [*found, *module.state_dict().values()]


def _check(name: str, plan: tuple[str, ...]) -> None:
    without = tuple("evaluation" if part == "evaluation" else "" for part in plan)
    expected = _train(name, without)
    assert all(tensor.isfinite().all() for tensor in expected)
    for theirs, own in zip(expected, _train(name, plan), strict=True):
        assert torch.equal(theirs, own)
        own += 1  # raises for an inference tensor


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIONS)
def test_inference_mode(ranks, name, plan):
    ranks(2).run(_check, name, PLANS[plan])
