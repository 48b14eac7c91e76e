"""The search of test_random_programs.py with other programs, for 20 minutes."""

from __future__ import annotations

import pytest
from drawing import TimedSearch
from program_judge import Judge
from random_programs import programs

SECONDS = 20 * 60
FIRST_SEED = 10_000  # test_random_programs.py uses the first seeds


@pytest.mark.full_only
@pytest.mark.timeout(SECONDS + 400)
def test_many_programs(judge: Judge) -> None:
    search = TimedSearch(SECONDS, FIRST_SEED)
    search.run(programs(), judge.check)
    print(f"{search.num_examples} programs")
