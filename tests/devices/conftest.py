"""Fixtures of the device tests."""

from __future__ import annotations

import pytest
from device_ranks import pools


@pytest.fixture(scope="module")
def on_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPX_FORCE_COMM", "1")  # one rank is to walk the whole path
        yield from pools()
