"""``ddpx``, with stand-ins for the pictures of timelines where those are not there yet."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

from ddpx.cli import main

for name, function in (("picture", "draw"), ("page", "write")):
    full_name = f"ddpx.timeline.{name}"
    if importlib.util.find_spec(full_name) is None:
        module = types.ModuleType(full_name)
        setattr(module, function, lambda recording, path, *_: Path(path).write_text("stand-in"))
        sys.modules[full_name] = module

if __name__ == "__main__":
    main()
