"""Python runs this module at its start, in processes that tests start.

An import of torch makes a million objects that live to the end. The garbage collector would look
through them during the import, in later collections, and at the end of the process: a quarter of
the CPU time of a short script.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.enable()
        # Not after torch._dynamo, which DDP imports: the script has objects by then.
        if module.__name__ == "torch":
            gc.freeze()


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("torch", "torch._dynamo"):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


# Ranks that multiprocessing starts have the collections of plain processes: tests measure memory
# there, and one import serves many ranks.
if not any("multiprocessing" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, _Finder)
