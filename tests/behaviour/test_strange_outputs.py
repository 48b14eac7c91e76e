"""Outputs of any kind: forward returns them unchanged, computes nothing in them, never raises."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddpx import ReducerDDP
from ddpx.ddp.user_module.nested import tensors_in


@dataclasses.dataclass
class _Unset:
    y: torch.Tensor
    extra: Any = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class _Slots:
    y: torch.Tensor
    extra: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class _RaisingProperty:
    y: torch.Tensor
    _cache: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "_cache":
            raise RuntimeError("not available during training")
        return super().__getattribute__(name)


@dataclasses.dataclass
class _Endless:
    """Each access makes a new object."""

    y: torch.Tensor
    next: Any = None

    def __getattribute__(self, name: str) -> Any:
        return _Endless(self.y) if name == "next" else super().__getattribute__(name)


class _Raising:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class _RaisingClass:
    """As unbound proxies of some libraries."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


class _Lazy(Mapping):
    """Computes a value when it is read."""

    num_reads = 0

    def __init__(self, makers: dict[str, Callable[[], Any]]) -> None:
        self.makers = makers

    def __getitem__(self, key: str) -> Any:
        type(self).num_reads += 1
        return self.makers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.makers)

    def __len__(self) -> int:
        return len(self.makers)


class _RaisingValues(dict):
    def values(self) -> Any:
        raise NotImplementedError("use items()")


class _RaisingList(list):
    def __iter__(self) -> Any:
        raise NotImplementedError("use an index")


class _RaisingTuple(tuple):
    def __iter__(self) -> Any:
        raise NotImplementedError("use an index")


class _NoHash(type):
    """Classes that cannot be hashed."""

    def __eq__(cls, other: object) -> bool:
        raise NotImplementedError("cannot compare")


class _Unhashable(metaclass=_NoHash):
    pass


class _RaisingTensor(torch.Tensor):
    """A tensor that only its own library may use."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not for others")


class _Output(collections.OrderedDict):
    """As of transformers: the constructor takes other arguments."""

    def __init__(self, *, y: torch.Tensor) -> None:
        super().__init__(y=y)


Pair = collections.namedtuple("Pair", "y z")


def _cycle(y: torch.Tensor) -> Any:
    outer: dict[str, Any] = {"y": y}
    outer["self"] = [outer]
    return outer


def _deep(y: torch.Tensor) -> Any:
    nested: Any = y
    for _ in range(5000):
        nested = [nested]
    return nested


def _of_future(y: torch.Tensor) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(y)
    return future


# Whether the walk over the outputs finds the tensor in them.
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "unset field": (_Unset, True),
    "slots": (_Slots, True),
    "raising property": (_RaisingProperty, True),
    "endless property": (_Endless, True),
    "raising attributes": (_Raising, False),
    "raising class": (_RaisingClass, False),
    "lazy mapping": (lambda y: _Lazy({"y": lambda: y, "bad": lambda: 1 / 0}), False),
    "user dict": (lambda y: collections.UserDict(y=y), True),
    "chain map": (lambda y: collections.ChainMap({}, {"y": y}), True),
    "mapping proxy": (lambda y: types.MappingProxyType({"y": y}), True),
    "proxy of a lazy mapping": (
        lambda y: types.MappingProxyType(_Lazy({"y": lambda: y, "bad": lambda: 1 / 0})),
        False,
    ),
    "raising values": (lambda y: _RaisingValues(y=y), True),
    "raising list": (lambda y: _RaisingList([y]), True),
    "raising tuple": (lambda y: _RaisingTuple([y]), True),
    "unhashable class": (lambda y: [_Unhashable(), y], True),
    "cycle": (_cycle, True),
    "deep": (_deep, True),
    "generator": (lambda y: (each for each in [y]), False),
    "named tuple": (lambda y: Pair(y, [y.detach(), {"k": y}]), True),
    "None": (lambda y: None, False),
    "module": (lambda y: nn.Linear(1, 1), False),
    "future": (_of_future, False),
    "ordered dict": (lambda y: _Output(y=y), True),
    "tensor as a key": (lambda y: {y: 1, "x": {1, 2}}, False),
    "class": (lambda y: {"y": y, "c": _Unset, "f": dataclasses.field}, True),
    "raising tensor": (lambda y: [y, y.as_subclass(_RaisingTensor)], True),
    "many leaves": (lambda y: [y, *range(100_000)], True),
}

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "mixed precision": {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_walk_over_outputs(kind):
    y = torch.ones(1, requires_grad=True) * 1
    make, is_found = KINDS[kind]
    reads = _Lazy.num_reads
    assert [each is y for each in tensors_in(make(y))][:1] == ([True] if is_found else [])
    assert _Lazy.num_reads == reads


class _Net(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.make = make
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        self.kept = (y, self.make(y))
        return self.kept[1]


def _check_averages(mode: str) -> None:
    for kind, (make, _) in KINDS.items():
        model = ReducerDDP(_Net(make), **MODES[mode])
        for number in range(3):
            model.zero_grad()
            x = torch.full((3, 4), 1.0 + dist.get_rank() + number)
            reads = _Lazy.num_reads
            output = model(x)
            y, made = model.module.kept
            assert output is made, kind
            assert _Lazy.num_reads == reads
            y.sum().backward()
            mean = 3 * (number + (dist.get_world_size() + 1) / 2)
            assert torch.equal(model.module.layer.weight.grad, torch.full((2, 4), mean)), kind


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_averaged(ranks, mode):
    ranks(2).run(_check_averages, mode)


def _check_replaced_layer() -> None:
    """The check of layers meets the same outputs."""
    model = ReducerDDP(_Net(KINDS["raising tensor"][0]))
    model.module.layer = nn.Linear(4, 2)
    model(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="2 new parameters: layer"):
        model.module.kept[0].sum().backward()


def test_replaced_layer_is_named(ranks):
    ranks(2).run(_check_replaced_layer)
