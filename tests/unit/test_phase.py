"""The phase machine as Python sees it. tests/cpp tests every pair of phases."""

from __future__ import annotations

import pytest

from ddpx._C import Phase, transition


def test_legal():
    assert transition(Phase.IDLE, Phase.COLLECTING) == Phase.COLLECTING


def test_illegal_names_both():
    with pytest.raises(RuntimeError, match="from 'outside backward' to 'end of backward'"):
        transition(Phase.IDLE, Phase.FINALIZING)
