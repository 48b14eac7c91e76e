"""Composer (mosaicml)."""

from __future__ import annotations

from foreign.environments import Package
from foreign.suites.trainers import suite_of_package

# pip would also try to build old versions that have no wheel.
SUITE = suite_of_package("composer", Package("mosaicml", ">=0.32"))
