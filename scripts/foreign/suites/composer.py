"""Composer (mosaicml)."""

from __future__ import annotations

from foreign.environments import Package
from foreign.suites.trainers import suite_of_package

SUITE = suite_of_package("composer", Package("mosaicml"))
