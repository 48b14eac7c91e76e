"""Conversion of nested inputs, and iteration over the tensors of nested outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """Moves every tensor in the tuples, lists and dicts of ``value`` to ``device``.

    Containers are copied. Tensors on the device, and objects of other types, are not copied. A
    subclass of list or tuple becomes a plain list or tuple, as in DDP.
    """
    return _convert(value, lambda tensor: tensor.to(device))


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Casts every floating-point tensor in ``value`` to ``dtype``, as :func:`to_device` moves."""
    return _convert(value, lambda t: t.to(dtype) if t.data.is_floating_point() else t)


def _convert(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):  # a PackedSequence is a namedtuple, too
        return convert(value)
    if isinstance(value, tuple):
        items = [_convert(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_convert(item, convert) for item in value]
    if isinstance(value, dict):
        converted = copy.copy(value)  # keeps the class, whatever its constructor takes
        for key, item in value.items():
            converted[key] = _convert(item, convert)
        return converted
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in the tuples, lists, mappings and dataclasses of ``value``, in order."""
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
