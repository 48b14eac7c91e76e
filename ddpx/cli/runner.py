"""A rank of ``ddpx run``: ``python -m ddpx.cli.runner [-m] script arguments``."""

from __future__ import annotations

import os
import sys

from torch import nn

from ddpx.cli.observe import HeldGroups, on_wrap
from ddpx.cli.script import Script
from ddpx.integrations.patch import patch_ddp


def main() -> None:
    classes: list[str] = []

    def add_class(wrapper: nn.Module) -> None:
        classes.append(type(wrapper).__name__)

    patch_ddp()
    on_wrap(add_class)
    groups = HeldGroups()
    on_wrap(groups.add)
    try:
        Script.from_command(sys.argv[1:]).run()
    finally:
        groups.release()
    if not classes and os.environ.get("RANK", "0") == "0":
        print(
            "ddpx: the script wrapped no model in DistributedDataParallel. ddpx does not reach "
            "processes that the script starts itself, e.g. with mp.spawn. Use ReducerDDP in such "
            "processes.",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
