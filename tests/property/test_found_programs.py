"""Programs that the search has found stay right."""

from __future__ import annotations

import pytest
from found_programs import FOUND
from known import known_faults
from program_judge import Judge
from valid_programs import valid


@pytest.mark.parametrize("name", FOUND)
def test_found_program(judge: Judge, name: str, request: pytest.FixtureRequest) -> None:
    program = FOUND[name]
    assert valid(program) == program
    for reason in known_faults(program):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    judge.check(program)
