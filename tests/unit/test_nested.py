"""Traversal of nested inputs and outputs."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pack_sequence

from ddpx.ddp.user_module.nested import tensors_in, to_device

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


def test_tensors_in():
    a, b, c, d = (torch.ones(1) * i for i in range(4))
    value = {"x": [a, (b, "text")], "y": Output(c, [d]), "z": None, "type": Output}
    assert [tensor.item() for tensor in tensors_in(value)] == [0, 1, 2, 3]


def test_to_device_keeps_containers_and_other_objects():
    other = object()
    value = OrderedDict(x=Pair(torch.ones(2), [torch.ones(3)]), y=(other, 5, "text"))
    moved = to_device(value, torch.device("meta"))
    assert isinstance(moved, OrderedDict)
    assert isinstance(moved["x"], Pair)
    assert moved["x"].left.is_meta
    assert moved["x"].right[0].is_meta
    assert moved["y"] == (other, 5, "text")


class Sized(list):
    def __init__(self, first: object, second: object) -> None:
        super().__init__([first, second])


def test_to_device_of_unusual_containers():
    """As in DDP: other mappings are passed on, other lists become plain lists."""
    chain = ChainMap({"x": torch.ones(1)})
    moved = to_device([chain, Sized(torch.ones(1), 2)], torch.device("meta"))
    assert moved[0] is chain
    assert type(moved[1]) is list
    assert moved[1][0].is_meta
    by_default = to_device(defaultdict(list, x=torch.ones(1)), torch.device("meta"))
    assert by_default["x"].is_meta
    assert by_default["y"] == []


def test_tensors_in_a_container_that_contains_itself():
    endless: list[object] = [torch.ones(1)]
    endless.append(endless)
    assert len(list(tensors_in(endless))) == 1


def test_to_device_moves_packed_sequences():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device([packed], torch.device("cpu"))[0].data.device.type == "cpu"
