"""What a suite of another project is, and how its outcomes with both classes are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from outcomes import Outcome
from verdicts import Line

from foreign.environments import Environment, Package

Outcomes = Mapping[str, Outcome]  # by test: "file::name", or "script"
CLASSES = ("torch", "ddpx")


@dataclass(frozen=True)
class Suite:
    """A suite of tests or scripts.

    Attributes:
        name: The name on the command line and in docs/compatibility.md.
        packages: The packages that its environment has. None: the tests run in .venv.
        run: Runs all tests with one class, "torch" or "ddpx".
        reasons: The reason of each intended difference, by test.
    """

    name: str
    packages: tuple[Package, ...] | None
    run: Callable[[Environment, str], Outcomes]
    reasons: Mapping[str, str]


def compare(torch: Outcomes, ddpx: Outcomes, reasons: Mapping[str, str]) -> list[Line]:
    """The outcomes of each test with both classes, in the order of the tests.

    A test that has an outcome with one class only has failed with the other class.
    """
    missing = Outcome("crash", "the test did not run")
    names = [*torch, *(name for name in ddpx if name not in torch)]
    return [
        Line(
            name,
            torch.get(name, missing),
            _same_weights(torch.get(name, missing), ddpx.get(name, missing)),
            name in reasons,
        )
        for name in names
    ]


def _same_weights(torch: Outcome, ddpx: Outcome) -> Outcome:
    """A run with ddpx that ends with other weights than with torch's class has failed."""
    if torch.status == ddpx.status == "pass" and torch.weights != ddpx.weights:
        return replace(ddpx, status="fail", reason="other final weights than with torch's class")
    return ddpx
