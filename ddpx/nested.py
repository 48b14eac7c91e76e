"""Walks through the nested inputs and outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in its tuples, lists and dicts moved to ``device``.

    Containers are copied; tensors that are there already, and objects of other types, are passed on
    as they are. Lists and tuples of a class of their own become plain ones, as in DDP.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PackedSequence):  # a namedtuple with a `to` of its own
        return value.to(device)  # type: ignore[arg-type]
    if isinstance(value, tuple):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if isinstance(value, dict):
        moved = copy.copy(value)  # of the same class, whatever its constructor takes
        for key, item in value.items():
            moved[key] = to_device(item, device)
        return moved
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
