"""Accelerate: the scripts of its wheel that run on a CPU without a model or a data set of a hub.

``test_distributed_data_loop`` needs GPUs: on a CPU, Accelerate leaves out ``join()``, and ranks
with uneven inputs wait for each other.
"""

from __future__ import annotations

from foreign import script_runs
from foreign.environments import Environment, Package
from foreign.reasons import REASONS
from foreign.suite import Outcomes, Suite

_SCRIPTS = (
    "test_script",
    "test_sync",
    "test_ops",
    "test_ddp_comm_hook",
)
_LIMIT_S = 240.0


def _run(environment: Environment, contestant: str) -> Outcomes:
    folder = environment.site_packages / "accelerate" / "test_utils" / "scripts"
    return {
        name: script_runs.run(
            environment,
            contestant,
            [str(folder / f"{name}.py")],
            _LIMIT_S,
            extra={"ACCELERATE_USE_CPU": "true"},
        )
        for name in _SCRIPTS
    }


SUITE = Suite(
    "accelerate",
    (Package("accelerate"), Package("transformers"), Package("torchdata")),
    _run,
    REASONS.get("accelerate", {}),
)
