"""Parameters that only a backward in no_sync() used, before the graph becomes static."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpx import ReducerDDP


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, data: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(data) + (self.sometimes(data) if both else 0)


def _grads(wrapper, used_on: int, calls_setter: bool) -> list[torch.Tensor]:
    """The gradients of two steps; `sometimes` is used in a local backward of the first one."""
    torch.manual_seed(0)
    model = wrapper(_Branches())
    data = torch.ones(1, 2) * (1 + dist.get_rank())
    with model.no_sync():
        model(data, dist.get_rank() <= used_on).sum().backward()
    if calls_setter:
        model._set_static_graph()
    found = []
    for _ in range(2):
        model(data, False).sum().backward()
        found += [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
    return found


def _check(used_on: int, view: bool) -> None:
    wrap = partial(ReducerDDP, gradient_as_bucket_view=view)
    found = _grads(wrap, used_on, calls_setter=True)
    assert found[0].eq(3).all() and found[1].eq(1.5 if used_on else 0.5).all()
    expected = _grads(partial(wrap, static_graph=True), used_on, calls_setter=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("used_on", [0, 1], ids=["on rank 0", "on both ranks"])
@pytest.mark.parametrize("view", [False, True], ids=["default", "views"])
def test_set_static_graph_after_a_local_backward(ranks, used_on, view):
    """As if the graph had been static from the start. DDP keeps the gradient local, silently."""
    ranks(2).run(_check, used_on, view)


def _check_averaged_use(local: bool) -> None:
    """The gradient of `sometimes` was averaged before the group changed."""
    model = ReducerDDP(_Branches())
    data = torch.ones(1, 2)
    if local:
        with model.no_sync():
            model(data, True).sum().backward()
    model(data, True).sum().backward()
    model._update_process_group(dist.group.WORLD)
    model._set_static_graph()
    model(data, False).sum().backward()
    model.zero_grad()
    model(data, False).sum().backward()
    assert model.module.sometimes.weight.grad is None


@pytest.mark.parametrize("local", [False, True])
def test_an_average_ends_the_local_use(ranks, local):
    """Else an optimizer with weight decay would move a parameter that no step uses."""
    ranks(2).run(_check_averaged_use, local)
