"""Random programs of a wrapper give the bits of DDP, or the values of a hand-made average."""

from __future__ import annotations

import pytest
from drawing import ASKED, TimedSearch
from program_judge import Judge
from random_programs import programs

SECONDS = 25


@pytest.mark.timeout(0 if ASKED else SECONDS + 400)
def test_programs(judge: Judge) -> None:
    search = TimedSearch(SECONDS)
    search.run(programs(), judge.check)
    print(f"{search.num_examples} programs")
