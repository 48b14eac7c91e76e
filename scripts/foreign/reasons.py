"""The reason of each test that passes with torch's class and not with ReducerDDP, by suite.

A reason tells what a user gains by the difference. The reasons of torch's own tests of DDP are in
docs/divergences.md.
"""

from __future__ import annotations

REASONS: dict[str, dict[str, str]] = {}
