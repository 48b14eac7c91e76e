"""The suite fails without any one of the reducer's waits.

Otherwise the late device proves nothing.
"""

from __future__ import annotations

import pytest
import removed_waits

from ddpx.testing import RankFailed

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "number", range(len(removed_waits.PROOFS)), ids=[p.name for p in removed_waits.PROOFS]
)
def test_a_removed_wait_is_noticed(device_ranks, number):
    ranks = device_ranks("late", 2)
    for _, noticed in ranks.run(removed_waits.run, number, remove=False):
        assert noticed == ""
    # A missing wait is a race. On a busy machine the late work may be in time by chance.
    for _ in range(3):
        try:
            answers = ranks.run(removed_waits.run, number, remove=True, timeout=8)
        except RankFailed as failure:
            assert "did not return" in str(failure)  # also detected
            return
        assert any(num_applied for num_applied, _ in answers), "the wait was never made"
        if any(noticed for _, noticed in answers):
            return
    raise AssertionError("nothing noticed that the wait was gone")
