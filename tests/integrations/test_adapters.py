"""ddpx.integrations with the real libraries: each trains as with DDP, bit for bit.

The versions are in the extra ``trainers`` of pyproject.toml.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli_process import run

from ddpx.timeline.export import trace_file

SCRIPTS = Path(__file__).parent / "adapters"
_UNDER_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
pytestmark = pytest.mark.timeout(300)  # a rank takes seconds to import a trainer library


@pytest.mark.parametrize(
    ("library", "script", "start", "compared"),
    [
        ("lightning", "with_lightning.py", _UNDER_TORCHRUN, 2),
        pytest.param(
            *("lightning", "with_fabric.py", _UNDER_TORCHRUN, 2), marks=pytest.mark.full_only
        ),
        ("accelerate", "with_accelerate.py", _UNDER_TORCHRUN, 1),
        pytest.param(  # the test of averages trains with this library, too
            *("transformers", "with_transformers.py", _UNDER_TORCHRUN, 1),
            marks=pytest.mark.full_only,
        ),
        # Ray starts a dozen processes. On a busy machine that takes minutes.
        pytest.param(
            *("ray", "with_ray.py", (), 1), marks=[pytest.mark.full_only, pytest.mark.alone]
        ),
    ],
)
def test_adapter_trains_as_with_ddp_over_shm_and_writes_a_timeline(
    library, script, start, compared, tmp_path
):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; `make setup` installs it")
    done = run(script, tmp_path, cwd=SCRIPTS, start=start, limit_s=280)
    # assert_code cannot be used: on a busy machine, Ray's own actors log tracebacks that they
    # recover from.
    assert done.returncode == 0, f"it printed:\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("identical over shm") >= 2 * compared, done.stdout
    ranks = trace_file.read(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        steps = {int(step) for _, step, *_ in rank.events}
        assert {0, 1} <= steps <= {0, 1, 2}, steps


def test_averages_over_tokens(tmp_path):
    for library in ("accelerate", "transformers"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed; `make setup` installs it")
    done = run("average_of_tokens.py", tmp_path, cwd=SCRIPTS, start=_UNDER_TORCHRUN, limit_s=280)
    assert done.returncode == 0, f"it printed:\n{done.stdout}\n{done.stderr}"
    for name in ("Trainer", "Accelerate"):
        assert done.stdout.count(f"{name}: as with DDP") == 2, done.stdout
