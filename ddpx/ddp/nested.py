"""Walks through the nested inputs and outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in its tuples, lists and dicts moved to ``device``.

    Containers are copied; tensors that are there already, and objects of other types, are passed on
    as they are. Lists and tuples of a class of their own become plain ones, as in DDP.
    """
    return _convert(value, lambda tensor: tensor.to(device))


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """As :func:`to_device`, with every floating-point tensor cast to ``dtype``."""
    return _convert(value, lambda t: t.to(dtype) if t.data.is_floating_point() else t)


def _convert(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):  # the latter is a namedtuple, too
        return convert(value)
    if isinstance(value, tuple):
        items = [_convert(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_convert(item, convert) for item in value]
    if isinstance(value, dict):
        converted = copy.copy(value)  # of the same class, whatever its constructor takes
        for key, item in value.items():
            converted[key] = _convert(item, convert)
        return converted
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the tuples, lists, mappings and dataclasses of ``value``, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen: set[int] = set()  # a container may contain itself
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if isinstance(item, (list, tuple)):
            children = list(item)
        elif isinstance(item, Mapping):
            children = list(item.values())
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            children = [getattr(item, field.name) for field in dataclasses.fields(item)]
        else:
            continue
        if id(item) not in seen:
            seen.add(id(item))
            stack.extend(reversed(children))
