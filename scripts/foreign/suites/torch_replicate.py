"""torch's tests of ``torch.distributed._composable.replicate``, which no wheel of torch has.

The suite runs if the file is in build/foreign. Without the file, its one outcome is a skip.
"""

from __future__ import annotations

from outcomes import Outcome

from foreign import pytest_runs
from foreign.environments import Environment, Package
from foreign.reasons import REASONS
from foreign.suite import Outcomes, Suite

_FILE = "test_replicate.py"
_SOURCE = f"test/distributed/_composable/{_FILE} of torch's repository"
_LIMIT_S = 240.0


def _run(environment: Environment, contestant: str) -> Outcomes:
    folder = environment.folder.parent
    if not (folder / _FILE).exists():
        return {"test_replicate": Outcome("skip", f"needs {_SOURCE}")}
    return pytest_runs.run(environment, contestant, folder, [_FILE], _LIMIT_S)


SUITE = Suite(
    "torch-replicate",
    (Package("expecttest"),),
    _run,
    REASONS.get("torch-replicate", {}),
)
