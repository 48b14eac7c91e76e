"""Casts of inputs of any kind, as DDP casts them for ``mixed_precision``."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.utils import _cast_forward_inputs

from ddpx.ddp.user_module.nested import to_dtype

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class _Batch:
    x: torch.Tensor
    more: Any = None


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: torch.Tensor


@dataclasses.dataclass(slots=True)
class _Slots:
    x: torch.Tensor


@dataclasses.dataclass
class _Late:
    """A field that the constructor does not take."""

    x: torch.Tensor
    y: Any = dataclasses.field(init=False)


class _Object:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class _NoCopy(dict):
    def __copy__(self) -> Any:
        raise NotImplementedError("cannot be copied")


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "whole numbers": lambda x: x.long(),
    "dataclass": lambda x: _Batch(x, {"y": [x, x.long()]}),
    "frozen dataclass": _Frozen,
    "dataclass with slots": _Slots,
    "nested dataclasses": lambda x: [_Batch(x, _Batch(x))],
    "class": lambda x: (x, _Batch),
    "named tuple": lambda x: Pair(x, [x]),
    "ordered dict": lambda x: collections.OrderedDict(x=x),
    "object": _Object,
    "dict that cannot be copied": lambda x: _NoCopy(x=x),
    "texts": lambda x: (x, "text", None, 1.5),
}


def _dtypes(value: Any) -> Iterator[torch.dtype]:
    if isinstance(value, torch.Tensor):
        yield value.dtype
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _dtypes(each)
    elif isinstance(value, dict):
        yield from _dtypes(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _dtypes([getattr(value, each.name) for each in dataclasses.fields(value)])
    elif isinstance(value, _Object):
        yield value.x.dtype


@pytest.mark.parametrize("name", [name for name in KINDS if name != "class"])
def test_casts_as_ddp(name):
    given = KINDS[name](torch.ones(2))
    theirs = _cast_forward_inputs(torch.bfloat16, given)[0][0]
    ours = to_dtype(given, torch.bfloat16)
    assert list(_dtypes(ours)) == list(_dtypes(theirs))
    assert type(ours) is type(given) or name == "dict that cannot be copied"
    assert list(_dtypes(given)) == list(_dtypes(KINDS[name](torch.ones(2))))  # is unchanged


def test_casts_what_ddp_refuses():
    late = to_dtype(_Late(torch.ones(1)), torch.bfloat16)
    assert late.x.dtype is torch.bfloat16
    assert not hasattr(late, "y")
    tensor, cls = to_dtype(KINDS["class"](torch.ones(1)), torch.bfloat16)
    assert tensor.dtype is torch.bfloat16
    assert cls is _Batch
