"""Facts about the build of the extension, and a check that the extension fits this system."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ddpx.version import refusal_of, release_of

_FILE = Path(__file__).with_name("build.json")  # written by setup.py


@dataclass(frozen=True)
class BuildFacts:
    """Facts about the build of the extension.

    Attributes:
        torch: The version of torch that the extension was compiled for.
        compiler: The name and the version of the compiler.
        date: The time of the build, in UTC.
    """

    torch: str
    compiler: str
    date: str


def build_facts() -> BuildFacts | None:
    """Returns the facts. None if another tool than setup.py built the extension."""
    if not _FILE.exists():
        return None
    return BuildFacts(**json.loads(_FILE.read_text()))


def check_build() -> None:
    """Checks that the extension fits this system. Called before the extension is loaded.

    The command ``ddpx`` prints the error in one line, and exits with 2.

    Raises:
        ImportError: The system is not Linux, torch is older than the supported versions, the
            extension was not built, or the extension was built for another torch.
    """
    error = _misfit()
    if error is None:
        return
    if Path(sys.argv[0]).name == "ddpx" or sys.orig_argv[1:3] == ["-m", "ddpx"]:
        print(f"ddpx: {error}", file=sys.stderr)
        sys.exit(2)
    raise error


def _misfit() -> ImportError | None:
    if not sys.platform.startswith("linux"):
        return ImportError(f"ddpx runs on Linux only, but this system is {sys.platform}.")
    if refusal := refusal_of(torch.__version__):
        return ImportError(refusal)
    if not _FILE.with_name(f"_C{EXTENSION_SUFFIXES[0]}").exists():
        return ImportError(
            "the C++ extension of ddpx has not been built for this Python. In a checkout, run: "
            "make build. Elsewhere, install ddpx again: pip install --no-build-isolation PATH"
        )
    facts = build_facts()
    # Libraries that differ only in the patch level are compatible.
    if facts is not None and release_of(facts.torch) != release_of(torch.__version__):
        return ImportError(
            f"ddpx was built for torch {facts.torch}, but torch {torch.__version__} is installed. "
            f"Install torch {facts.torch.split('+')[0]}, or build ddpx again. In a checkout, run: "
            "make clean build. Elsewhere, run: pip install --no-build-isolation --force-reinstall "
            "--no-deps PATH"
        )
    return None
