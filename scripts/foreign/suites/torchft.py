"""torchft: its wheel has its tests. Its DDP averages over replicas of a job."""

from __future__ import annotations

from foreign import pytest_runs
from foreign.environments import Environment, Package
from foreign.reasons import REASONS
from foreign.suite import Outcomes, Suite

_FILES = (
    "ddp_test.py",
    "process_group_test.py",
    "manager_integ_test.py",
    "local_sgd_test.py",
    "manager_test.py",
)
_LIMIT_S = 120.0


def _run(environment: Environment, contestant: str) -> Outcomes:
    folder = environment.site_packages / "torchft"
    return pytest_runs.run(environment, contestant, folder, _FILES, _LIMIT_S)


SUITE = Suite(
    "torchft",
    (Package("torchft-nightly", needs=("parameterized",)),),
    _run,
    REASONS.get("torchft", {}),
)
