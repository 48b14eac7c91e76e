"""Scripts of tests/foreign/scripts: what trainers do with DDP.

The scripts ``as_*.py`` need torch only. They do by hand what a trainer does with a wrapper. The
scripts ``with_*.py`` use the trainer, and run where pip can install it. Final weights are compared
bit for bit.
"""

from __future__ import annotations

from functools import partial

from outcomes import Outcome

from foreign import SCRIPTS, script_runs
from foreign.environments import Environment, Package
from foreign.reasons import REASONS
from foreign.suite import Outcomes, Suite

_LIMIT_S = 180.0


def run_scripts(
    scripts: dict[str, str], environment: Environment, contestant: str
) -> dict[str, Outcome]:
    """Runs scripts on two ranks.

    Args:
        scripts: The name of the package that a script needs, by script. "": only torch.
        environment: The environment.
        contestant: The class, "torch" or "ddpx".
    """
    outcomes = {}
    for name, package in scripts.items():
        if package in environment.missing:
            outcomes[name] = Outcome("skip", f"{package} cannot be installed")
        else:
            words = [str(SCRIPTS / f"{name}.py")]
            outcomes[name] = script_runs.run(environment, contestant, words, _LIMIT_S)
    return outcomes


def _run(environment: Environment, contestant: str) -> Outcomes:
    by_hand = {script.stem: "" for script in sorted(SCRIPTS.glob("as_*.py"))}
    return run_scripts(by_hand | _WITH, environment, contestant)


def suite_of_package(name: str, package: Package) -> Suite:
    """The suite of a trainer with an environment of its own. Its script is ``with_<name>.py``."""
    run = partial(run_scripts, {f"with_{name}": package.name})
    return Suite(name, (package,), run, REASONS.get(name, {}))


_WITH = {
    "with_lightning": "lightning",
    "with_fabric": "lightning",
    "with_transformers": "transformers",
    "with_ignite": "pytorch-ignite",
    "with_mmengine": "mmengine-lite",
}

SUITE = Suite(
    "trainers",
    (*(Package(name) for name in dict.fromkeys(_WITH.values())), Package("accelerate")),
    _run,
    REASONS.get("trainers", {}),
)
