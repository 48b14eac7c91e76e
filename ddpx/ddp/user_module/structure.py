"""Detects layers and parameters that were replaced after wrapping."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from ddpx import errors
from ddpx.ddp.user_module.module_ref import ModuleRef
from ddpx.params.dtensors import params_under_fsdp
from ddpx.params.managed import ManagedParam


class Structure:
    """The submodules and parameters of a module, by identity.

    Every forward runs the check, which is one pass in C over the dicts of all submodules. Other
    containers, such as those of TorchScript, have ``items()``, which nn.Module needs.
    """

    def __init__(
        self, reference: ModuleRef, ignored: Collection[str], managed: Sequence[ManagedParam]
    ) -> None:
        self._module = reference
        module = reference()
        self._ignored = ignored
        self._known = {id(param) for _, param in module.named_parameters()}
        # A copy of a wrapper averages the params of the module that the script has assigned.
        self._known.update(id(param.tensor) for param in managed)
        self.remember(module)

    def remember(self, module: nn.Module) -> None:
        """Takes the present submodules and parameters as those that :meth:`unchanged` expects.

        Args:
            module: The module that runs. A script may assign another one to ``wrapper.module``.
        """
        self._remembered = weakref.ref(module)
        self._dicts: list[dict[str, Any]] = []
        self._others: list[Any] = []
        for submodule in module.modules():
            for container in (submodule._parameters, submodule._modules):
                (self._dicts if isinstance(container, dict) else self._others).append(container)
        self._expected = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._expected_of_others = self._contents_of_others()

    def remembers(self, module: nn.Module) -> bool:
        """Whether ``module`` was the last argument of :meth:`remember`."""
        return self._remembered() is module

    def unchanged(self, module: nn.Module) -> bool:
        """Whether ``module`` has the submodules and parameters of :meth:`remember`."""
        if not self.remembers(module):
            return False
        if sum(map(len, self._dicts)) != len(self._expected):
            return False
        if not all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._expected)):
            return False
        if not self._others:
            return True
        contents, expected = self._contents_of_others(), self._expected_of_others
        return len(contents) == len(expected) and all(map(is_, contents, expected))

    def _contents_of_others(self) -> list[object]:
        return [value for container in self._others for _, value in container.items()]

    def all_replaced(self, module: nn.Module) -> bool:
        """Whether ``module`` has other tensors in the places of all trained parameters.

        ``torch.func.functional_call`` puts them there for the time of a forward.
        """
        return not any(
            id(param) in self._known and param.requires_grad and name not in self._ignored
            for name, param in module.named_parameters()
        )

    def replaced(self, module: nn.Module) -> list[str]:
        """Names of parameters that are new since construction, and would not be averaged."""
        return [
            name
            for name, param in module.named_parameters()
            if isinstance(param, nn.Parameter)
            and param.requires_grad
            and id(param) not in self._known
            and name not in self._ignored
        ]

    def refuse_backward(
        self, module: nn.Module, replaced: Sequence[str], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Makes a backward through ``outputs`` raise, if parameters are still replaced then.

        ``torch.func.functional_call`` replaces parameters for the time of a forward only.

        Raises:
            RuntimeError: None of ``outputs`` requires a gradient, so that no backward can be
                refused. A module that a script has assigned to ``wrapper.module`` may be used
                without a backward, to evaluate.
        """

        def check(_: torch.Tensor) -> None:
            if self.replaced(module):
                raise self._params_replaced(module, replaced)

        # Attributes of a tensor of a subclass may raise.
        with torch._C.DisableTorchFunctionSubclass():
            watched = [tensor for tensor in outputs if tensor.requires_grad]
            if not watched and module is self._module():
                raise self._params_replaced(module, replaced)
            for tensor in watched:
                tensor.register_hook(check)

    def _params_replaced(self, module: nn.Module, names: Sequence[str]) -> RuntimeError:
        kind, again = "replicated", "call ddpx.replicate(model, ...) again"
        if self._module.keeps:
            kind, again = "wrapped", "wrap the module again: model = ReducerDDP(model.module, ...)"
        gradients = "Its gradient" if len(names) == 1 else "Their gradients"
        if not set(params_under_fsdp(module)).isdisjoint(names):
            return RuntimeError(
                f"FSDP has taken the parameters of a {kind} module: {', '.join(names)}. FSDP "
                "averages gradients itself. Use FSDP alone, with a mesh of two dimensions to "
                "shard over one of them and replicate over the other."
            )
        return RuntimeError(
            f"the {kind} module now has {errors.count_names(names, 'new parameter')}. {gradients} "
            f"would not be averaged. Replace layers before construction, or {again}."
        )
