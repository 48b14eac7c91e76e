"""Runs at the start of each Python process in the environment of a suite.

With FOREIGN_CLASS=ddpx, ReducerDDP takes the place of DDP as soon as torch is imported, also in
processes that a test starts. With FOREIGN_CLASS=torch, DDP stays. Each process appends the names of
the classes that it constructs to the file FOREIGN_LOG.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_CLASS = os.environ.get("FOREIGN_CLASS", "")


def _count(cls: type[Any], name: str) -> None:
    """Logs each construction of ``cls`` or of a derived class."""
    init = cls.__init__

    @functools.wraps(init)
    def counted(self: object, *args: Any, **kwargs: Any) -> None:
        log = os.open(os.environ["FOREIGN_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{name}\n".encode())  # one small write, so lines of processes do not mix
        os.close(log)
        init(self, *args, **kwargs)

    cls.__init__ = counted


def _replace_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    _count(DistributedDataParallel, "torch")
    if _CLASS == "ddpx":
        import ddpx
        from ddpx.ddp.fronts.forward_hooks import HookFront

        _count(ddpx.ReducerDDP, "ddpx")
        _count(HookFront, "ddpx")  # of ddpx.replicate()
        ddpx.patch_ddp(replicate=True)


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _replace_ddp()


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "torch" else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if _CLASS:
    sys.meta_path.insert(0, _Finder)
