"""A rank of a command: ``python rank.py MODULE ARGUMENTS`` calls ``MODULE.main(ARGUMENTS)``.

This file runs as a script. It imports only the standard library before the module, so that a Ctrl-C
during the import of torch causes no traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import TracebackType


def main() -> None:
    sys.excepthook = _print_error
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()  # as for python -m
    runner = importlib.import_module(sys.argv[1])
    try:
        runner.main(sys.argv[2:])
    except BaseException:
        _begin_tracebacks_with_script()
        raise


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):  # the launcher says "interrupted"
        sys.__excepthook__(kind, error, trace)


def _begin_tracebacks_with_script() -> None:
    """Wraps the hook that is in place now, which may be the hook of the script."""
    from ddpx.frames import is_launcher

    show = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and is_launcher(trace.tb_frame):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = excepthook


if __name__ == "__main__":
    main()
