"""NVRx (nvidia-resiliency-ext): its in-process restart wraps a model again after a fault."""

from __future__ import annotations

from foreign.environments import Package
from foreign.suites.trainers import suite_of_package

SUITE = suite_of_package("nvrx", Package("nvidia-resiliency-ext"))
