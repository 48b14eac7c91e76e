"""ddpx.patch_ddp(): who gets which wrapper, and how to undo the replacement."""

from __future__ import annotations

import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as ByName

import ddpx

TORCHS = ByName
DDP_ITSELF = (ByName,)  # patch_ddp() replaces names of modules only


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
    assert make() is TORCHS and ddpx.ReducerDDP.__name__ == "ReducerDDP"


def _after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), ddpx.patch_ddp():
        1 / 0  # noqa: B018
    assert make() is TORCHS


class TooEarly(TORCHS):
    pass


class Other(TORCHS):
    num_inits = 0

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        Other.num_inits += 1


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
    this_module = sys.modules[__name__]
    with ddpx.patch_ddp(Other):
        assert make() is Other
        assert type(DDP_ITSELF[0](nn.Linear(4, 2))) is Other
        assert Other.num_inits == 2
        assert pickle.loads(pickle.dumps(Other)) is Other
        with pytest.raises(RuntimeError, match="Other already replaces DistributedDataParallel"):
            ddpx.patch_ddp()
    assert make() is TORCHS
    assert not hasattr(this_module, "DistributedDataParallel")


def _torchs_replicate() -> None:
    """It calls parts of DDP's forward, and therefore keeps DDP."""
    with ddpx.patch_ddp():
        module = replicate(nn.Linear(4, 2))
        module(torch.ones(3, 4)).sum().backward()
        assert type(replicate.state(module)._ddp) is DDP_ITSELF[0]
        assert type(DDP_ITSELF[0](nn.Linear(4, 2))) is ddpx.ReducerDDP


def _changed_meanwhile() -> None:
    user = types.ModuleType("user")
    user.first = user.second = ByName
    sys.modules["user"] = user
    with ddpx.patch_ddp():
        assert user.first is user.second is ddpx.ReducerDDP
        user.first = Other
        del user.second
    assert user.first is Other
    assert not hasattr(user, "second")
    del sys.modules["user"]


@pytest.mark.parametrize(
    "check",
    [
        _in_a_block,
        _twice,
        _after_an_error,
        _derived_before,
        _another_class,
        _torchs_replicate,
        _changed_meanwhile,
    ],
)
def test_patch_ddp(ranks, check):
    ranks(1).run(check)
