"""Hooks that run after a synchronized backward, when gradients are averaged."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpx.params import ManagedParam
from ddpx.reducer import Reducer

PostSyncHook = Callable[[torch.Tensor], None]


class PostSync:
    """Post-sync hooks and futures of one wrapper, which owns this object.

    The reducer calls back only after :meth:`register` or :meth:`wait_for`. A step without hooks
    never returns to Python.
    """

    def __init__(self) -> None:
        # A RemovableHandle refers to this dict weakly. A plain dict has no weak references.
        self._hooks: OrderedDict[int, tuple[list[torch.Tensor], PostSyncHook]] = OrderedDict()
        self._futures: list[torch.futures.Future[Any]] = []
        self._after_step: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_after_step": None}  # of this wrapper, not of a copy

    def register(
        self,
        reducer: Reducer,
        managed: Collection[ManagedParam],
        param_or_module: torch.Tensor | nn.Module,
        hook: PostSyncHook,
    ) -> RemovableHandle:
        """Calls ``hook`` for each of the wanted parameters that is in ``managed``.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: None of the wanted parameters is in ``managed``.
        """
        if not callable(hook):
            raise TypeError(
                f"The post-sync hook must be callable, got {type(hook).__name__}. Pass a function "
                "hook(param)."
            )
        wanted = (
            {id(param) for param in param_or_module.parameters()}
            if isinstance(param_or_module, nn.Module)
            else {id(param_or_module)}
        )
        params: list[torch.Tensor] = [p.tensor for p in managed if id(p.tensor) in wanted]
        if not params:
            raise ValueError(
                "register_post_sync_hook() got a parameter that this wrapper does not average, or "
                "a module without such parameters. Pass a parameter of the wrapped module that "
                "requires a gradient, or a submodule with such a parameter."
            )
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = (params, hook)
        self._install(reducer)
        return handle

    def wait_for(self, reducer: Reducer, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Makes the end of the next synchronized backward wait for ``futures``."""
        self._futures.extend(futures)
        self._install(reducer)

    def call_after_steps(self, reducer: Reducer, callback: Callable[[], None] | None) -> None:
        """Calls ``callback`` after each synchronized backward, behind the hooks. None: no more."""
        self._after_step = callback
        if callback is not None:
            self._install(reducer)
        elif not self._hooks and not self._futures:
            reducer.set_after_sync(None)

    def continue_with(self, reducer: Reducer) -> None:
        """Runs the hooks after the backwards of another reducer, in a copy of a wrapper."""
        if self._hooks:
            self._install(reducer)

    def drop_futures(self) -> None:
        """Forgets futures of a step that will not end."""
        self._futures.clear()

    def _install(self, reducer: Reducer) -> None:
        weak = weakref.ref(self)

        def after_sync() -> None:
            post_sync = weak()
            if post_sync is not None:
                post_sync._run()

        reducer.set_after_sync(after_sync)

    def _run(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
        for params, hook in list(self._hooks.values()):
            for param in params:
                hook(param)
        if self._after_step is not None:
            self._after_step()
