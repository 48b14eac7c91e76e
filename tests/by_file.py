"""How files of tests are spread over workers of pytest-xdist. Imported by its hook alone."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Files of many cases that share little, with which one worker would still be busy when the others
# are done.
SPREAD = (
    "tests/faults/test_faults.py",
    "tests/parity/test_parity.py",
    "tests/robustness/test_bindings_fuzz.py",
)


class ByFile(LoadFileScheduling):
    """A file is one worker's, so that its ranks live on from test to test. Of those in ``SPREAD``
    a worker's share is what has the first two params in common: a fault in one phase, as many ranks
    over one transport, one seed."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "-".join(nodeid.split("-")[:2]) if file in SPREAD else file
