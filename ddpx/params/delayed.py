"""``delay_all_reduce_named_params``: the all-reduce of some parameters waits for a trigger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ddpx.params.managed import ManagedParam


class DelayedParams:
    """The two arguments of DDP, after checks.

    Attributes:
        named_params: Names and parameters whose all-reduce is delayed. None: no parameter.
        trigger: The parameter whose gradient starts the delayed all-reduce.

    Raises:
        ValueError: One of the two arguments is given without the other.
        TypeError: ``named_params`` has no pairs of a name and a parameter.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        trigger: nn.Parameter | None = None,
    ) -> None:
        if (named_params is None) != (trigger is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
                "same time. Pass both, or leave both out."
            )
        self.named_params = None if named_params is None else _pairs(named_params)
        self.trigger = trigger

    @property
    def is_used(self) -> bool:
        """Whether the arguments were given."""
        return self.trigger is not None

    def mark(self, managed: Sequence[ManagedParam]) -> tuple[list[ManagedParam], int | None]:
        """Marks the delayed parameters.

        Returns:
            The parameters, and the index of the trigger. None: no parameter is delayed.

        Raises:
            ValueError: A delayed parameter, or the trigger, is not in ``managed``.
        """
        marked = list(managed)
        if not self.named_params or self.trigger is None:
            return marked, None
        index_of = {id(param.tensor): index for index, param in enumerate(managed)}
        for name, param in self.named_params:
            if id(param) not in index_of:
                raise ValueError(
                    f"delay_all_reduce_named_params names {name!r}, but the module has no "
                    "parameter of this name that requires a gradient. Pass (name, param) pairs of "
                    "module.named_parameters()."
                )
            index = index_of[id(param)]
            marked[index] = replace(marked[index], delayed=True)
        if id(self.trigger) not in index_of:
            raise ValueError(
                "param_to_hook_all_reduce is not a parameter of the module that requires a "
                "gradient. The gradient of this parameter must start the delayed all-reduce. Pass "
                "one of module.parameters() that requires a gradient."
            )
        return marked, index_of[id(self.trigger)]

    def describe(self, module: nn.Module) -> dict[str, object]:
        """The two arguments by name, to be compared between ranks."""
        names = {param: name for name, param in module.named_parameters()}
        return {
            "delay_all_reduce_named_params": [name for name, _ in self.named_params or ()],
            "param_to_hook_all_reduce": None if self.trigger is None else names.get(self.trigger),
        }


def _pairs(named_params: object) -> list[tuple[str, nn.Parameter]]:
    if not isinstance(named_params, Iterable):
        raise _no_pairs(named_params)
    pairs = list(named_params)  # an iterator can be read only once
    for pair in pairs:
        if not (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise _no_pairs(pair)
    return pairs


def _no_pairs(got: object) -> TypeError:
    kind = type(got).__name__
    if isinstance(got, (tuple, list)):
        kind = f"a {kind} of ({', '.join(type(each).__name__ for each in got)})"
    return TypeError(
        "delay_all_reduce_named_params must be a list of pairs of a name and a parameter, but got "
        f"{kind}. Pass (name, param) pairs of module.named_parameters()."
    )
