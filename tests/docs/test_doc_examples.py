"""Docstrings of public names are complete, and their examples run as doctests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import example_ranks
import pytest
import torch
from public_api import PublicName, public_names

from ddpx.testing import RankFailed, RankPool

NAMES = public_names()
EXAMPLES = [name for name in NAMES if ">>>" in name.docstring]
OF_DDPX = [name for name in EXAMPLES if not name.name.startswith("ddpx.integrations.")]
# Pools start processes, which the ranks of a pool must not do.
IN_THIS_PROCESS = ("ddpx.testing.RankPool", "ddpx.testing.RankFailed")
RANK_1_IS_KILLED = ("ddpx.shrink", "ddpx.Shrunk", "ddpx.RankError", "ddpx.RankFailure")
RANK_1_IS_LATE = ("ddpx.RankStalled",)
BREAKS_THE_GROUP = ("ddpx.RankMismatch",)
ON_TWO_ACCELERATORS = ("ddpx.ReducerDDP.scatter", "ddpx.ReducerDDP.gather")


def _by_name(name: PublicName) -> str:
    return name.name


def test_there_are_public_names_of_every_module():
    assert len(NAMES) > 80
    for module in ("ddpx.health", "ddpx.testing", "ddpx.integrations.ray", "ddpx.timeline.model"):
        assert any(name.name.startswith(module) for name in NAMES), module


def test_each_public_function_has_an_example():
    missing = [name.name for name in NAMES if name.needs_example and ">>>" not in name.docstring]
    assert not missing, "docstrings without an example (>>>): " + ", ".join(missing)


@pytest.mark.parametrize("name", NAMES, ids=_by_name)
def test_docstring_has_a_summary_line_and_each_argument(name):
    assert re.match(r"[A-Z`].*[.:]$", name.docstring.split("\n\n")[0].replace("\n", " "))
    described = re.findall(r"^ {4}(\w+):", name.docstring, re.MULTILINE)
    assert [field for field in name.fields if field not in described] == []


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("name", OF_DDPX, ids=_by_name)
def test_example_of(
    name: PublicName, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = (name.name, name.docstring, str(tmp_path))
    if name.name in ON_TWO_ACCELERATORS and torch.accelerator.device_count() < 2:
        pytest.skip("the example needs two accelerators")
    if name.name.startswith(IN_THIS_PROCESS):
        failures = [example_ranks.run_example(*arguments)]
    elif name.name in RANK_1_IS_KILLED:
        # Rank 0 goes on without rank 1, however slow the machine is.
        monkeypatch.setattr("ddpx.testing.rank_pool._GRACE_S", 50)
        with RankPool(2) as broken, pytest.raises(RankFailed):
            broken.run(example_ranks.run_and_write, *arguments)
        failures = [(tmp_path / "failures").read_text()]
    elif name.name in RANK_1_IS_LATE:
        with RankPool(2) as broken:
            failures = broken.run(example_ranks.run_with_late_rank, *arguments)
    elif name.name in BREAKS_THE_GROUP:
        with RankPool(2) as broken:
            failures = broken.run(example_ranks.run_example, *arguments)
    else:
        failures = pool.run(example_ranks.run_example, *arguments)
    assert not any(failures), "\n".join(failures)
