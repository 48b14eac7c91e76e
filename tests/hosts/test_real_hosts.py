"""Trainings on hosts that are lost, cut off, frozen or slow: every loss is reported, nothing else.

The matrix is in host_cases.py. Cases run several at a time, so a test may wait for its case.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_hosts import CannotEmulate
from host_cases import Case, all_cases
from host_checks import check
from host_runs import Runs

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    selected = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in selected if hasattr(item, "callspec")]
    with Runs(cases) as runs:
        yield runs


def _param(case: Case) -> object:
    marks = []
    if not case.in_default_run:
        marks.append(pytest.mark.full_only)
    return pytest.param(case, id=str(case), marks=marks)


def _check(runs: Runs, case: Case) -> None:
    try:
        outcome = runs.outcome(case)
    except CannotEmulate as reason:
        pytest.skip(f"hosts cannot be emulated here: {reason}")
    check(outcome)


def _cases(harmful: bool) -> pytest.MarkDecorator:
    cases = [case for case in all_cases() if (case.trouble.report_limit_s is not None) == harmful]
    return pytest.mark.parametrize("case", [_param(case) for case in cases])


@_cases(harmful=True)
def test_losses_are_reported(runs: Runs, case: Case) -> None:
    _check(runs, case)


@_cases(harmful=False)
def test_training_goes_on(runs: Runs, case: Case) -> None:
    _check(runs, case)
