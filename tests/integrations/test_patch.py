"""ddpx.patch_ddp(): who gets which wrapper, and how to undo the replacement."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as ByName

import ddpx

TORCHS = ByName  # the class itself, which a replacement of names does not change


def make() -> type[nn.Module]:
    return type(ByName(nn.Linear(4, 2)))


def _in_a_block() -> None:
    with ddpx.patch_ddp():
        assert make() is ddpx.ReducerDDP
        assert torch.nn.parallel.DistributedDataParallel is ddpx.ReducerDDP
        assert type(TORCHS(nn.Linear(4, 2))) is ddpx.ReducerDDP

        class Derived(ByName):
            pass

        assert isinstance(Derived(nn.Linear(4, 2)), ddpx.ReducerDDP)
    assert make() is TORCHS
    assert torch.nn.parallel.DistributedDataParallel is TORCHS
    assert type(Derived(nn.Linear(4, 2))) is Derived
    model = TORCHS(nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()


def _twice() -> None:
    outer = ddpx.patch_ddp()
    with ddpx.patch_ddp():
        assert make() is ddpx.ReducerDDP
    assert make() is ddpx.ReducerDDP  # neither the block nor its end changed anything
    outer.undo()
    outer.undo()
    assert make() is TORCHS


def _after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), ddpx.patch_ddp():
        1 / 0  # noqa: B018
    assert make() is TORCHS


class TooEarly(TORCHS):
    pass


class Other(TORCHS):
    pass


def _derived_before() -> None:
    with (
        ddpx.patch_ddp(),
        pytest.raises(
            RuntimeError, match=r"TooEarly was derived .* Call ddpx.patch_ddp\(\) before"
        ),
    ):
        TooEarly(nn.Linear(4, 2))
    TooEarly(nn.Linear(4, 2))


def _another_class() -> None:
    with ddpx.patch_ddp(Other):
        assert make() is Other
        with pytest.raises(RuntimeError, match="Other already replaces DistributedDataParallel"):
            ddpx.patch_ddp()
    assert make() is TORCHS


@pytest.mark.parametrize(
    "check", [_in_a_block, _twice, _after_an_error, _derived_before, _another_class]
)
def test_patch_ddp(ranks, check):
    ranks(1).run(check)
