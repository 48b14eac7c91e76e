"""Examples in the docstrings of ddpx.integrations, as doctests with the real libraries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import example_ranks
import pytest
from public_api import ADAPTERS, public_names

from ddpx.testing import RankPool

# Accelerate wraps models only if there are several ranks.
RANKS = {"accelerate": 2}


@pytest.mark.timeout(300)  # a rank takes seconds to import a library
@pytest.mark.parametrize("library", ADAPTERS)
def test_examples_of_adapter(library: str, tmp_path: Path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make setup` installs it")
    names = [n for n in public_names() if n.name.startswith(f"ddpx.integrations.{library}.")]
    examples = [name for name in names if ">>>" in name.docstring]
    assert examples
    with RankPool(RANKS.get(library, 1)) as pool:
        for name in examples:
            arguments = (name.name, name.docstring, str(tmp_path))
            failures = pool.run(example_ranks.run_under_launcher, *arguments, timeout=250)
            assert not any(failures), "\n".join(failures)
