"""Assigns test files to the workers of pytest-xdist. Imported only by pytest-xdist's hook."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Files with many independent cases. One worker would run such a file long after the others ended.
SPREAD = (
    "tests/faults/test_faults.py",
    "tests/parity/test_parity.py",
    "tests/robustness/test_bindings_fuzz.py",
)


class ByFile(LoadFileScheduling):
    """Gives each file to one worker, so that ranks live on from test to test.

    Files in ``SPREAD`` are divided further: a worker gets the cases with the same first two params.
    Such cases share a fault in one phase, a number of ranks over one transport, or a seed.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "-".join(nodeid.split("-")[:2]) if file in SPREAD else file
