"""torch's tests of DDP under remote procedure calls (RPC) and distributed autograd."""

from __future__ import annotations

from foreign import pytest_runs
from foreign.environments import Environment, Package
from foreign.reasons import REASONS
from foreign.suite import Outcomes, Suite

_FILE = "foreign_rpc_tests.py"
_LIMIT_S = 240.0  # a test starts up to six processes, each of which imports torch


def _run(environment: Environment, contestant: str) -> Outcomes:
    found = pytest_runs.run(
        environment,
        contestant,
        environment.site_packages,
        [_FILE],
        _LIMIT_S,
        {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        ["--override-ini", "python_files=*.py"],
    )
    return {name.removeprefix("foreign_rpc_tests::"): outcome for name, outcome in found.items()}


SUITE = Suite(
    "torch-rpc",
    (Package("expecttest"),),
    _run,
    REASONS.get("torch-rpc", {}),
)
