"""Conversion of nested inputs, and iteration over the tensors of nested outputs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ddpx.comm import transforms


def to_device(value: Any, device: torch.device) -> Any:
    """Moves every tensor in the tuples, lists and dicts of ``value`` to ``device``.

    Containers are copied. Tensors on the device, and objects of other types, are not copied. A
    subclass of list or tuple becomes a plain list or tuple, as in DDP.
    """
    return _convert(value, lambda tensor: tensor.to(device))


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Casts every floating-point tensor in ``value`` to ``dtype``, as :func:`to_device` moves.

    Tensors in dataclasses are cast, too, as in DDP.
    """
    return _convert(value, lambda t: t.to(dtype) if _is_floating_point(t) else t, True)


def _is_floating_point(value: torch.Tensor | PackedSequence) -> bool:
    # A PackedSequence has no method for this. A tensor within vmap has no `data`.
    tensor = value.data if isinstance(value, PackedSequence) else value
    return tensor.is_floating_point()


def _convert(value: Any, convert: Callable[[Any], Any], in_dataclasses: bool = False) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):  # a PackedSequence is a namedtuple, too
        return convert(value)
    if isinstance(value, tuple):
        items = [_convert(item, convert, in_dataclasses) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_convert(item, convert, in_dataclasses) for item in value]
    if isinstance(value, dict):
        try:
            converted = copy.copy(value)  # keeps the class, whatever its constructor takes
        except Exception:  # of the class
            converted = {}
        for key, item in value.items():
            converted[key] = _convert(item, convert, in_dataclasses)
        return converted
    fields = getattr(type(value), "__dataclass_fields__", ()) if in_dataclasses else ()
    if fields:
        changed = copy.copy(value)
        for name, item in _attributes(value, type(value)).items():
            if name in fields:
                object.__setattr__(changed, name, _convert(item, convert, in_dataclasses))
        return changed
    return value


# The types of most items that are no tensors and have none, by id(): a class may have no hash.
_LEAVES = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes)))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in the tuples, lists, mappings and dataclasses of ``value``, in order.

    The walk runs no code of these objects. A lazy mapping computes nothing, and nothing raises.
    Within a transform of torch.func, the tensors are those that a later backward reaches.
    """
    found = _walk(value)
    return transforms.in_graph(found) if transforms.active() else found


def _walk(value: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()  # a container may contain itself
    stack = [iter((value,))]
    while stack:
        for item in stack[-1]:
            kind = type(item)
            if issubclass(kind, torch.Tensor):
                yield item
            elif id(kind) not in _LEAVES and id(item) not in seen:
                try:
                    children = _children(item, kind)
                except Exception:  # of a metaclass
                    continue
                if children:
                    seen.add(id(item))
                    stack.append(iter(children))
                    break
        else:
            stack.pop()


def _children(item: Any, kind: type) -> Sequence[Any]:
    if kind is list or kind is tuple:
        return item
    if issubclass(kind, list):
        return [*list.__iter__(item)]
    if issubclass(kind, tuple):
        return [*tuple.__iter__(item)]
    if issubclass(kind, dict):
        return [*dict.values(item)]
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is not None:
        attributes = _attributes(item, kind)
        return [attributes[name] for name in fields if name in attributes]
    if kind is MappingProxyType:
        return gc.get_referents(item)  # the mapping, without a call of its methods
    if issubclass(kind, Mapping):
        return [*_attributes(item, kind).values()]
    return []


def _attributes(item: Any, kind: type) -> dict[str, Any]:
    """The values in the slots and in the ``__dict__`` of ``item``, without properties."""
    found = {}
    for cls in kind.__mro__:
        members = cls.__dict__
        for name, slot in members.items() if members.get("__slots__") else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # never set
                    found[name] = slot.__get__(item)
    if kind.__dictoffset__:
        found.update(object.__getattribute__(item, "__dict__"))
    return found
