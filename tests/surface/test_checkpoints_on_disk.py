"""State dicts of the wrapper, saved plainly and by torch.distributed.checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from both_wrappers import WRAPPERS, Mlp, Wrapper, assert_same_on_all_ranks, mlp_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP


class _Nested(nn.Module):
    """Has a child named like the wrapper's attribute, and a buffer that is the same on all
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Mlp()
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x * self.scale)


def _trained(cls: Any, seed: int = 0, build: Any = _Nested) -> tuple[Wrapper, Any]:
    torch.manual_seed(seed)
    model = cls(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(2):
        torch.manual_seed(seed + 10 * number + dist.get_rank())
        optimizer.zero_grad()
        mlp_step(model)
        optimizer.step()
    return model, optimizer


def _shared_directory() -> Path:
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths, 0)
    return Path(paths[0])


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts and lists into one dict."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flat(item, f"{prefix}/{key}").items()}


def _assert_equal(ours: Any, theirs: Any) -> None:
    mine, other = _flat(ours), _flat(theirs)
    assert list(mine) == list(other)
    for name, value in mine.items():
        same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
        assert same, name


def _check_same_as_ddp(full: bool) -> None:
    """The same keys in the same order, without the wrapper's prefix, and the same values."""
    options = StateDictOptions(full_state_dict=full)
    (ddp, ddp_optimizer), (ours, our_optimizer) = (_trained(cls) for cls in WRAPPERS)
    assert list(ours.state_dict()) == list(ddp.state_dict())
    _assert_equal(ours.state_dict(), ddp.state_dict())
    _assert_equal(our_optimizer.state_dict(), ddp_optimizer.state_dict())
    mine = get_state_dict(ours, our_optimizer, options=options)
    other = get_state_dict(ddp, ddp_optimizer, options=options)
    assert "module.first.weight" in mine[0] or (full and dist.get_rank() > 0)
    assert not any(name.startswith("module.module") for name in mine[0])
    for left, right in zip(mine, other, strict=True):
        _assert_equal(left, right)
    _assert_equal(
        get_model_state_dict(ours, options=options), get_model_state_dict(ddp, options=options)
    )
    _assert_equal(
        get_optimizer_state_dict(ours, our_optimizer, options=options),
        get_optimizer_state_dict(ddp, ddp_optimizer, options=options),
    )


@pytest.mark.wrapper_only
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_state_dicts_are_those_of_ddp(ranks, full):
    ranks(2).run(_check_same_as_ddp, full)


def _check_through_disk(saver: Any, loader: Any) -> None:
    """A checkpoint of one wrapper is loaded into another wrapper, or into the bare module.

    Training continues alike.
    """
    directory = _shared_directory()
    model, optimizer = _trained(saver)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=directory)

    torch.manual_seed(99)
    other = _Nested() if loader is None else loader(_Nested())
    its_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    state = dict(zip(("model", "optim"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    if loader is None:
        _assert_equal(other.state_dict(), model.module.state_dict())
        return
    _assert_equal(other.state_dict(), model.state_dict())
    for each, its in ((model, optimizer), (other, its_optimizer)):
        torch.manual_seed(7 + dist.get_rank())
        its.zero_grad()
        mlp_step(each)
        its.step()
    _assert_equal(other.state_dict(), model.state_dict())
    assert_same_on_all_ranks(*other.parameters())


@pytest.mark.parametrize("loader", [ReducerDDP, DistributedDataParallel, None])
@pytest.mark.parametrize("saver", [ReducerDDP, DistributedDataParallel])
def test_through_disk(ranks, saver, loader):
    ranks(2).run(_check_through_disk, saver, loader)


def _check_plain_file() -> None:
    """``torch.save`` of a state dict. Both classes load it from rank 0's path, strictly."""
    directory = _shared_directory()
    model, _ = _trained(ReducerDDP)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), directory / "model.pt")
    dist.barrier()
    state = torch.load(directory / "model.pt")
    for cls in WRAPPERS:
        torch.manual_seed(99)
        other = cls(_Nested())
        result = other.load_state_dict(state)
        assert not result.missing_keys and not result.unexpected_keys
        _assert_equal(other.state_dict(), model.state_dict())
    bare = _Nested()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare.load_state_dict(state)
    _assert_equal(bare.state_dict(), model.module.state_dict())


def test_plain_file(ranks):
    ranks(2).run(_check_plain_file)


def _check_isinstance() -> None:
    """The isinstance checks of torch.distributed.checkpoint and of trainers."""
    model, _ = _trained(ReducerDDP)
    assert isinstance(model, DistributedDataParallel)
    assert isinstance(model, nn.Module)
    assert not isinstance(model.module, DistributedDataParallel)
    assert DistributedDataParallel not in type(model).__mro__


def test_isinstance_holds_without_inheriting(ranks):
    ranks(2).run(_check_isinstance)


def _check_compiled() -> None:
    """torch.compile's prefix is removed, too, whichever of the two wrappers is outside."""
    names = {}
    for cls in WRAPPERS:
        torch.manual_seed(0)
        inside = cls(torch.compile(Mlp(), backend="eager"))
        outside = torch.compile(cls(Mlp()), backend="eager")
        names[cls] = [list(get_model_state_dict(model)) for model in (inside, outside)]
    theirs, ours = names.values()
    assert ours == theirs == [list(Mlp().state_dict())] * 2


@pytest.mark.wrapper_only
def test_prefix_of_compiled_modules(ranks):
    ranks(2).run(_check_compiled)
