"""Copies of a module without the hooks of ``ddpx.replicate``: by copy, pickle and torch.save."""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from ddpx.ddp.fronts.forward_hooks import Hook

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_num_modules: Counter[type] = Counter()  # with hooks, by class


def make_copies_plain(module: nn.Module) -> None:
    """Makes copies of ``module`` leave out the hooks, as long as the module lives.

    A class that pickles or copies its modules in another way keeps its way. Such a copy has hooks
    without effect.
    """
    cls = type(module)
    if copyreg.dispatch_table.get(cls, _reduce) is not _reduce:
        return
    copyreg.pickle(cls, _reduce)
    _num_modules[cls] += 1
    weakref.finalize(module, _forget, cls).atexit = False


def _forget(cls: type) -> None:
    _num_modules[cls] -= 1
    if _num_modules[cls] == 0:
        del _num_modules[cls]
        copyreg.dispatch_table.pop(cls, None)


def _reduce(module: nn.Module) -> str | tuple[Any, ...]:
    reduced = module.__reduce_ex__(4)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    return (*reduced[:2], _without_hooks(reduced[2]), *reduced[3:])


def _without_hooks(state: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(state)
    for name in _HOOKS:
        for key, hook in state.get(name, {}).items():
            if isinstance(hook, Hook):
                _leave_out(plain, name, key)
    return plain


def _leave_out(state: dict[str, Any], name: str, key: int) -> None:
    """Leaves a hook out of dicts such as ``_forward_hooks`` and ``_forward_hooks_with_kwargs``."""
    for attribute in [each for each in state if each.startswith(name)]:
        kept = [(other, value) for other, value in state[attribute].items() if other != key]
        state[attribute] = OrderedDict(kept)
