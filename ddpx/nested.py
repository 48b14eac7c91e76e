"""Walks through the nested inputs and outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """A copy of ``value`` with every tensor in its tuples, lists and dicts moved to ``device``.

    Tensors that are there already, and objects of other types, are passed on as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, PackedSequence):  # a namedtuple with a `to` of its own
        return value.to(device)  # type: ignore[arg-type]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        return type(value)((key, to_device(item, device)) for key, item in value.items())  # type: ignore[call-arg]
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the tuples, lists, dicts and dataclasses of ``value``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
