"""The part of large matrices that runs without ``--full``."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from device_ranks import NcclRanks
from pairwise import cover

ROOT = Path(__file__).parents[2]
DEVICES = ("late-2", "late-3", *(f"cuda-nccl-{n}" for n in (1, 2, 3, 4)), "cuda-gloo-2")


def test_every_two_values_meet_and_each_number_of_ranks():
    cases = [
        {"mode": mode, "view": view, "world": world}
        for mode, view, world in itertools.product("abc", "xy", (1, 2, 3))
    ]
    chosen = [cases[index] for index in cover(cases, "seed")]
    assert {(c["mode"], c["view"]) for c in chosen} == set(itertools.product("abc", "xy"))
    assert {c["world"] for c in chosen} == {1, 2, 3}
    assert len(chosen) == 6


def test_each_device_has_each_number_of_its_ranks():
    """A case that needs CUDA must not stand for a number of ranks of the late device."""
    assert repr(NcclRanks(2)) != repr(2)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "-o", "testpaths=tests/devices/test_sync_batch_norm.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    of_ranks = [line for line in found.splitlines() if "whole_batch[" in line]
    of_modes = [line for line in found.splitlines() if "bits_of_ddp[" in line]
    for name in DEVICES:
        assert any(name in line for line in of_ranks), (name, found)
        assert name == "late-3" or any(name in line for line in of_modes), (name, found)
    assert len(of_modes) < 6 * 7, "the whole matrix"
