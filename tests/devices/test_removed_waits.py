"""The late device notices each stream wait and record that the reducer leaves out."""

from __future__ import annotations

import pytest
from device_ranks import run_on
from removed_waits import REMOVED, count_wrong


@pytest.mark.parametrize("index", range(len(REMOVED)), ids=[r.function for r in REMOVED])
def test_a_wait_that_is_left_out_is_noticed(on_device, index):
    assert sum(run_on(on_device("late", 2), count_wrong, "late", index)) > 0
