"""Libraries that train inside of losses, with adapters, or with gradients of samples."""

from __future__ import annotations

from functools import partial

from foreign.environments import Package
from foreign.reasons import REASONS
from foreign.suite import Suite
from foreign.suites.trainers import run_scripts

_WITH = {
    "with_sentence_transformers": "sentence-transformers",
    "with_trl": "trl",
    "with_opacus": "opacus",
}
_NEEDED_BY_THEM = ("accelerate", "datasets", "peft")

SUITE = Suite(
    "libraries",
    tuple(Package(name) for name in (*_WITH.values(), *_NEEDED_BY_THEM)),
    partial(run_scripts, _WITH),
    REASONS.get("libraries", {}),
)
