"""Builds the extension ``ddpx._C``. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup

if not sys.platform.startswith("linux"):
    sys.exit(f"ddpx runs on Linux only, but this system is {sys.platform}.")

if os.environ.get("DDPX_METADATA_ONLY", "0") == "1":
    # For an editable install whose extension is built separately in place, so that ninja reuses
    # objects.
    setup()
else:
    sys.path.insert(0, str(Path(__file__).parent / "csrc"))
    import extension

    setup(ext_modules=[extension.EXTENSION], cmdclass={"build_ext": extension.Build})
