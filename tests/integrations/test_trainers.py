"""Trainer libraries that call DDP, run under ``ddpx``: the same bits as with torch's DDP.

The versions are in requirements.lock.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli_process import assert_code, run

SCRIPTS = Path(__file__).parent / "scripts"
# A rank takes seconds to import a trainer library, and a command launches up to four times.
pytestmark = pytest.mark.timeout(300)


def _needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make setup` installs it")
    if library == "mmengine":
        # At its first import, yapf writes a file in the user's cache. Ranks that import mmengine,
        # and so yapf, at the same time may read a part of that file.
        importlib.import_module("yapf")


@pytest.mark.parametrize(
    ("library", "script", "compared"),
    [
        pytest.param(
            *("lightning", "lightning_gan.py", "128 gradients, 16 losses"),
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            *("accelerate", "accelerate_trigger.py", "64 gradients, 16 losses"),
            marks=pytest.mark.full_only,
        ),
        pytest.param(
            *("mmengine", "mmengine_accumulate.py", "96 gradients, 24 losses"),
            marks=pytest.mark.full_only,
        ),
    ],
)
def test_same_bits_as_ddp(library, script, compared):
    """Compares the gradients of each backward, including local ones."""
    _needs(library)
    done = run("parity", script, cwd=SCRIPTS)
    assert_code(done, 0)
    assert compared in done.stdout and done.stdout.endswith("Identical.\n")


def test_mmengine_averages_once_for_several_micro_steps():
    """mmengine runs forward inside no_sync and backward outside."""
    _needs("mmengine")
    done = run("run", "mmengine_accumulate.py", cwd=SCRIPTS)
    assert_code(done, 0)
    assert done.stdout.count("averaged 4 times") == 2, done.stdout
