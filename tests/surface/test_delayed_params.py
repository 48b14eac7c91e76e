"""``delay_all_reduce_named_params``: params are averaged together after another param's
gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import MODES_OF_DDPX as MODES
from torch import nn

from ddpx import ReducerDDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])

    def forward(self, x: torch.Tensor, num_layers: int = 5) -> torch.Tensor:
        for layer in self.layers[:num_layers]:
            x = torch.tanh(layer(x))
        return x


# name -> (delayed layers, layer whose weight they wait for)
CASES = {
    "late layers wait for the first": ([3, 4], 0),
    "a middle layer waits for the last": ([2], 4),
    "the trigger is one of them": ([1, 2], 1),
    "all of them": ([0, 1, 2, 3, 4], 0),
}


def _delayed(net: Net, layers: list[int], trigger: int) -> dict[str, Any]:
    names = {f"layers.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    return {
        "delay_all_reduce_named_params": [(n, p) for n, p in net.named_parameters() if n in names],
        "param_to_hook_all_reduce": net.layers[trigger].weight,
    }


def _check(case: str, mode: str) -> None:
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    model = ReducerDDP(net, bucket_cap_mb=0.0005, **_delayed(net, *CASES[case]), **MODES[mode])
    assert model._delay_all_reduce_all_params == (case == "all of them")
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(3, 8)
        model.zero_grad()
        plain.zero_grad()
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        for (name, param), twin in zip(net.named_parameters(), plain.parameters(), strict=True):
            dist.all_reduce(twin.grad)
            torch.testing.assert_close(
                param.grad, twin.grad / dist.get_world_size(), rtol=1e-5, atol=1e-7, msg=name
            )
    layers, trigger = CASES[case]
    names = [name for name, _ in net.named_parameters()]
    delayed = {names.index(f"layers.{i}.{kind}") for i in layers for kind in ("weight", "bias")}
    buckets = [set(bucket) for bucket in model.reducer.plan.buckets]
    assert delayed in buckets  # one bucket with only these params, whatever the cap
    if trigger not in layers:
        gate_bucket = next(
            i for i, b in enumerate(buckets) if names.index(f"layers.{trigger}.weight") in b
        )
        assert buckets.index(delayed) == gate_bucket + 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_delayed_params_are_averaged_in_a_bucket_of_their_own(ranks, case, mode):
    ranks(2).run(_check, case, mode)


def _check_launch_order() -> None:
    """The delayed bucket is full long before its launch."""
    net = Net()
    order: list[set[int]] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        order.append({id(param) for param in bucket.parameters()})
        arrived.append(net.layers[0].weight.grad is not None)
        return (
            dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

    model = ReducerDDP(net, bucket_cap_mb=0.0001, **_delayed(net, [4], 0))
    model.register_comm_hook(None, hook)
    for _ in range(3):
        order.clear()
        arrived: list[bool] = []
        model.zero_grad(set_to_none=True)
        model(torch.randn(2, 8)).sum().backward()
    last_layer = {id(param) for param in net.layers[4].parameters()}
    assert arrived[order.index(last_layer)] and not arrived[0]


def test_they_leave_when_the_hooked_param_has_its_gradient(ranks):
    ranks(2).run(_check_launch_order)


def _check_unused() -> None:
    net = Net()
    model = ReducerDDP(net, **_delayed(net, [3, 4], 0))
    for num_layers in (5, 3, 4 if dist.get_rank() == 0 else 3):
        model.zero_grad()
        model(torch.randn(2, 8), num_layers).sum().backward()
        for param in net.parameters():
            others = [torch.zeros_like(param) for _ in range(2)]
            dist.all_gather(others, param.grad)
            assert torch.equal(others[0], others[1])
    assert net.layers[3].weight.grad.abs().sum() > 0  # rank 0 used the layer
    assert net.layers[4].weight.grad.abs().sum() == 0


def test_delayed_params_may_be_unused(ranks):
    ranks(2).run(_check_unused)
