"""A rank of ``ddpx run``. The arguments are the script and its arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.multiprocessing.spawn import ProcessException

from ddpx.cli import errors
from ddpx.cli.observe import HeldGroups, on_replicate, on_wrap
from ddpx.cli.script import Script
from ddpx.integrations.patch import patch_ddp


def main(words: Sequence[str]) -> None:
    """Runs the script with ReducerDDP in place of DDP."""
    script = Script.from_command(words)
    patch_ddp()
    groups = HeldGroups()
    on_wrap(groups.add)
    on_replicate(groups.add)
    try:
        script.run()
    finally:
        groups.release()
        if not groups.num_wrappers and _may_have_wrapped_elsewhere(sys.exc_info()[1]):
            print(f"ddpx: {errors.nothing_wrapped(script.target)}", file=sys.stderr)


def _may_have_wrapped_elsewhere(error: BaseException | None) -> bool:
    """Whether a script that ends with ``error`` and wrapped no model gets a hint.

    Rank 0 speaks for all ranks if the script succeeded. If a process that the script started has
    failed, a launcher may end rank 0 before rank 0 can speak.
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return os.environ.get("RANK", "0") == "0"
    return isinstance(error, ProcessException)
