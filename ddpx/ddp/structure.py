"""Notices that layers or parameters of a module were replaced after wrapping."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn


class Structure:
    """Which submodules and parameters a module consists of, by identity.

    The check runs at every forward: one pass over the dicts of all submodules, in C.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._dicts: list[dict[str, Any]] = []
        for submodule in module.modules():
            self._dicts.append(submodule._parameters)
            self._dicts.append(submodule._modules)
        self._expected = list(chain.from_iterable(d.values() for d in self._dicts))
        self._known = {id(p) for p in module.parameters()}

    def unchanged(self) -> bool:
        """Whether every submodule and parameter is the one that was wrapped."""
        if sum(map(len, self._dicts)) != len(self._expected):
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._expected))

    def has_plain_tensors(self) -> bool:
        """Whether plain tensors stand in the place of parameters: functional_call put them there.

        ``nn.Module`` itself accepts nothing but an ``nn.Parameter`` in such a place.
        """
        current = chain.from_iterable(d.values() for d in self._dicts)
        changed = (
            value for value, old in zip(current, self._expected, strict=False) if value is not old
        )
        return any(
            isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
            for value in changed
        )

    def replaced(self) -> list[str]:
        """Names of parameters that are new since construction and would train unsynchronised."""
        return [
            name
            for name, param in self._module.named_parameters()
            if isinstance(param, nn.Parameter)
            and param.requires_grad
            and id(param) not in self._known
            and name not in self._ignored
        ]
